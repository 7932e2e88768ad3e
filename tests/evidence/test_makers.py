"""What a killed process left half-made is told by its name and removed; what anybody still makes is not."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from toto_compat.evidence import makers
from toto_compat.evidence.makers import (
    made_by_this_process,
    made_on_another_machine,
    made_on_this_machine,
    maker_lives,
    remove_abandoned,
)

NAME_OF_A_DEAD_ONE = "import toto_compat.evidence.makers as makers; print(makers.made_by_this_process())"


@pytest.fixture(scope="module")
def of_a_dead_one() -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", NAME_OF_A_DEAD_ONE], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_name_says_whether_its_maker_lives(of_a_dead_one: str) -> None:
    assert maker_lives(f".run.json{made_by_this_process()}abc.tmp")
    assert not maker_lives(f".run.json{of_a_dead_one}abc.tmp")


def test_a_number_that_another_process_has_now_is_not_its_maker() -> None:
    pid, start, machine = made_by_this_process().strip("-").split(".")
    assert not maker_lives(f".x-{pid}.{int(start) + 1}.{machine}-y.tmp")


@pytest.mark.parametrize("name", [".run.json-abc.tmp", "run.json", ".x-1.2.00000000-y.tmp"])
def test_of_another_machine_or_another_name_it_is_assumed(name: str) -> None:
    assert maker_lives(name)


def test_only_what_dead_ones_made_is_removed_wherever_it_lies(tmp_path: Path, of_a_dead_one: str) -> None:
    inside = tmp_path / "run" / "cells"
    (inside / f".staging{of_a_dead_one}x" / "deep").mkdir(parents=True)
    (inside / f".staging{of_a_dead_one}x" / "deep" / "file").touch()
    (inside / f".cell.json{of_a_dead_one}x.tmp").touch()
    kept = [inside / "cell.json", inside / f".cell.json{made_by_this_process()}x.tmp", inside / ".cell.json-x.tmp"]
    for path in kept:
        path.touch()
    removed = remove_abandoned(tmp_path)
    assert len(removed) == 2
    assert sorted(inside.iterdir()) == sorted(kept)
    assert remove_abandoned(tmp_path / "nowhere") == []


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path, of_a_dead_one: str) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    link = tmp_path / f".link{of_a_dead_one}x"
    link.symlink_to(tmp_path / "precious", target_is_directory=True)
    assert remove_abandoned(tmp_path) == [link]
    assert (tmp_path / "precious" / "file").exists()


def test_another_machine_is_one_of_another_name_and_another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    here = made_on_this_machine()
    assert not made_on_another_machine(f".x{here}y")
    assert not made_on_another_machine("of an earlier version")
    monkeypatch.setattr(platform, "node", lambda: "a container")
    assert not made_on_another_machine(here)
    monkeypatch.setattr(makers, "_boot", lambda: "another")
    assert made_on_another_machine(here)
    monkeypatch.undo()
    monkeypatch.setattr(makers, "_boot", lambda: "after it was started anew")
    assert not made_on_another_machine(here)


def test_a_zombie_does_not_live() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert makers.process_start(ended.pid) == ""
    ended.wait()
