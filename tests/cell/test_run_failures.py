"""Whatever a group does to itself - crash, hang, lack memory, leave nonsense - the cell has a result."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cell.stand_in_groups import MODEL_FAILED, Groups, good_result, request_in, run
from toto_compat.cell import group_process
from toto_compat.cell.gathering import evidence_of
from toto_compat.cell.group import GroupResult
from toto_compat.cell.group_process import Collected, GroupRun, Starter, finish_group, start_group
from toto_compat.cell.run import InterruptedCellError, seconds_allowed
from toto_compat.contract.result import Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite


def test_a_group_that_crashes_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    script = "import os, signal; print('half way', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    result = run(tmp_path, Groups({Group.COMPARE: script}))
    for suite in (Suite.EQUIVALENCE, Suite.DETERMINISM):
        evidence = result.evidence[suite]
        assert evidence.outcome is Outcome.ERROR
        assert evidence.failure is not None
        assert evidence.failure.kind == "crash"
        assert "SIGSEGV" in evidence.failure.message
        assert "half way" in evidence.failure.last_lines
    assert result.evidence[Suite.SPEED].outcome is Outcome.MEASURED


# A result of the first of the group's suites, as a group leaves it that goes on with the second.


HALF_A_RESULT = GroupResult(
    evidence={Suite.EQUIVALENCE: SuiteEvidence(suite=Suite.EQUIVALENCE, outcome=Outcome.MEASURED)}
).model_dump_json()


def test_a_crash_costs_only_the_suites_that_were_not_finished(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        f"pathlib.Path(sys.argv[1]).write_text({HALF_A_RESULT!r})\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    evidence = run(tmp_path, Groups({Group.COMPARE: script})).evidence
    assert evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED
    assert evidence[Suite.DETERMINISM].outcome is Outcome.ERROR
    assert "SIGSEGV" in str(evidence[Suite.DETERMINISM].failure)


def test_a_crash_after_the_last_suite_costs_nothing(tmp_path: Path) -> None:
    whole = good_result(Group.COMPARE).model_dump_json()
    script = f"import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text({whole!r}); os.abort()"
    evidence = run(tmp_path, Groups({Group.COMPARE: script})).evidence
    assert evidence[Suite.DETERMINISM].outcome is Outcome.MEASURED


class HalfWay:
    """Starts a stand-in for a process that is half way when waiting for it ends with an error."""

    pid = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def start(self, _run: GroupRun, output: Path, log: Path, **_: object) -> "HalfWay":
        output.write_text(HALF_A_RESULT)
        log.touch()
        return self

    def wait(self, **_: object) -> int:
        raise self._error


def collected_half_way(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Collected:
    monkeypatch.setattr(group_process, "kill_group", lambda _process: -signal.SIGKILL)
    collected = Collected()
    request, equivalence = request_in(folder), GroupRun(Group.COMPARE)
    try:
        started = start_group(request, equivalence, HalfWay(error))  # type: ignore[arg-type]
        finish_group(request, started, collected, end=time.monotonic() + 60.0)
    except InterruptedCellError:
        assert isinstance(error, InterruptedCellError)
    return collected


def test_a_timeout_costs_only_the_suites_that_were_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = collected_half_way(tmp_path, subprocess.TimeoutExpired("group", 60.0), monkeypatch)
    assert collected.results["compare"].tells_of(Suite.EQUIVALENCE)
    assert collected.failures["compare"].kind == "timeout"
    runs = [GroupRun(Group.COMPARE)]
    assert evidence_of(Suite.EQUIVALENCE, collected, runs).outcome is Outcome.MEASURED
    assert evidence_of(Suite.DETERMINISM, collected, runs).outcome is Outcome.ERROR


def test_a_stop_costs_only_the_suites_that_were_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = collected_half_way(tmp_path, InterruptedCellError(), monkeypatch)
    runs = [GroupRun(Group.COMPARE)]
    assert evidence_of(Suite.EQUIVALENCE, collected, runs).outcome is Outcome.MEASURED
    assert evidence_of(Suite.DETERMINISM, collected, runs).outcome is Outcome.NOT_RUN


def test_a_group_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    collected = Collected()
    groups = Groups({Group.OBSERVE: "import signal; signal.pause()"})
    observe = GroupRun(Group.OBSERVE)
    request = request_in(tmp_path)
    starter = Starter(request, tmp_path / "request.json", groups)
    finish_group(request, start_group(request, observe, starter), collected, end=time.monotonic() + 0.5)
    assert not collected.results
    assert collected.failures["observe"].kind == "timeout"
    assert "timeout_minutes" in collected.failures["observe"].message


def test_a_group_that_hangs_leaves_time_for_the_others() -> None:
    assert seconds_allowed(600.0, groups_left=5) == 300.0
    assert seconds_allowed(300.0, groups_left=1) == 300.0
    assert seconds_allowed(-5.0, groups_left=2) == 0.0


def test_running_out_of_memory_is_told_apart_from_a_crash(tmp_path: Path) -> None:
    result = run(tmp_path, Groups({Group.SPEED: "raise MemoryError('no more')"}))
    failure = result.evidence[Suite.SPEED].failure
    assert failure is not None
    assert failure.kind == "out_of_memory"


def test_a_kernel_kill_for_memory_is_told_apart_from_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter(range(1000))
    monkeypatch.setattr(group_process, "out_of_memory_kills", lambda: next(kills))
    result = run(tmp_path, Groups({Group.SPEED: "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}))
    failure = result.evidence[Suite.SPEED].failure
    assert failure is not None
    assert failure.kind == "out_of_memory"
    assert "SIGKILL" in failure.message


def test_a_forecast_that_raised_beside_a_kernel_kill_for_memory_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([0, 1, *[1] * 100])  # the first group's alone
    monkeypatch.setattr(group_process, "out_of_memory_kills", lambda: next(kills))
    groups = Groups(results={Group.OBSERVE: GroupResult(evidence={Suite.RECOMPILE: MODEL_FAILED})})
    result = run(tmp_path, groups)
    evidence = result.evidence[Suite.RECOMPILE]
    assert evidence.outcome is Outcome.ERROR
    assert evidence.failure is not None
    assert evidence.failure.kind == "out_of_memory"
    assert "IndexError" in evidence.failure.message
    assert result.evidence[Suite.SPEED].outcome is Outcome.MEASURED


@pytest.mark.parametrize("left", ["", '{"evidence"', '{"unknown": 1}'])
def test_a_result_that_cannot_be_read_is_an_error(tmp_path: Path, left: str) -> None:
    script = f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({left!r})"
    result = run(tmp_path, Groups({Group.CUDAGRAPH: script}))
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.ERROR


def test_an_old_result_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "observe.json").write_text(good_result(Group.OBSERVE).model_dump_json())
    result = run(tmp_path, Groups({Group.OBSERVE: "raise SystemExit(3)"}))
    assert result.evidence[Suite.RECOMPILE].outcome is Outcome.ERROR


def test_a_forecast_that_cannot_be_compiled_is_not_timed(tmp_path: Path) -> None:
    groups = Groups(results={Group.OBSERVE: GroupResult(evidence={Suite.RECOMPILE: MODEL_FAILED})})
    result = run(tmp_path, groups)
    assert groups.started == ["observe", "reference", "candidate", "compare", "cuda_lowering", "cudagraph"]
    assert result.evidence[Suite.RECOMPILE].outcome is Outcome.MODEL_FAILED
    assert result.evidence[Suite.SPEED].outcome is Outcome.NOT_RUN
    assert "IndexError" in str(result.evidence[Suite.SPEED].failure)


def test_one_repeat_that_fails_leaves_no_speed_to_judge(tmp_path: Path) -> None:
    script = "import sys; sys.exit('2' in sys.argv[1])"

    class SecondFails(Groups):
        def __call__(self, request_path: Path, run: GroupRun, output: Path) -> list[str]:
            if run.name == "speed-2":
                return [sys.executable, "-c", script, "2"]
            return super().__call__(request_path, run, output)

    groups = SecondFails()
    result = run(tmp_path, groups, repeats=3)
    assert [name for name in groups.started if name.startswith("speed")] == ["speed", "speed-3"]
    assert result.evidence[Suite.SPEED].outcome is Outcome.ERROR
    assert result.evidence[Suite.MEMORY].figures["memory"].value == 1.1
