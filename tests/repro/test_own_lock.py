"""The lock of an environment that only an incident has lies with the user, not in the project."""

from pathlib import Path

import pytest

from toto_compat.environments.locks import lock_on_the_spot, lock_path, own_lock_path, read_lock
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.load import load_matrix

ROOT = Path(__file__).parents[2]
ENVIRONMENT = load_matrix(ROOT / "matrix.yaml").environments["torch-2.13.0-cpu"]
NAME = "torch-2.13.0-cpu-incident-0123abcd"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))


def keep_lock() -> None:
    own_lock_path(NAME).parent.mkdir(parents=True)
    own_lock_path(NAME).write_text(lock_path("torch-2.13.0-cpu").read_text().replace("torch-2.13.0-cpu", NAME))


def test_a_lock_in_the_users_cache_is_found_and_not_made_again() -> None:
    keep_lock()
    lock_on_the_spot(NAME, ENVIRONMENT, pytest.fail)
    assert read_lock(NAME, ENVIRONMENT).version_of("torch").startswith("2.13.0")
    assert not lock_path(NAME).exists()


def test_a_lock_that_no_longer_fits_is_refused_there_too() -> None:
    keep_lock()
    changed = ENVIRONMENT.model_copy(update={"pins": {**ENVIRONMENT.pins, "numpy": "1.26.3"}})
    with pytest.raises(EnvironmentBuildError, match=r"stale: .*numpy==1\.26\.3"):
        read_lock(NAME, changed)


def test_without_any_lock_the_error_names_the_place_in_the_project() -> None:
    with pytest.raises(EnvironmentBuildError, match="has no lock"):
        read_lock(NAME, ENVIRONMENT)
