"""What goes into a bundle can be run and installed again, and has no secret in it."""

import ast
import gzip
import os
from pathlib import Path

import pytest

from tests.verdict.sample_cells import production_incident
from toto_compat.contract.request import CacheRequest, CellRequest, CsvSeries
from toto_compat.contract.result import CellResult
from toto_compat.environments.locks import lock_path, own_lock_path
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.contents import Contents, add_script, gather, log_text
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


def test_what_the_cell_was_asked_goes_in_as_it_can_be_asked_again_there(tmp_path: Path) -> None:
    (tmp_path / "mycache.py").write_text(CACHE, encoding="utf-8")
    contents = gathered(
        changed(
            cache=CacheRequest(name="mine", source=f"{tmp_path}/mycache.py:Mine"),
            quiet_lock=str(tmp_path / "quiet.lock"),
            csv=CsvSeries(path=str(tmp_path / "prices.csv"), time_column="t", value_columns=("close",)),
            checkpoint_folder=str(tmp_path / "weights"),
            variables={"OMP_NUM_THREADS": "1", "HF_TOKEN": "LEAK99"},
        )
    )
    text = contents.files["request.json"].decode()
    asked = CellRequest.model_validate_json(text)
    assert asked.workload == production_incident().request.workload
    assert asked.cache.source == "cache/mycache.py:Mine" and "cache/mycache.py" in contents.files
    assert str(tmp_path) not in text and "LEAK99" not in text
    assert "request.json result.json" in contents.files["command.txt"].decode()


@pytest.mark.parametrize("kind", ["release", "commit", "checkout", "repository"])
def test_a_toto_ts_that_no_replay_finds_is_told_when_the_bundle_is_made(kind: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    toto_ts = {
        "release": "0.2.0",
        "commit": f"git+https://host/fork@{'0' * 40}",
        "checkout": str(tmp_path),
        "repository": f"git+file://{tmp_path}@{'0' * 40}",
    }[kind]
    environment = production_incident().request.environment.model_copy(update={"toto_ts": toto_ts})
    notes = gathered(changed(environment=environment)).notes
    assert any("every replay refuses the bundle" in note for note in notes) is (kind in ("checkout", "repository"))


LINES = "".join(f"line {number}: nothing of interest happened here at all\n" for number in range(50_000))
BODY = f"{'LEAK99' * 10}\n" * 200
KEY = f"-----BEGIN PRIVATE KEY-----\n{BODY}-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_long_log_the_beginning_and_the_end_go_in_without_their_secrets(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toto_compat.repro.contents._LARGEST_LOG", 1 << 20)
    # a key lies over both places at which the log is cut
    whole = LINES[: (1 << 19) - 5000] + KEY + LINES[1 << 19 :]
    end = len(whole) - (1 << 19)
    whole = f"first\n{whole[: end - 5000]}\n{KEY}{whole[end + 7000 :]}last\n"
    log = tmp_path / "cell.log"
    log.write_bytes(gzip.compress(whole.encode(), 1) if packed else whole.encode())
    text = log_text(log)
    assert text is not None
    assert text.startswith("first\nline 0: ") and text.endswith("last\n")
    assert "MB of the log were left out here" in text
    assert "LEAK99" not in text
    assert (900 << 10) < len(text) < (1100 << 10)


def test_a_short_log_goes_in_whole_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "cell.log").write_text("one\nHF_TOKEN=LEAK99\n", encoding="utf-8")
    assert log_text(tmp_path / "cell.log") == "one\nHF_TOKEN=<redacted>\n"
    os.mkfifo(tmp_path / "pipe.log")
    assert log_text(tmp_path / "gone.log") is log_text(tmp_path / "pipe.log") is None
    assert any("log is not kept any more" in note for note in gathered(production_incident()).notes)


@pytest.mark.parametrize(("numpy", "told"), [("1.26.4", False), ("1.26.3", True)])
def test_a_lock_that_is_not_what_ran_is_told(numpy: str, told: bool) -> None:
    notes = gathered(changed(packages={"numpy": numpy})).notes
    assert any("numpy 1.26.4 in it, 1.26.3 when it ran" in note for note in notes) is told


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_what_was_appended_to_a_log_in_another_encoding_has_no_secret_either(tmp_path: Path, encoding: str) -> None:
    appended = "API_TOKEN=LEAK99x\r\npassword: LEAK99y!\r\nhf_LEAK99abcdefghijklmnopqrstuv\r\n"
    (tmp_path / "cell.log").write_bytes(LINES[:10_000].encode() + appended.encode(encoding))
    text = log_text(tmp_path / "cell.log")
    assert text is not None and text.startswith("line 0: ")
    assert "LEAK99" not in text.replace("\0", "")
    assert "\0" not in text and text.count("<redacted>") == 3


LATIN = CACHE.replace('"LEAK99"', '"Stra\u00dfe"')


@pytest.mark.parametrize("secret", [False, True])
def test_a_users_cache_is_read_in_the_encoding_that_it_names(tmp_path: Path, secret: bool) -> None:
    text = f"# -*- coding: latin-1 -*-\n{LATIN.replace('API_KEY', 'API_KEY' if secret else 'STREET')}"
    (tmp_path / "mycache.py").write_bytes(text.encode("latin-1"))
    result = changed(cache=CacheRequest(name="mine", source=f"{tmp_path}/mycache.py:Mine"))
    contents = gathered(result)
    script = add_script(contents, INCIDENT, result)
    assert ("Stra\u00dfe" in script) is not secret
    put = contents.files["cache/mycache.py"]
    assert put == text.replace("Stra\u00dfe", "<redacted>" if secret else "Stra\u00dfe").replace(
        '"<redacted>"', "'<redacted>'"
    ).encode("latin-1")
    assert any("secrets were taken out" in note for note in contents.notes) is secret


def test_a_letter_that_an_encoding_lacks_stays_the_escape_that_it_was(tmp_path: Path) -> None:
    text = "# coding: ascii\n" + LATIN.replace('"Stra\u00dfe"', '1\nNOTE = "\\u03b1 password=LEAK99"')
    (tmp_path / "mycache.py").write_bytes(text.encode("ascii"))
    contents = gathered(changed(cache=CacheRequest(name="mine", source=f"{tmp_path}/mycache.py:Mine")))
    assert "NOTE = '\\u03b1 password=<redacted>'" in contents.files["cache/mycache.py"].decode("ascii")


def test_a_log_whose_name_is_too_long_is_none(tmp_path: Path) -> None:
    assert log_text(tmp_path / ("n" * 300)) is None
