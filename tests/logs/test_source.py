"""What is wrong with a log's file, told in words that hold for every command that reads one."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.logs.source import explained, opened_log


def cut_gzip(folder: Path) -> Path:
    packed = folder / "cut.log.gz"
    packed.write_bytes(gzip.compress(os.urandom(200_000).hex().encode())[:50_000])
    return packed


@pytest.mark.parametrize("make", [cut_gzip, lambda folder: folder / "none.log", lambda folder: folder])
def test_a_hint_about_a_file_names_no_command(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = str(make(tmp_path))
    with pytest.raises(InputError) as caught, opened_log(path, path) as stream:
        stream.read()
    assert caught.value.hint
    assert "toto-compat" not in caught.value.hint


def test_a_hint_about_permissions_names_no_command() -> None:
    # raised by hand: root, who often runs tests in containers, may read every file
    with pytest.raises(InputError) as caught, explained("secret.log"):
        raise PermissionError(13, "Permission denied")
    assert caught.value.hint
    assert "toto-compat" not in caught.value.hint
