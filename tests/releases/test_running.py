"""A virtualenv that was built for a look goes after it, whatever happens; one that was there stays."""

import os
from pathlib import Path

import pytest

from toto_compat.contract.request import Device
from toto_compat.environments.virtualenv import BuiltEnvironment, venv_folder, venv_python
from toto_compat.evidence.files import write_model
from toto_compat.matrix.load import load_matrix
from toto_compat.releases.running import pruned_after
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.seam import Runtime

MATRIX = load_matrix(Path(__file__).parents[2] / "matrix.yaml")
NAME = "torch-2.4.1-cu121"
ENVIRONMENT = MATRIX.environments[NAME]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    monkeypatch.delenv("PIP_NO_CACHE_DIR", raising=False)
    return open_runtime("venv", limits=MATRIX.limits, device=Device.CPU)


def build() -> Path:
    """Leave behind what a finished build leaves."""
    folder = venv_folder(NAME, ENVIRONMENT)
    venv_python(folder).parent.mkdir(parents=True)
    venv_python(folder).touch()
    built = BuiltEnvironment(
        name=NAME,
        environment=ENVIRONMENT,
        python="3.11.7",
        torch="2.4.1+cu121",
        cuda="12.1",
        distributions=(),
        lock="a" * 64,
        built="2026-11-17T10:00:00Z",
    )
    write_model(folder / "toto-compat.json", built)
    return folder


def test_what_was_built_for_the_look_is_removed_and_pip_kept_no_copy(runtime: Runtime) -> None:
    with pruned_after(MATRIX, NAME, runtime, keep=False):
        folder = build()
        assert runtime.lock_of(NAME, ENVIRONMENT) == "a" * 64
        assert os.environ["PIP_NO_CACHE_DIR"] == "1"
    assert not folder.exists()
    assert "PIP_NO_CACHE_DIR" not in os.environ


def test_it_is_removed_too_when_the_look_is_broken_off(runtime: Runtime) -> None:
    with pytest.raises(KeyboardInterrupt), pruned_after(MATRIX, NAME, runtime, keep=False):
        folder = build()
        raise KeyboardInterrupt
    assert not folder.exists()


def test_what_was_there_before_stays(runtime: Runtime) -> None:
    folder = build()
    with pruned_after(MATRIX, NAME, runtime, keep=False):
        assert "PIP_NO_CACHE_DIR" not in os.environ
    assert folder.exists()


def test_what_is_to_be_kept_stays(runtime: Runtime) -> None:
    with pruned_after(MATRIX, NAME, runtime, keep=True):
        folder = build()
    assert folder.exists()


def test_a_users_own_setting_of_pips_cache_is_left_alone(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "0")
    with pruned_after(MATRIX, NAME, runtime, keep=False):
        pass
    assert os.environ["PIP_NO_CACHE_DIR"] == "0"
