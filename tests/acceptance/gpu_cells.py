"""Cells as an acceptance on a GPU would leave them, by the code that makes their figures there; and without a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.verdict.sample_cells import GATES, cell_request, good_evidence, provenance
from tests.verdict.stored_runs import store_run
from toto_compat.acceptance import sabotages
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.log_line import normalise_reason
from toto_compat.contract.request import CacheRequest, CompileSettings, Device
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import point_latest
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.gates import Gate

MUTATED = "mutated inputs (8 instances)"
CAPTURED = [{"nodes": 90, "captured": True}]
SPLIT = [{"nodes": 9, "captured": True}, {"nodes": 1, "captured": False}]
STEP = {"index": 1, "launches": 1, "captures": 0, "replays": 1, "recordings": 0}


def cell_of(name: str, evidence: dict[Suite, SuiteEvidence], *, on_gpu: bool = True, **changes: Any) -> CellResult:
    """A result of this cell; `on_gpu` says whether a GPU took part."""
    cell = CellName(name)
    _, torch, build = cell.environment.split("-")
    request = cell_request(
        torch=torch, build=build, cache=cell.cache, mode=cell.mode, device=Device.CUDA if on_gpu else Device.CPU
    )
    settings = CompileSettings(capture_scalar_outputs=cell.settings == "production")
    cache = CacheRequest(name=cell.cache, source="builtin")
    request = request.model_copy(update={"cell": cell, "settings": settings, "cache": cache, **changes})
    told = provenance(request, gpu_architecture="sm_90" if on_gpu else None)
    return CellResult(cell=cell, request=request, provenance=told, evidence=evidence)


def _reasons(refused: int, *, logged: bool) -> tuple[Event, ...]:
    """As lowering notes down what torch said, or as it is read from torch's log on the device."""
    told = normalise_reason(MUTATED) if logged else MUTATED
    event = Event(
        kind=EventKind.CUDAGRAPH_SKIP, severity=Severity.WARNING, reason=MUTATED, normalised_reason=told, count=8
    )
    return (event,) if refused else ()


def lowered(name: str, *, refused: int = 0, partitions: Sequence[dict[str, Any]] = CAPTURED) -> CellResult:
    """What compiling for the card without it leaves."""
    found = SuiteEvidence(
        suite=Suite.CUDA_LOWERING,
        outcome=Outcome.MEASURED,
        figures={"cudagraphs": Figure(value=refused, kind=Kind.PREDICTED)},
        events=_reasons(refused, logged=False),
        details={"graphs": [{"number": 0, "partitions": list(partitions)}], "architectures": []},
    )
    return cell_of(name, {Suite.CUDA_LOWERING: found}, on_gpu=False, lower_only=True)


def on_device(
    name: str, *, refused: int = 0, partitions: Sequence[bool] = (True,), syncs: int = 1, sampled_syncs: int = 1
) -> CellResult:
    """What the CUDA graph suite leaves on a GPU."""
    without_replay = Figure(value=refused, method="of 5 decode steps after warm-up")
    found = SuiteEvidence(
        suite=Suite.CUDAGRAPH,
        outcome=Outcome.MEASURED,
        figures={
            "cudagraphs": Figure(value=refused),
            "steps_without_replay": without_replay,
            "host_syncs": Figure(value=syncs),
            "host_syncs_sampled": Figure(value=sampled_syncs),
        },
        events=_reasons(refused, logged=True),
        details={"steps": [STEP] * 6, "sampled_steps": [STEP] * 6, "partitions": [list(partitions)]},
    )
    return cell_of(name, {Suite.CUDAGRAPH: found})


def checked(name: str) -> CellResult:
    """A row of a production check that passes every gate, on a GPU or, of a CPU build, without one."""
    on_gpu = "-cpu/" not in name
    cell = cell_of(name, {}, on_gpu=on_gpu)
    return cell.model_copy(update={"evidence": good_evidence(cell.request)})


def sabotaged(name: str) -> CellResult:
    """A sabotage whose gate fails; on a CPU CUDA graphs are only predicted."""
    [sabotage] = [one for one in sabotages.ALL if one.cache == CellName(name).cache]
    cell = checked(name)
    wrong = 0.1 if sabotage.gate.rule.larger_is_better else 9.0
    on_cpu = cell.request.device is Device.CPU and sabotage.gate is Gate.CUDAGRAPHS
    figure = Figure(value=wrong, kind=Kind.PREDICTED if on_cpu else Kind.MEASURED)
    suite = sabotage.gate.rule.suite
    held = cell.evidence[suite]
    changed = held.model_copy(update={"figures": {**held.figures, sabotage.gate.figure: figure}})
    return cell.model_copy(update={"evidence": {**cell.evidence, suite: changed}})


def beside_another_program(cell: CellResult) -> CellResult:
    """The same cell, while somebody else took memory of its GPU."""
    held = cell.evidence[Suite.MEMORY]
    noted = held.model_copy(update={"details": {**held.details, "other_programs": ["vllm (pid 77, 9000 MB)"]}})
    return cell.model_copy(update={"evidence": {**cell.evidence, Suite.MEMORY: noted}})


def predicted(name: str) -> CellResult:
    """What a rehearsal has in the place of the GPU: the CUDA graph suite's prediction on a CPU."""
    cell = cell_of(name, {}, on_gpu=False)
    return cell.model_copy(update={"evidence": {Suite.CUDAGRAPH: good_evidence(cell.request)[Suite.CUDAGRAPH]}})


class MatrixOfThisMachine:
    """Stands in for `run_matrix`, which needs the GPU: writes the runs that it would, and notes what it was asked."""

    def __init__(self, *, broken_off_at: str = "", cannot_run: str = "", disturbed: str = "") -> None:
        self.asked: list[Asked] = []
        self.broken_off_at, self.cannot_run, self.disturbed = broken_off_at, cannot_run, disturbed

    def __call__(self, asked: Asked) -> ExitCode:
        self.asked.append(asked)
        if asked.run == self.broken_off_at:
            raise KeyboardInterrupt
        cells = [self._cell(asked, selector) for selector in asked.selectors]
        if asked.run == self.cannot_run:
            failure = Failure(kind="environment", message=f"no room in {Path.home()}/.cache\n{Path.home()}/x")
            cells = [cell.model_copy(update={"evidence": {}, "failure": failure}) for cell in cells]
        if asked.run == self.disturbed:
            cells = [beside_another_program(cell) for cell in cells]
        store_run(asked.results, str(asked.run), cells, gates=GATES, device=asked.device)
        log = asked.results / str(asked.run) / "logs" / f"{cells[0].cell}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"::suite cudagraph start\ncache in {Path.home()}/.cache\n", encoding="utf-8")
        point_latest(asked.results, str(asked.run))
        return ExitCode.OK

    @property
    def runs(self) -> list[str]:
        return [str(one.run) for one in self.asked]

    def _cell(self, asked: Asked, name: str) -> CellResult:
        refused = 0 if "/fixed_size/" in name else 8
        if asked.lower_only:
            return lowered(name, refused=refused, partitions=SPLIT if refused else CAPTURED)
        if asked.profile == "device":
            return predicted(name) if asked.device == "cpu" else on_device(name, refused=refused)
        return sabotaged(name) if sabotages.PREFIX in name else checked(name)
