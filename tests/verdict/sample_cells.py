"""Results as real runs leave them, built through the schema: what the verdict and report tests start from."""

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from toto_compat.cell.suites.speed_figures import SpeedRun, speed_evidence
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import (
    CacheRequest,
    CellProfile,
    CellRequest,
    CompileSettings,
    Device,
    Environment,
    Workload,
)
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate

SUITES = CellProfile(iterations=1).suites  # of a cell without series of the user's own
GATES: dict[Gate, GateLimit] = {
    gate: gate.rule.default for gate in Gate if gate.rule.default is not None and gate.rule.suite in SUITES
}

GOOD_FIGURES: dict[Gate, float] = {
    Gate.EQUIVALENCE: 0.4,
    Gate.DETERMINISM: 0.0,
    Gate.MAE_SIGMA: 0.0,
    Gate.COMPILE_ACTIVE: 1.0,
    Gate.RECOMPILE_LIMIT: 0.0,
    Gate.RECOMPILES: 0.0,
    Gate.RECOMPILES_TOTAL: 0.0,
    Gate.GRAPH_BREAKS: 0.0,
    Gate.CUDAGRAPHS: 0.0,
    Gate.SPEEDUP: 2.4,
    Gate.LATENCY_STABILITY: 0.08,
    Gate.MEMORY: 1.2,
    Gate.MEMORY_GROWTH: 0.001,
}


def cell_request(
    *,
    torch: str = "2.13.0",
    build: str = "cpu",
    cache: str = "fixed_size",
    mode: str = "default",
    settings_name: str = "stock",
    settings: CompileSettings | None = None,
    device: Device | None = None,
    suites: tuple[Suite, ...] = SUITES,
) -> CellRequest:
    environment = Environment(torch=torch, build=build)
    return CellRequest(
        cell=CellName.of(f"torch-{torch}-{build}", cache, mode, settings_name),
        environment=environment,
        cache=CacheRequest(name=cache, source="builtin"),
        settings=settings or CompileSettings(),
        device=device or environment.device,
        profile_name="quick",
        profile=CellProfile(iterations=3, suites=suites),
        workload_name="quick",
        workload=Workload(),
        work_folder="work",
    )


def provenance(request: CellRequest, **changes: Any) -> Provenance:
    on_gpu = request.device is Device.CUDA
    values: dict[str, Any] = {
        "torch": f"{request.environment.torch}+{request.environment.build}",
        "cuda": "12.8" if on_gpu else None,
        "gpu": "NVIDIA GeForce RTX 5090" if on_gpu else None,
        "driver": "580.65" if on_gpu else None,
        "python": "3.11.2",
        "toto_ts": "0.2.0",
        "packages": {"numpy": "1.26.4", "einops": "0.7.0"},
        "runtime": "venv",
        "lock": "sha256:5f1c",
        "source_hash": "0a1b2c3d",
        "cache_class": "toto_compat.caches.fixed_size:FixedSizeCache",
        "cpu": "x86-64",
        "cores": 2,
        "host": "runner",
        "started": "2026-11-16T10:00:00Z",
        "finished": "2026-11-16T10:02:00Z",
        **changes,
    }
    return Provenance(**values)


def speed_run(*, upstream_ms: float, cache_ms: float, compiled_ms: float, seed: int = 1, count: int = 36) -> SpeedRun:
    """Timings with the noise of a quiet machine: 3 % of spread and now and then a forecast half as long again."""
    generator = random.Random(seed)  # noqa: S311 - noise, no secret

    def timings(centre: float) -> tuple[float, ...]:
        return tuple(
            centre * generator.lognormvariate(0, 0.03) * (1.5 if generator.random() < 0.03 else 1.0)
            for _ in range(count)
        )

    return SpeedRun(
        timings={
            "upstream_eager": timings(upstream_ms),
            "same_cache_eager": timings(cache_ms),
            "compiled": timings(compiled_ms),
        },
        warm_start_s=4.2,
        timed_forecasts=0.5,
    )


@cache
def usual_speed(seed: int) -> SuiteEvidence:
    return speed_of(speed_run(upstream_ms=52.0, cache_ms=40.0, compiled_ms=21.0, seed=seed))


def speed_of(*runs: SpeedRun) -> SuiteEvidence:
    return speed_evidence(runs, cold_compile_s=Figure(value=21.0, unit="s"))


def good_evidence(request: CellRequest, *, seed: int = 1) -> dict[Suite, SuiteEvidence]:
    """Evidence that passes every gate on the request's device."""
    evidence: dict[Suite, SuiteEvidence] = {}
    for suite in SUITES:
        figures = {
            gate.figure: Figure(value=GOOD_FIGURES[gate])
            for gate in GOOD_FIGURES
            if gate.rule.suite is suite and suite is not Suite.SPEED
        }
        figures |= {
            gate.rule.reference: figures[gate.figure]
            for gate in GOOD_FIGURES
            if gate.rule.reference and gate.figure in figures
        }
        evidence[suite] = SuiteEvidence(suite=suite, outcome=Outcome.MEASURED, figures=figures, seconds=3.0)
    if request.device is Device.CPU:
        predicted = {Gate.CUDAGRAPHS.figure: Figure(value=0.0, kind=Kind.PREDICTED)}
        evidence[Suite.CUDAGRAPH] = evidence[Suite.CUDAGRAPH].model_copy(update={"figures": predicted})
    evidence[Suite.SPEED] = usual_speed(seed)
    return evidence


def good_result(*, seed: int = 1, **request_changes: Any) -> CellResult:
    request = cell_request(**request_changes)
    return CellResult(
        cell=request.cell, request=request, provenance=provenance(request), evidence=good_evidence(request, seed=seed)
    )


def with_figures(result: CellResult, figures: Mapping[Gate, Figure | float | None]) -> CellResult:
    """The same result with some figures replaced; None takes a figure away."""
    evidence = dict(result.evidence)
    for gate, figure in figures.items():
        suite = gate.rule.suite
        held = dict(evidence[suite].figures)
        if figure is None:
            held.pop(gate.figure, None)
        else:
            held[gate.figure] = figure if isinstance(figure, Figure) else Figure(value=figure)
        evidence[suite] = evidence[suite].model_copy(update={"figures": held})
    return result.model_copy(update={"evidence": evidence})


def with_suite(result: CellResult, suite: Suite, evidence: SuiteEvidence | None) -> CellResult:
    changed = {name: found for name, found in result.evidence.items() if name is not suite}
    if evidence is not None:
        changed[suite] = evidence
    return result.model_copy(update={"evidence": changed})


def with_events(result: CellResult, suite: Suite, *events: Event) -> CellResult:
    return with_suite(result, suite, result.evidence[suite].model_copy(update={"events": events}))


def suite_error(suite: Suite, outcome: Outcome, message: str) -> SuiteEvidence:
    return SuiteEvidence(suite=suite, outcome=outcome, failure=Failure(kind="exception", message=message))


def production_incident(**request_changes: Any) -> CellResult:
    """The cache of 2025-10-30: the limit is hit in positional_embedding and 43 recompiles come before it."""
    result = good_result(cache="list_index", **request_changes)
    figures: dict[Gate, Figure | float | None] = {
        Gate.RECOMPILE_LIMIT: 1.0,
        Gate.RECOMPILES_TOTAL: 43.0,
        Gate.GRAPH_BREAKS: 132.0,
    }
    recompiles = [
        Event(
            kind=EventKind.RECOMPILE,
            severity=Severity.WARNING,
            function="positional_embedding",
            file="toto/model/attention.py",
            line=105,
            compile_id=f"6/{number + 1}",
            reason=f"6/{number}: kv_cache._current_idx[{number}] == 0",
            normalised_reason="kv_cache._current_idx[N] == N",
        )
        for number in range(8)
    ]
    limit = Event(
        kind=EventKind.RECOMPILE_LIMIT,
        severity=Severity.ERROR,
        function="positional_embedding",
        file="toto/model/attention.py",
        line=105,
        compile_id="6/8",
        reason="6/7: kv_cache._current_idx[7] == 0",
        normalised_reason="kv_cache._current_idx[N] == N",
        limit=8,
    )
    graph_break = Event(
        kind=EventKind.GRAPH_BREAK,
        severity=Severity.WARNING,
        function="append",
        file="toto_compat/caches/index_variants.py",
        line=40,
        reason="Call to `torch._dynamo.graph_break()`",
        count=132,
    )
    skip = Event(
        kind=EventKind.CUDAGRAPH_SKIP,
        severity=Severity.WARNING,
        reason="skipping cudagraphs due to mutated inputs (8 instances)",
        count=8,
    )
    result = with_events(with_figures(result, figures), Suite.RECOMPILE, *recompiles, limit, graph_break)
    skips = Figure(value=8.0, kind=Kind.PREDICTED if result.request.device is Device.CPU else Kind.MEASURED)
    return with_events(with_figures(result, {Gate.CUDAGRAPHS: skips}), Suite.CUDAGRAPH, skip)
