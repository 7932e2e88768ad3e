"""The switch: disable wins, the file beats the environment, and what is not understood switches nothing on."""

import os
from pathlib import Path

import pytest

from toto_compat.production.switch import Switch, SwitchReader, read_switch


def switch(tmp_path: Path, file: str | None, **environment: str) -> Switch:
    path = None
    if file is not None:
        path = tmp_path / ".env.compile"
        path.write_text(file, encoding="utf-8")
    return read_switch(path, environment)


@pytest.mark.parametrize("value", ["1", "true", "YES", " on ", "1\r", "2", "maybe", "$X"])
def test_disable_wins_from_either_side(tmp_path: Path, value: str) -> None:
    on = "export TOTO_COMPILE=1\nexport TOTO_DISABLE_COMPILE=0\n"
    assert switch(tmp_path, on, TOTO_DISABLE_COMPILE=value).eager_because
    line = value if value == "$X" else f"'{value}'"
    in_file = switch(tmp_path, f"export TOTO_DISABLE_COMPILE={line}\n", TOTO_DISABLE_COMPILE="0", TOTO_COMPILE="1")
    assert ".env.compile:1" in in_file.eager_because


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off", " 0 "])
def test_a_disable_that_is_off_disables_nothing(tmp_path: Path, value: str) -> None:
    assert switch(tmp_path, None, TOTO_DISABLE_COMPILE=value).eager_because == ""


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("on", True), ("0", False), ("", None), ("yes!", False)])
def test_compile_is_on_off_or_not_said(tmp_path: Path, value: str, asked: bool | None) -> None:
    assert switch(tmp_path, None, TOTO_COMPILE=value).compile is asked


def test_the_file_beats_the_environment_in_all_else(tmp_path: Path) -> None:
    found = switch(tmp_path, "TOTO_COMPILE_MODE=default\n", TOTO_COMPILE_MODE="max-autotune", TOTO_COMPILE_BACKEND="x")
    assert (found.mode, found.backend) == ("default", "x")
    assert found.decided_by["TOTO_COMPILE_MODE"].endswith(".env.compile:1")
    assert found.decided_by["TOTO_COMPILE_BACKEND"] == "the environment"


def test_an_unknown_mode_means_eager_and_is_named(tmp_path: Path) -> None:
    assert "TOTO_COMPILE_MODE=fastest" in switch(tmp_path, None, TOTO_COMPILE_MODE="fastest").eager_because


def test_a_file_that_was_named_and_is_not_there_means_eager(tmp_path: Path) -> None:
    assert "nothing is compiled" in read_switch(tmp_path / "gone", {"TOTO_COMPILE": "1"}).eager_because


def test_every_change_of_the_file_or_the_environment_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "env"
    environment: dict[str, str] = {}
    reader = SwitchReader(path, environment)
    assert reader.read().eager_because
    for value in "0101":
        before = path.stat() if path.exists() else None
        path.write_text(f"TOTO_DISABLE_COMPILE={value}\n", encoding="ascii")
        if before:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a clock of coarse steps
        assert bool(reader.read().eager_because) == (value == "1")
    path.write_text("", encoding="ascii")
    assert not reader.read().eager_because
    environment["TOTO_DISABLE_COMPILE"] = "1"
    assert reader.read().eager_because
    del environment["TOTO_DISABLE_COMPILE"]
    assert not reader.read().eager_because
    path.unlink()
    assert reader.read().eager_because


def test_what_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("TOTO_COMPILE=1\n", encoding="ascii")
    os.utime(path, (0, 0))
    reader = SwitchReader(path, {})
    assert reader.read() is reader.read()
