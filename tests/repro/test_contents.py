"""What goes into a bundle can be run and installed again, and has no secret in it."""

import ast
from pathlib import Path

import pytest

from tests.verdict.sample_cells import production_incident
from toto_compat.contract.request import CacheRequest
from toto_compat.contract.result import CellResult
from toto_compat.environments.locks import lock_path, own_lock_path
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.contents import Contents, add_script, gather
from toto_compat.repro.incident import load_incident

ROOT = Path(__file__).parents[2]
MATRIX = load_matrix(ROOT / "matrix.yaml")
INCIDENT = load_incident(ROOT / "incidents" / "2025-10-30-recompile-limit.yaml").model_copy(update={"log": None})
PINNED = "torch-2.13.0-cpu-incident-0123abcd"
CACHE = """\
from toto.model.util import KVCache

API_KEY = "LEAK99"


class Mine(KVCache):
    def __init__(self, **given):
        self.token = given.get("x")
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))


def gathered(result: CellResult) -> Contents:
    return gather(INCIDENT, ROOT, result, MATRIX, log=None, command=["toto-compat"], shows="REPRODUCED")


def changed(*, packages: dict[str, str] | None = None, **request: object) -> CellResult:
    result = production_incident()
    provenance = result.provenance.model_copy(update={"packages": packages} if packages else {})
    return result.model_copy(
        update={"request": result.request.model_copy(update=request), "provenance": provenance},
    )


def test_a_users_cache_and_the_script_with_it_are_code_without_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "mycache.py").write_text(CACHE, encoding="utf-8")
    result = changed(cache=CacheRequest(name="mine", source=f"{tmp_path}/mycache.py:Mine"))
    contents = gathered(result)
    script = add_script(contents, INCIDENT, result)
    for code in (script, contents.files["minimal.py"].decode(), contents.files["cache/mycache.py"].decode()):
        assert "LEAK99" not in code
        assert 'self.token = given.get("x")' in code
        ast.parse(code)
    assert any("cache/mycache.py" in note for note in contents.notes)


def test_the_lock_that_was_made_for_an_incidents_own_pins_goes_in() -> None:
    own_lock_path(PINNED).parent.mkdir(parents=True)
    text = lock_path("torch-2.13.0-cpu").read_text(encoding="utf-8").replace("torch-2.13.0-cpu", PINNED)
    own_lock_path(PINNED).write_text(text, encoding="utf-8")
    cell = production_incident().cell
    pinned = changed(cell=type(cell).of(PINNED, cell.cache, cell.mode, "incident"))
    assert gathered(pinned).files["environment/lock.txt"].decode() == text


@pytest.mark.parametrize(("numpy", "told"), [("1.26.4", False), ("1.26.3", True)])
def test_a_lock_that_is_not_what_ran_is_told(numpy: str, told: bool) -> None:
    notes = gathered(changed(packages={"numpy": numpy})).notes
    assert any("numpy 1.26.4 in it, 1.26.3 when it ran" in note for note in notes) is told
