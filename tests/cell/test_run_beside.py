"""A group that runs next to another one: only where both are the candidate's, and nothing of it is left behind."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cell.stand_in_groups import Groups, good_result, request_in, run
from toto_compat.cell.run import (
    Collected,
    GroupRun,
    InterruptedCellError,
    Starter,
    group_beside,
    run_cell,
    running_beside,
)
from toto_compat.contract.request import Device, Limits
from toto_compat.contract.result import Outcome
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


def test_on_a_gpu_and_after_lowering_the_predictor_waits(tmp_path: Path) -> None:
    request = request_in(tmp_path, suites=SUITES)
    assert group_beside(request, CANDIDATE, [PREDICTOR], Collected()) is PREDICTOR
    on_a_gpu = request.model_copy(update={"device": Device.CUDA})
    assert group_beside(on_a_gpu, CANDIDATE, [PREDICTOR], Collected()) is None
    lowering = request_in(tmp_path, suites=(*SUITES, Suite.CUDA_LOWERING))
    assert group_beside(lowering, CANDIDATE, [PREDICTOR], Collected()) is None


def test_without_a_candidate_the_predictor_runs_alone(tmp_path: Path) -> None:
    result = run(tmp_path, Groups({Group.REFERENCE: "raise SystemExit(1)"}), suites=SUITES)
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.ERROR
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.MEASURED


def test_a_crash_of_one_costs_the_other_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, Groups({Group.CUDAGRAPH: "import os; os.abort()"}), suites=SUITES)
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.ERROR
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED


def test_a_stop_ends_both_and_is_no_timeout(tmp_path: Path) -> None:
    request, collected = request_in(tmp_path, suites=SUITES), Collected()
    groups = Groups({Group.CUDAGRAPH: "import os, signal; print(os.getpid(), flush=True); signal.pause()"})
    starter = Starter(request, tmp_path / "request.json", groups)
    log = tmp_path / "cudagraph.log"
    with (
        suppress(InterruptedCellError),
        running_beside(request, PREDICTOR, collected, end=time.monotonic() + 60.0, starter=starter),
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
    with running_beside(request, PREDICTOR, collected, end=time.monotonic() + 0.2, starter=starter):
        pass
    assert collected.failures["cudagraph"].kind == "timeout"
