"""Whose time an interval of a run is, seen from outside: torch's, an installer's, or the harness's own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from toto_compat.bench import harness
from toto_compat.bench.harness import Watch, harness_share, maps_torch, second_job, watched_run
from toto_compat.contract.suites import Suite
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.load import load_matrix

# works when it is told to, and says when it has
ANSWERS = """
import sys
for line in sys.stdin:
    sum(number * number for number in range(2_000_000))
    print('worked', flush=True)
"""
MAPS = "import mmap; file = open({library!r}, 'r+b'); held = mmap.mmap(file.fileno(), 0)\n"
PASSES_ON = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {script!r}])\n"


@contextmanager
def worker(script: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.communicate(timeout=60)


def work(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("work\n")
    process.stdin.flush()
    assert process.stdout.readline() == "worked\n"


@pytest.fixture
def library(tmp_path: Path) -> str:
    path = tmp_path / "libtorch_cpu.so"
    path.write_bytes(bytes(4096))
    return str(path)


def watch_of_me() -> Watch:
    return Watch(os.getpid())


def test_a_process_that_mapped_torch_is_known_by_it(library: str) -> None:
    with worker(MAPS.format(library=library) + ANSWERS) as torch, worker(ANSWERS) as other:
        work(torch)
        work(other)
        assert maps_torch(torch.pid)
        assert not maps_torch(other.pid)


@pytest.mark.parametrize("below", [False, True], ids=["itself", "what it started"])
def test_an_interval_in_which_torch_worked_is_torchs_and_one_in_which_it_waited_is_not(
    library: str, below: bool
) -> None:
    script = MAPS.format(library=library) + (PASSES_ON.format(script=ANSWERS) if below else ANSWERS)
    watch = watch_of_me()
    with worker(script) as torch:
        work(torch)
        watch.look()
        assert (watch.intervals, watch.of_torch) == (1, 1)
        watch.look()
        assert (watch.intervals, watch.of_torch) == (2, 1)
        work(torch)
        watch.look()
        assert watch.share == pytest.approx(1 / 3)


def test_a_process_without_torch_is_the_harness_however_much_it_works() -> None:
    watch = watch_of_me()
    with worker(ANSWERS) as other:
        work(other)
        watch.look()
    assert watch.share == 1


def test_an_installer_is_not_the_harness() -> None:
    watch = watch_of_me()
    with worker(ANSWERS, "pip", "install") as installer:
        work(installer)
        watch.look()
    assert watch.share == 0


def test_a_watched_command_gives_its_exit_code_and_what_it_said(tmp_path: Path) -> None:
    watch, code, said = watched_run([sys.executable, "-c", "print('told'); raise SystemExit(7)"], tmp_path, every=0.01)
    assert (code, said) == (7, "told\n")
    assert watch.of_torch == 0


def test_two_jobs_are_compared_with_one_on_the_same_cells_without_what_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    clock = iter([0.0, 300.0, 1000.0, 1180.0])
    monkeypatch.setattr(harness, "time", SimpleNamespace(strftime=time.strftime, monotonic=lambda: next(clock)))

    def run(command: list[str], _: Path) -> tuple[Watch, int, str]:
        asked.append(command)
        matrix = load_matrix(Path(command[command.index("--matrix") + 1]))
        assert Suite.SPEED not in matrix.profiles["untimed"].suites
        assert matrix.profiles["untimed"].workloads == matrix.profiles["smoke"].workloads
        return Watch(1), 0, ""

    monkeypatch.setattr(harness, "watched_run", run)
    figure = second_job("torch-2.13.0-cpu", "smoke")
    assert (figure.name, figure.value, figure.goal) == ("matrix.jobs2_over_jobs1", 1.667, ">= 1.5")
    assert "300 s with --jobs 1, then 180 s with --jobs 2" in figure.method
    first, second = asked
    assert (first[-1], second[-1]) == ("1", "2")
    assert first[:-1] == second[:-1]
    assert "--fresh" in first


def test_a_run_that_fails_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "watched_run", lambda *_: (Watch(1), 6, "could not be run"))
    with pytest.raises(EnvironmentBuildError, match="exit code 6"):
        harness_share("torch-2.13.0-cpu", "smoke")
