"""Groups of a cell that finish without torch, or run a test's own script instead."""

import sys
from pathlib import Path

from tests.cell.suites.test_memory import memory_run
from toto_compat.cell.group import GroupResult
from toto_compat.cell.group_process import GroupRun
from toto_compat.cell.run import run_cell
from toto_compat.cell.suites.speed_figures import SpeedRun, SpeedRuns
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import (
    CacheRequest,
    CellProfile,
    CellRequest,
    Demand,
    Device,
    Environment,
    Workload,
)
from toto_compat.contract.result import CellResult, Failure, Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite, suites_of


def request_in(
    folder: Path,
    *,
    timeout_minutes: float = 5,
    repeats: int = 1,
    suites: tuple[Suite, ...] = CellProfile(iterations=1).suites,
    demands: tuple[Demand, ...] = (),
) -> CellRequest:
    return CellRequest(
        cell=CellName("torch-2.13.0-cpu/upstream/default"),
        environment=Environment(torch="2.13.0", build="cpu"),
        cache=CacheRequest(name="upstream", source="builtin"),
        device=Device.CPU,
        profile_name="quick",
        profile=CellProfile(iterations=3, repeats=repeats, suites=suites, timeout_minutes=timeout_minutes),
        workload=Workload(),
        work_folder=str(folder),
        demands=demands,
    )


def good_result(group: Group) -> GroupResult:
    """What a group that finished leaves behind, thin."""
    match group:
        case Group.SPEED:
            timings: dict[str, tuple[float, ...]] = dict.fromkeys(
                ("upstream_eager", "same_cache_eager", "compiled"), (10.0,) * 36
            )
            speed = SpeedRuns(runs=(SpeedRun(timings=timings, warm_start_s=2.0),))
            return GroupResult(measurements={Suite.SPEED: speed.model_dump()})
        case Group.MEMORY | Group.MEMORY_REFERENCE:
            memory = memory_run(held=88 if group is Group.MEMORY else 64)
            return GroupResult(measurements={Suite.MEMORY: memory.model_dump()})
        case Group.OBSERVE:
            figures = {
                "cold_compile_s": Figure(value=33.0),
                "recompiles": Figure(value=0),
                "compile_peak_bytes": Figure(value=300),
            }
            evidence = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, figures=figures)
            return GroupResult(
                evidence={Suite.RECOMPILE: evidence},
                cache_class="toto.model.util:KVCache",
                facts={"torch": "2.13.0+cpu", "torch_git": "abc", "cuda": None},
            )
        case Group.REFERENCE | Group.CANDIDATE:
            return GroupResult(measurements={suite: {} for suite in suites_of(group)})
        case _:
            return GroupResult(evidence={s: SuiteEvidence(suite=s, outcome=Outcome.MEASURED) for s in suites_of(group)})


MODEL_FAILED = SuiteEvidence(
    suite=Suite.RECOMPILE,
    outcome=Outcome.MODEL_FAILED,
    failure=Failure(kind="exception", message="IndexError: out of range"),
)


class Groups:
    """Commands that stand in for the group processes: most finish, the named ones run a script of the test's."""

    def __init__(
        self, scripts: dict[Group, str] | None = None, results: dict[Group, GroupResult] | None = None
    ) -> None:
        self.scripts = scripts or {}
        self.results = results or {}
        self.started: list[str] = []

    def __call__(self, _request_path: Path, run: GroupRun, output: Path) -> list[str]:
        self.started.append(run.name)
        if run.group in self.scripts:
            return [sys.executable, "-c", self.scripts[run.group], str(output)]
        result = self.results.get(run.group) or good_result(run.group)
        write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        return [sys.executable, "-c", write, str(output), result.model_dump_json()]


def run(folder: Path, groups: Groups, **options: object) -> CellResult:
    request = request_in(folder, **options)  # type: ignore[arg-type]
    return run_cell(request, folder / "request.json", command=groups)
