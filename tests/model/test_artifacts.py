"""Artifacts on disk: for their key alone, never loaded if damaged, and inductor's folder is only borrowed."""

import os
from pathlib import Path

import pytest

from toto_compat.contract.bucket_messages import ARTIFACT_LOGGER
from toto_compat.errors import InputError
from toto_compat.model.artifact_file import ArtifactFile
from toto_compat.model.artifacts import SUFFIX, Artifacts

KEY = {"torch": "2.13.0", "mode": "default"}


def put(artifacts: Artifacts, name: str, content: bytes) -> None:
    """Compile something, as far as the folder can tell."""
    with artifacts.compiling():
        path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def found(artifacts: Artifacts) -> dict[str, bytes]:
    with artifacts.compiling():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder in which something is kept for KEY."""
    put(Artifacts(tmp_path / "kept", KEY), "ab/kernel.main.so", b"code")
    return tmp_path / "kept"


def the_file(kept: Path) -> Path:
    (file,) = kept.glob(f"*{SUFFIX}")
    return file


def test_what_was_compiled_is_there_for_the_same_key_alone(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert found(Artifacts(kept, KEY)) == {"ab/kernel.main.so": b"code"}
    caplog.clear()
    assert found(Artifacts(kept, KEY | {"torch": "2.14.0"})) == {}
    (line,) = [record.getMessage() for record in caplog.records if record.name == ARTIFACT_LOGGER]
    assert line.endswith("compiling cold: torch is '2.14.0', kept is '2.13.0'")


def test_locks_and_half_made_files_are_not_kept(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path / "kept", KEY)
    for name in ("locks/a.lock", "ab/.1.2.tmp", "ab/kernel.main.o"):
        put(artifacts, name, b"")
    assert not list((tmp_path / "kept").iterdir())


def test_the_users_own_folders_for_inductor_and_triton_are_only_borrowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    artifacts = Artifacts(tmp_path / "kept", KEY)
    with pytest.raises(RuntimeError), artifacts.compiling():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "own" / "toto-compat-"))
        raise RuntimeError("a compile that fails")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    assert "TRITON_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("damage", ["cut off", "one bit", "empty", "another format", "of another key", "a folder"])
def test_a_damaged_file_is_ignored_with_its_reason_and_replaced(
    kept: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = the_file(kept)
    content = file.read_bytes()
    changed = {
        "cut off": content[:-1],
        "one bit": content.replace(b"code", b"code"[:-1] + b"d"),
        "empty": b"",
        "another format": content.replace(b"artifacts 1", b"artifacts 2"),
        "of another key": ArtifactFile(KEY | {"mode": "max-autotune"}, {"ab/kernel.main.so": b"evil"}).to_bytes(),
    }
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    else:
        file.write_bytes(changed[damage])
        file.chmod(0o600)
    caplog.clear()
    artifacts = Artifacts(kept, KEY)
    assert found(artifacts) == {}
    assert "compiling cold, the file is ignored: " in caplog.text
    put(artifacts, "ab/kernel.main.so", b"code")
    if damage == "a folder":
        assert "nothing was written: " in caplog.text
    else:
        assert found(Artifacts(kept, KEY)) == {"ab/kernel.main.so": b"code"}


def test_a_folder_that_becomes_writable_for_others_gets_nothing_more(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts, before = Artifacts(kept, KEY), the_file(kept).read_bytes()
    kept.chmod(0o777)
    put(artifacts, "new", b"")
    assert "nothing was written: others can write to the folder" in caplog.text
    assert the_file(kept).read_bytes() == before


def test_a_private_folder_below_one_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "open"))
    with pytest.raises(InputError, match="inductor needs a folder of this process's own"):
        Artifacts(tmp_path / "kept", KEY)


def test_files_that_cannot_be_unpacked_are_left_and_compiled_cold(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    the_file(kept).write_bytes(ArtifactFile(KEY, {"a": b"file", "a/b": b"below a file"}).to_bytes())
    assert found(Artifacts(kept, KEY)) == {}
    assert "compiling cold, " in caplog.text
