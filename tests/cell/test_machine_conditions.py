"""What is recorded of the machine: who computes, who waits, what is held back; and what it cannot tell."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from toto_compat.cell import machine_conditions as module
from toto_compat.cell.machine_conditions import machine_conditions
from toto_compat.cell.process_tree import cpu_ticks, tree_of

QUERY = "1980, 10501, 0x0000000000000041, 84, 97\n"
PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0    {own}     C     60     10      -      -      -      -    python
    0      99991     C     45     10      -      -      -      -    trading bot
    0      99992     G      -      -      -      -      -      -    Xorg
    0          -     -      -      -      -      -      -      -    -
"""


@contextmanager
def busy_process(*, ours: bool) -> Iterator[int]:
    """A Python that computes until it is ended; one that is not ours was started by a process that has gone."""
    spin = "while True: pass"
    launcher = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {spin!r}], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True).pid)"
    )
    if ours:
        with subprocess.Popen([sys.executable, "-c", spin]) as process:
            try:
                yield process.pid
            finally:
                process.kill()
        return
    started = subprocess.run([sys.executable, "-c", launcher], capture_output=True, text=True, check=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, 9)


def after_it_computed(pid: int, ticks: int = 100) -> None:
    """Return once a process has computed for that long, however busy the machine is."""
    start = cpu_ticks(pid)
    while cpu_ticks(pid) - start < ticks:
        pass


def spent(before: Any, after: Any, name: str) -> float:
    return float(after[name] - before[name])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ours", [False, True])
def test_what_another_process_computes_is_told_apart_from_ones_own(ours: bool) -> None:
    with busy_process(ours=ours) as pid:
        start, before = time.process_time(), machine_conditions()
        after_it_computed(pid)
        after, this_process = machine_conditions(), time.process_time() - start
        assert (pid in tree_of(os.getpid())) is ours
    busy, own = spent(before, after, "busy_s"), spent(before, after, "own_cpu_s")
    # half of the second that it computed: the kernel samples what it counts per core
    assert (own - this_process if ours else busy - own) >= 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_everything_that_is_recorded_can_be_stored_and_only_grows() -> None:
    before, after = machine_conditions(), machine_conditions()
    assert json.loads(json.dumps(after)) == after
    for name in ("clock_s", "busy_s", "stolen_s", "own_cpu_s"):
        assert after[name] >= before[name], name
    assert after["cores"] == len(os.sched_getaffinity(0))
    assert len(after["load_average"]) == 3 and after["runnable"] >= 1


def test_a_machine_that_tells_nothing_costs_no_timings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(module, "_lines", gone)
    monkeypatch.setattr(module, "_FIRST_CPU", tmp_path)
    conditions = machine_conditions()
    assert set(conditions) <= {"clock_s", "load_average", "own_cpu_s", "waited_for_a_core_s", "gpu", "gpu_processes"}


@pytest.mark.parametrize(
    ("membership", "place", "content"),
    [
        ("0::/user.slice/job\n", "user.slice/cpu.stat", "usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n"),
        ("4:cpu,cpuacct:/docker/ab\n", "cpu,cpuacct/cpu.stat", "nr_throttled 3\nthrottled_time 2500000000\n"),
        ("1:cpu:/\n0::/\n", "cpu/cpu.stat", "nr_throttled 3\nthrottled_time 2500000000\n"),
    ],
    ids=["version 2, an outer group", "version 1, the path of another namespace", "version 1, the root"],
)
def test_a_quota_is_found_in_the_control_group_or_one_around_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, place: str, content: str
) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(content)
    monkeypatch.setattr(module, "_CONTROL_GROUPS", tmp_path)
    real = module._lines
    monkeypatch.setattr(
        module, "_lines", lambda path: membership.splitlines() if path == "/proc/self/cgroup" else real(path)
    )
    assert machine_conditions()["throttled_s"] == 2.5


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A GPU that answers; the calls that were made."""
    calls: list[list[str]] = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        text = PMON.format(own=os.getpid()) if "pmon" in command else QUERY
        return subprocess.CompletedProcess(command, 0, stdout=text, stderr="")

    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return calls


def test_a_gpu_tells_why_it_holds_back_and_who_computes_on_it(
    nvidia_smi: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_sees_the_machines_processes", lambda: True)  # these tests may run in a container
    conditions = machine_conditions()
    assert conditions["gpu"]["throttled_by"] == ["gpu_idle", "hw_thermal_slowdown"]
    assert conditions["gpu"]["clocks.sm"] == "1980"
    told = [(one["name"], one["gpu_percent"], one["own"]) for one in conditions["gpu_processes"]]
    assert told == [("python", 60, True), ("trading bot", 45, False), ("Xorg", None, False)]
    assert all("--id=1" in call for call in nvidia_smi)


def test_an_older_driver_is_asked_by_the_older_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real call, to a program on PATH that knows only one of the two names."""
    for name, other in (module._HELD_BACK, module._HELD_BACK[::-1]):
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\ncase \"$*\" in *{other}*) echo 'Field is not a valid field to query.'; exit 2;; "
            f"*{name}*) echo '1980, 2619, 0x0000000000000040, 84, 97';; esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5c89852c")
        assert machine_conditions()["gpu"]["throttled_by"] == ["hw_thermal_slowdown"]


@pytest.mark.usefixtures("nvidia_smi")
def test_in_a_container_no_process_is_taken_for_its_own_by_a_number_of_another_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FIRST_NAMESPACE", "pid:[1]")
    assert [one["own"] for one in machine_conditions()["gpu_processes"]] == [None] * 3


@pytest.mark.usefixtures("nvidia_smi")
def test_a_cell_that_is_to_see_no_gpu_asks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "gpu" not in machine_conditions()


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize("answer", ["", "[Not Supported]", "1980, 10501, [N/A], 84, 97"])
def test_a_gpu_that_answers_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(module, "_nvidia_smi", lambda *_arguments: answer)
    conditions = machine_conditions()
    assert "gpu" not in conditions and conditions["clock_s"] > 0


@pytest.mark.usefixtures("nvidia_smi")
def test_a_gpu_that_does_not_answer_in_time_costs_no_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(subprocess, "run", too_slow)
    assert "gpu" not in machine_conditions()
