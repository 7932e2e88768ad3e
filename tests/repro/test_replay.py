"""A bundle from elsewhere reaches nothing outside of itself, says what it brings, and its mistakes are its own."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from toto_compat.environments.locks import lock_path, own_lock_path, read_lock
from toto_compat.errors import BundleError
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.archive import write_bundle
from toto_compat.repro.command import repro_command
from toto_compat.repro.replay import replayed

ROOT = Path(__file__).parents[2]
PLAIN = load_matrix(ROOT / "matrix.yaml").environments["torch-2.13.0-cpu"]
NAME = "torch-2.13.0-cpu-incident-0123abcd"
LOCK = lock_path("torch-2.13.0-cpu").read_text(encoding="utf-8").replace("torch-2.13.0-cpu", NAME).encode()
INCIDENT = {
    "schema": 1,
    "title": "limit",
    "date": "2025-10-30",
    "source": "log /var/log/../bot.log",
    "environment": NAME,
    "cache": "upstream",
    "expect": [{"kind": "recompile_limit"}],
}
PINS = {"python": "3.11", "torch": "2.13.0", "cuda": "cpu"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()


def bundle(
    tmp_path: Path,
    *,
    incident: dict[str, object] | None = None,
    caches: dict[str, object] | None = None,
    environment: dict[str, object] | None = None,
    shows: str = "REPRODUCED",
    **files: bytes,
) -> Path:
    """A bundle as somebody else could have made it: every hash is right."""
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["environments"] = {NAME: {**PLAIN.model_dump(mode="json", exclude_defaults=True), **(environment or {})}}
    matrix |= {"production": NAME, "caches": {**matrix["caches"], **(caches or {})}}
    members = {
        "incident.yaml": yaml.safe_dump({**INCIDENT, **(incident or {})}).encode(),
        "matrix.yaml": yaml.safe_dump(matrix, sort_keys=False).encode(),
        **{name.replace("__", "/").replace("_py", ".py").replace("_txt", ".txt"): text for name, text in files.items()},
    }
    target = tmp_path / "b.zip"
    target.unlink(missing_ok=True)
    write_bundle(target, {"made_by": "1", "cell": "x", "shows": shows}, members)
    return target


def refused(path: Path) -> BundleError:
    with pytest.raises(BundleError) as caught, replayed(path):
        pytest.fail("it would be run")
    assert "bundle-" not in str(caught.value)  # the folder that it was unpacked in is gone
    return caught.value


@pytest.mark.parametrize(
    ("incident", "caches"),
    [
        ({"log": "../../../etc/passwd"}, {}),
        ({"log": "/etc/passwd"}, {}),
        ({"environment": "", "pins": {"python": "3.11", "freeze": "../../etc/passwd"}}, {}),
        ({"workload": {"csv": {"path": "/etc/passwd", "time_column": "a", "value_columns": ["b"]}}}, {}),
        ({"workload": {"checkpoint": "~/weights"}}, {}),
        ({"environment": "", "pins": {**PINS, "toto_ts": "/srv/toto"}}, {}),
        ({}, {"mine": {"source": "../../bot/cache.py:Mine"}}),
        ({"environment": "", "pins": {**PINS, "toto_ts": f"git+file:///srv/toto@{'0' * 40}"}}, {}),
        ({"environment": "", "pins": {**PINS, "index": "FILE:///srv/wheels"}}, {}),
    ],
)
def test_a_bundle_that_names_files_outside_of_itself_is_refused(
    tmp_path: Path, incident: dict[str, object], caches: dict[str, object]
) -> None:
    told = refused(bundle(tmp_path, incident=incident, caches=caches)).message
    assert "which is not in the bundle" in told
    assert "root:" not in told


def test_code_and_indexes_that_a_bundle_brings_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    brings = bundle(
        tmp_path,
        caches={"mine": {"source": "x/evil.py:C"}},
        environment={
            "index": "https://index.example/simple",
            "toto_ts": f"git+https://git.example/toto@{commit}",
            "base_image": "elsewhere/image:1",
        },
        x__evil_py=b"class C:\n    pass\n",
        shows="REPRODUCED\nerror: all is lost",
    )
    with replayed(brings):
        told = capsys.readouterr().err
    assert "it brings code of its own: the cache mine (x/evil.py:C)" in told
    assert "torch is asked for at https://index.example/simple" in told
    assert f"a toto-ts of its own: git+https://git.example/toto@{commit}" in told
    assert "its container is built on elsewhere/image:1" in told
    assert "\nerror:" not in told
    with replayed(bundle(tmp_path)):
        told = capsys.readouterr().err
    assert "of its own" not in told and "is built on" not in told


def test_an_index_that_is_not_asked_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index: dict[str, object] = {"index": "https://index.example/simple"}
    with replayed(bundle(tmp_path, environment=index, wheels__none_txt=b"")):
        told = capsys.readouterr().err
    assert "no package index is asked" in told and "index.example" not in told


def test_the_lock_of_a_bundle_holds_while_it_is_run_and_no_longer(tmp_path: Path) -> None:
    with replayed(bundle(tmp_path, environment__lock_txt=LOCK)) as to_run:
        assert to_run.matrix_file is not None
        environment = load_matrix(to_run.matrix_file).environments[NAME]
        assert read_lock(NAME, environment).environment_name == NAME
    assert not own_lock_path(NAME).exists()


@pytest.mark.parametrize(
    "lock",
    [
        LOCK.replace(b"# asked: torch==2.13.0", b"# asked: torch==2.12.0"),
        b"\xff",
        LOCK.replace(b"  # numpy", b"  # ../n"),
    ],
)
def test_a_lock_that_does_not_fit_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], lock: bytes) -> None:
    assert lock != LOCK
    with replayed(bundle(tmp_path, environment__lock_txt=lock)):
        assert not own_lock_path(NAME).exists()
    assert "the bundle's lock is not used" in capsys.readouterr().err


def test_a_lock_of_the_users_own_stays(tmp_path: Path) -> None:
    own_lock_path(NAME).parent.mkdir(parents=True)
    own_lock_path(NAME).write_bytes(LOCK + b"\n")
    with replayed(bundle(tmp_path, environment__lock_txt=LOCK)):
        pass
    assert own_lock_path(NAME).read_bytes() == LOCK + b"\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"environment__packages_txt": b"torch==2.13.0\n\xff\n"}, "environment/packages.txt is no text"),
        ({"incident": {"cache": "no_such"}}, "b.zip: incident.yaml:"),
        ({"incident": {"expect": []}}, "b.zip: incident.yaml:"),
        ({"incident": {"expect": [{"kind": ["recompile"]}]}}, "b.zip: incident.yaml:"),
        ({"incident": {"raised": [{"suite": ["recompile"]}, 1]}}, "b.zip: incident.yaml:"),
        ({"incident": {"iterations": 99999999999999999999}}, "iterations"),
        ({"incident": {"title": "x y" * 1_000_000}}, "b.zip: incident.yaml: 3 MB, larger than any"),
        ({"environment": {"torch": "newest"}}, "b.zip: matrix.yaml:"),
        ({"caches": {"mine": {"source": "x/none.py:C"}}}, "b.zip: matrix.yaml:"),
    ],
)
def test_a_mistake_in_a_bundle_is_told_as_the_bundles_own(
    tmp_path: Path, change: dict[str, dict[str, object]], told: str
) -> None:
    assert told in refused(bundle(tmp_path, **change)).message  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "told"), [("folder", "a folder, not a file"), ("offset", "an offset is wrong")])
def test_what_is_no_bundle_is_not_told_as_a_full_disk(tmp_path: Path, kind: str, told: str) -> None:
    path = tmp_path / "x.zip"
    if kind == "folder":
        path.mkdir()
    else:
        content = bytearray(bundle(tmp_path).read_bytes())
        content[-6:-2] = (len(content) + 10).to_bytes(4, "little")  # where the list of members begins
        path.write_bytes(content)
    run = CliRunner().invoke(repro_command, [str(path)])
    assert isinstance(run.exception, BundleError)
    assert told in run.exception.message
    assert "space" not in run.exception.hint


@pytest.mark.parametrize(
    ("incident", "caches"),
    [
        ({"log": "n" * 300}, {}),
        ({"log": "\u00e4" * 130}, {}),
        ({"workload": {"checkpoint": "n" * 300}}, {}),
        ({}, {"mine": {"source": f"{'n' * 300}.py:Mine"}}),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_none_in_the_bundle(
    tmp_path: Path, incident: dict[str, object], caches: dict[str, object]
) -> None:
    assert "which is not in the bundle" in refused(bundle(tmp_path, incident=incident, caches=caches)).message
