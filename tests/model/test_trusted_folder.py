"""Whoever could put code into the folder, or in its way, makes it refused."""

import os
import threading
from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.model.artifact_file import ArtifactFile, DamagedError
from toto_compat.model.trusted_folder import (
    UntrustedError,
    make_trusted_folder,
    read_trusted,
    trust_folder,
    write_trusted,
)

SOMEBODY = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of somebody else")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "parent" / "kept"
    made.mkdir(parents=True, mode=0o700)
    return made


def test_a_folder_of_ours_alone_is_trusted_and_made_for_us_alone(folder: Path) -> None:
    assert trust_folder(folder) == folder
    made = make_trusted_folder(folder / "new" / "newer")
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777, 0o720])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(UntrustedError, match=f"others can write to the folder {folder} .mode {mode:04o}"):
        trust_folder(folder)


def test_a_parent_that_others_can_write_to_is_refused_but_for_a_sticky_one(folder: Path) -> None:
    folder.parent.chmod(0o777)
    for asked in (folder, folder / "new"):
        with pytest.raises(UntrustedError, match=f"folder {folder.parent} "):
            make_trusted_folder(asked)
    assert not (folder / "new").exists()
    folder.parent.chmod(0o1777)
    assert trust_folder(folder) == folder


def test_links_are_followed_to_folders_that_must_be_trusted_themselves(folder: Path, tmp_path: Path) -> None:
    link, loop = tmp_path / "link", tmp_path / "loop"
    link.symlink_to("parent/../parent/kept")
    loop.symlink_to(loop)
    assert trust_folder(link) == folder
    folder.parent.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"folder {folder.parent} "):
        trust_folder(link)
    with pytest.raises(InputError, match="too many links"):
        trust_folder(loop)


@root_only
def test_what_belongs_to_somebody_else_is_refused_link_folder_parent_and_file(folder: Path, tmp_path: Path) -> None:
    file, link = folder / "file", tmp_path / "link"
    file.write_bytes(b"")
    file.chmod(0o600)
    link.symlink_to(folder)
    for path, look in ((link, link), (folder, folder), (folder.parent, folder)):
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
        with pytest.raises(UntrustedError, match=f"{path} belongs to user {SOMEBODY}"):
            trust_folder(look)
        os.chown(path, 0, 0, follow_symlinks=False)
    os.chown(file, SOMEBODY, SOMEBODY)
    with pytest.raises(UntrustedError, match=f"{file} belongs to user {SOMEBODY}"):
        read_trusted(file)


def test_a_file_that_others_can_write_to_a_link_and_a_pipe_are_not_read(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(b"code")
    file.chmod(0o620)
    with pytest.raises(UntrustedError, match=f"others can write to the file {file}"):
        read_trusted(file)
    file.chmod(0o600)
    assert read_trusted(file) == b"code"
    (folder / "link").symlink_to(file)
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(OSError):
            read_trusted(folder / name)


def test_two_writers_at_once_leave_a_whole_file_and_nothing_else(folder: Path) -> None:
    file = folder / "file"
    contents = [ArtifactFile({"writer": str(one)}, {"a": bytes([one]) * 200_000}).to_bytes() for one in (1, 2)]
    write_trusted(file, contents[0])

    def write(content: bytes) -> None:
        for _ in range(10):
            write_trusted(file, content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read_trusted(file) in contents
    assert list(folder.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["../evil.so", "/evil.so", "a/../../evil.so", ""])
def test_a_file_cannot_name_a_place_outside(name: str) -> None:
    with pytest.raises(DamagedError, match="list of files cannot be read"):
        ArtifactFile.from_bytes(ArtifactFile({}, {name: b"evil"}).to_bytes())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = ArtifactFile({"torch": "2.13.0"}, {"ab/c.so": b"\0\n", "d": b""})
    assert ArtifactFile.from_bytes(file.to_bytes()) == file
    file.unpack(tmp_path)
    assert (tmp_path / "ab" / "c.so").read_bytes() == b"\0\n"
