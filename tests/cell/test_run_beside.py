"""A group that runs next to another one: only where both are the candidate's, and nothing of it is left behind."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cell.stand_in_groups import Groups, good_result, request_in, run
from toto_compat.cell import run as cell_run
from toto_compat.cell.group import GroupResult
from toto_compat.cell.group_process import Collected, GroupRun, StartedGroup, Starter, finish_group
from toto_compat.cell.run import InterruptedCellError, group_beside, run_cell, running_beside
from toto_compat.contract.request import CellRequest, Device, Limits
from toto_compat.contract.result import Failure, Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite

SUITES = (Suite.EQUIVALENCE, Suite.DETERMINISM, Suite.RECOMPILE, Suite.CUDAGRAPH)
CANDIDATE, PREDICTOR = GroupRun(Group.CANDIDATE), GroupRun(Group.CUDAGRAPH)


def meeting(group: Group, other: Group) -> str:
    """A group that finishes once the other one is there too."""
    return (
        "import os, pathlib, sys\n"
        "output = pathlib.Path(sys.argv[1])\n"
        f"(output.parent / '{group.value} is there').touch()\n"
        f"while not (output.parent / '{other.value} is there').exists():\n"
        "    os.sched_yield()\n"
        f"output.write_text({good_result(group).model_dump_json()!r})\n"
    )


def test_the_predictor_runs_next_to_the_candidate(tmp_path: Path) -> None:
    scripts = {
        Group.CANDIDATE: meeting(Group.CANDIDATE, Group.CUDAGRAPH),
        Group.CUDAGRAPH: meeting(Group.CUDAGRAPH, Group.CANDIDATE),
    }
    result = run(tmp_path, Groups(scripts), suites=SUITES)
    assert {evidence.outcome for evidence in result.evidence.values()} == {Outcome.MEASURED}


def test_nobody_who_may_see_the_answers_has_company() -> None:
    """And nobody who is timed: a timing loop wants the machine for itself."""
    for group in Group:
        if group.rule.beside:
            both = (group, Group(group.rule.beside))
            assert all(one.rule.imports_the_candidate for one in both)
            assert not any(one.rule.repeated for one in both)


def test_it_is_over_before_the_answers_are_on_the_disk(tmp_path: Path) -> None:
    """The predictor's process is the candidate's: it must not be there when the comparison begins."""
    late = (
        "import os, pathlib, sys\n"
        "output = pathlib.Path(sys.argv[1])\n"
        "while not (output.parent / 'candidate.json').exists():\n"
        "    os.sched_yield()\n"
        f"output.write_text({good_result(Group.CUDAGRAPH).model_dump_json()!r})\n"
    )
    looks = (
        "import pathlib, sys\n"
        "output = pathlib.Path(sys.argv[1])\n"
        "assert (output.parent / 'cudagraph.json').exists()\n"
        f"output.write_text({good_result(Group.COMPARE).model_dump_json()!r})\n"
    )
    result = run(tmp_path, Groups({Group.CUDAGRAPH: late, Group.COMPARE: looks}), suites=SUITES)
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED


@pytest.mark.parametrize("limits", [Limits(cpus=1), Limits(cpus=2, threads=2)])
def test_without_a_core_to_spare_there_is_one_process(tmp_path: Path, limits: Limits) -> None:
    groups = Groups()
    request = request_in(tmp_path, suites=SUITES).model_copy(update={"limits": limits})
    run_cell(request, tmp_path / "request.json", command=groups)
    assert groups.started[-1] == "cudagraph"


def observed(peak: int) -> Collected:
    """What there is after a cold compile that took so many bytes."""
    left = good_result(Group.OBSERVE)
    figures = {"compile_peak_bytes": Figure(value=peak)}
    evidence = left.evidence[Suite.RECOMPILE].model_copy(update={"figures": figures})
    return Collected(results={"observe": left.model_copy(update={"evidence": {Suite.RECOMPILE: evidence}})})


def test_on_a_gpu_and_after_lowering_the_predictor_waits(tmp_path: Path) -> None:
    request, small = request_in(tmp_path, suites=SUITES), observed(peak=2**30)
    assert group_beside(request, CANDIDATE, [PREDICTOR], small) is PREDICTOR
    on_a_gpu = request.model_copy(update={"device": Device.CUDA})
    assert group_beside(on_a_gpu, CANDIDATE, [PREDICTOR], small) is None
    lowering = request_in(tmp_path, suites=(*SUITES, Suite.CUDA_LOWERING))
    assert group_beside(lowering, CANDIDATE, [PREDICTOR], small) is None


@pytest.mark.parametrize(("memory", "fits"), [("8g", True), ("3071m", False), ("512m", False)])
def test_without_memory_for_two_there_is_one_process(tmp_path: Path, memory: str, fits: bool) -> None:
    """The limit is the cell's: one that is right must not be ended because it had company."""
    limits = Limits(memory=memory)
    request = request_in(tmp_path, suites=SUITES).model_copy(update={"limits": limits})
    assert (group_beside(request, CANDIDATE, [PREDICTOR], observed(peak=2**30)) is PREDICTOR) is fits
    assert group_beside(request, CANDIDATE, [PREDICTOR], Collected()) is None  # nobody knows what one takes


def test_without_a_candidate_the_predictor_runs_alone(tmp_path: Path) -> None:
    result = run(tmp_path, Groups({Group.REFERENCE: "raise SystemExit(1)"}), suites=SUITES)
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.ERROR
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.MEASURED


def test_a_crash_of_one_costs_the_other_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, Groups({Group.CUDAGRAPH: "import os; os.abort()"}), suites=SUITES)
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.ERROR
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED


def test_what_the_predictor_raises_costs_nobody_else_his_run(tmp_path: Path) -> None:
    """It compiles in its own way: a torch that moved what it calls says nothing of the forecast."""
    failed = SuiteEvidence(
        suite=Suite.CUDAGRAPH, outcome=Outcome.MODEL_FAILED, failure=Failure(kind="exception", message="it moved")
    )
    left = GroupResult(evidence={Suite.CUDAGRAPH: failed})
    script = f"import pathlib, sys\npathlib.Path(sys.argv[1]).write_text({left.model_dump_json()!r})\n"
    result = run(tmp_path, Groups({Group.CUDAGRAPH: script}), suites=(*SUITES, Suite.SPEED, Suite.MEMORY))
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.MODEL_FAILED
    assert result.evidence[Suite.SPEED].outcome is Outcome.MEASURED
    assert result.evidence[Suite.MEMORY].outcome is Outcome.MEASURED


def test_a_stop_ends_both_and_is_no_timeout(tmp_path: Path) -> None:
    request, collected = request_in(tmp_path, suites=SUITES), Collected()
    groups = Groups({Group.CUDAGRAPH: "import os, signal; print(os.getpid(), flush=True); signal.pause()"})
    starter = Starter(request, tmp_path / "request.json", groups)
    log = tmp_path / "cudagraph.log"
    with (
        suppress(InterruptedCellError),
        running_beside(request, PREDICTOR, collected, end=time.monotonic() + 60.0, last=True, starter=starter),
    ):
        while not log.read_text().endswith("\n"):
            os.sched_yield()
        raise InterruptedCellError
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert not collected.failures


def test_a_predictor_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    request, collected = request_in(tmp_path, suites=SUITES), Collected()
    groups = Groups({Group.CUDAGRAPH: "import signal; signal.pause()"})
    starter = Starter(request, tmp_path / "request.json", groups)
    with running_beside(request, PREDICTOR, collected, end=time.monotonic() + 0.2, last=True, starter=starter):
        pass
    assert collected.failures["cudagraph"].kind == "timeout"


def test_a_predictor_that_hangs_leaves_half_of_what_is_left_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, collected = request_in(tmp_path, suites=SUITES), Collected()
    starter = Starter(request, tmp_path / "request.json", Groups({}))
    given: list[float] = []

    def finish_and_tell(request: CellRequest, started: StartedGroup, collected: Collected, *, end: float) -> None:
        given.append(end)
        finish_group(request, started, collected, end=end)

    monkeypatch.setattr(cell_run, "finish_group", finish_and_tell)
    begin = time.monotonic()
    with running_beside(request, PREDICTOR, collected, end=begin + 1000.0, last=False, starter=starter):
        pass
    waited = time.monotonic() - begin
    assert begin + 500.0 <= given[0] <= begin + 500.0 + waited
