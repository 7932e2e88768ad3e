"""What was only predicted before a GPU was there, a claim each, and whether the GPU bears it out."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toto_compat.acceptance import sabotages
from toto_compat.acceptance.campaign import Campaign, Ended
from toto_compat.acceptance.sabotages import caught
from toto_compat.acceptance.trials import (
    DEVICE,
    FIXED_SIZE,
    LOWERING,
    WHOLE_MODELS,
    predicted_figure,
    replay_of,
    worse,
)
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.log_line import normalise_reason
from toto_compat.contract.result import CellResult, Figure, Kind, Outcome
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Suite
from toto_compat.evidence.store import load_run
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status, disturbed
from toto_compat.verdict.judged_run import judge_run

MOST_HOST_SYNCS = 1  # a forecast of fixed_size, with its own draws, asks the device once, at its end
_OPERATION = re.compile(r" \([\w:.]+\)$")  # that a part was kept out for: lowering names it, torch's log does not
_REASONS_TOLD = 3
INTERPRETED_RUN = "reference/cuda-interpreted"


class Claim(StrictModel):
    """One prediction, where it stands, what the GPU showed, and how that ended."""

    claim: str
    predicted: str
    by: str  # what predicted it
    found: str
    ended: Ended


@dataclass(frozen=True)
class Evidence:
    """Holds all that the claims are held to: cells lowered without the GPU, cells on it, and the production check."""

    campaign: Campaign
    lowered: Sequence[CellResult]
    on_device: Sequence[CellResult]
    production: Sequence[JudgedCell]
    sabotaged: Sequence[JudgedCell]
    interpreted: Sequence[CellResult] = ()  # of an earlier run without a GPU


def evidence_in(folder: Path, campaign: Campaign, *, production: str) -> Evidence:
    """Read what the runs in a folder hold, an acceptance's own or a bundle; `production` names that run in it."""
    broken = [folder / one.cache for one in sabotages.tried(rehearsal=campaign.about.rehearsal)]
    return Evidence(
        campaign=campaign,
        lowered=load_run(folder / LOWERING).cells,
        on_device=load_run(folder / DEVICE).cells,
        production=judge_run(load_run(folder / production)).cells,
        sabotaged=[cell for run in broken if (run / "run.json").exists() for cell in judge_run(load_run(run)).cells],
    )


def interpreted_cells(results: Path) -> tuple[CellResult, ...]:
    """The cells whose CUDA code was executed without a GPU, as they are committed; none where that run is not there."""
    folder = results / INTERPRETED_RUN
    return load_run(folder).cells if (folder / "run.json").exists() else ()


def claims_of(evidence: Evidence) -> list[Claim]:
    """Every claim, environment by environment."""
    return [
        *(claim for name in evidence.campaign.about.environments for claim in _of_environment(name, evidence)),
        _sabotages(evidence),
    ]


def as_a_step(claims: Sequence[Claim]) -> dict[str, Any]:
    """Say how the step of the claims ended, the worst of them, and what it has to say."""
    found = {claim.ended for claim in claims}
    worst = next((one for one in (Ended.BROKEN, Ended.NOT_SHOWN) if one in found), Ended.HELD)
    return {"ended": worst, "lines": tuple(told(one) for one in claims)}


def told(claim: Claim) -> str:
    return f"{claim.ended.value}: {claim.claim}. Predicted: {claim.predicted}. Found: {claim.found or 'nothing'}"


def _of_environment(name: str, evidence: Evidence) -> Iterator[Claim]:
    lowered, found = _by_cell(evidence.lowered), _by_cell(evidence.on_device)
    static = CellName(f"{name}/{FIXED_SIZE}")
    rows = [cell for cell in evidence.production if cell.result.cell.environment == name]
    yield _runs_here(name, found.get(static))
    yield _taken_whole(static, lowered.get(static), found.get(static))
    yield _same_partitions(static, lowered.get(static), found.get(static))
    yield _replayed(static, found.get(static))
    for cell in WHOLE_MODELS:
        whole = CellName(f"{name}/{cell}")
        if whole in lowered or whole in found:
            yield _not_taken(whole, lowered.get(whole), found.get(whole))
    yield _few_host_syncs(static, found.get(static), "mean", "host_syncs")
    yield _few_host_syncs(static, found.get(static), "sampled", "host_syncs_sampled")
    interpreted = [one for one in evidence.interpreted if one.cell.environment == name]
    yield _right_on_the_device(name, interpreted, rows)
    yield _every_gate_decides(name, rows)


def _by_cell(results: Sequence[CellResult]) -> dict[CellName, CellResult]:
    return {result.cell: result for result in results}


def measured(result: CellResult | None, suite: Suite, name: str) -> Figure | None:
    """A figure that was measured on a GPU; None for any other: what no GPU took part in shows nothing here."""
    if result is None or not result.provenance.gpu:
        return None
    evidence = result.evidence.get(suite)
    figure = evidence.figures.get(name) if evidence else None
    return figure if figure and figure.kind is Kind.MEASURED and figure.value is not None else None


def why_not(result: CellResult | None, suite: Suite, name: str) -> str:
    """Say why there is no such figure."""
    if result is None:
        return "the cell has no result"
    if not result.provenance.gpu:
        return "no GPU took part"
    evidence = result.evidence.get(suite)
    failure = result.failure or (evidence.failure if evidence else None)
    figure = evidence.figures.get(name) if evidence else None
    return failure.message if failure else (figure.missing if figure else "") or "the suite left no such figure"


def _runs_here(name: str, found: CellResult | None) -> Claim:
    ran = bool(found and found.provenance.gpu and found.evidence and not found.could_not_run)
    gpu = f"{found.provenance.gpu}, {found.provenance.gpu_architecture}" if found and found.provenance.gpu else ""
    return Claim(
        claim=f"{name} runs on this driver and card",
        predicted="yes",
        by="the wheel's architectures in matrix.yaml and NVIDIA's table of drivers",
        found=f"it ran on {gpu}" if ran else why_not(found, Suite.CUDAGRAPH, "cudagraphs"),
        ended=Ended.HELD if ran else Ended.NOT_SHOWN,
    )


def _taken_whole(cell: CellName, lowered: CellResult | None, found: CellResult | None) -> Claim:
    predicted = predicted_figure(lowered) if lowered else None
    figure = measured(found, Suite.CUDAGRAPH, "cudagraphs")
    by = _predicted_by(lowered)
    not_whole = predicted is not None and bool(predicted.value)
    claim = f"{cell}: CUDA graphs {'do not take' if not_whole else 'take'} every graph whole"
    if predicted is None or predicted.value is None:
        told = predicted.missing if predicted else "no prediction"
        return Claim(claim=claim, predicted=told, by=by, found="", ended=Ended.NOT_SHOWN)
    shown = f"{predicted.value:g} not taken"
    if figure is None or figure.value is None:
        why = why_not(found, Suite.CUDAGRAPH, "cudagraphs")
        return Claim(claim=claim, predicted=shown, by=by, found=why, ended=Ended.NOT_SHOWN)
    same = bool(predicted.value) == bool(figure.value)
    return Claim(
        claim=claim,
        predicted=shown,
        by=by,
        found=f"{figure.value:g} skipped, kept out or not replayed",
        ended=Ended.HELD if same else Ended.BROKEN,
    )


def _predicted_by(lowered: CellResult | None) -> str:
    """Say what a prediction was made by: a rehearsal compiles nothing for CUDA."""
    if lowered is not None and Suite.CUDA_LOWERING not in lowered.evidence:
        return "Inductor's own checks, on a CPU"
    return "compiled for this architecture without the GPU"


def partitions_of(result: CellResult | None, suite: Suite) -> set[tuple[bool, ...]] | None:
    """The kinds of graphs a cell compiled, each as its pieces, captured or not; None where that was not seen."""
    evidence = result.evidence.get(suite) if result else None
    if evidence is None or evidence.outcome is not Outcome.MEASURED:
        return None
    if suite is Suite.CUDAGRAPH:
        seen = evidence.details.get("partitions")
        return {tuple(map(bool, graph)) for graph in seen} if seen and isinstance(seen[0], list) else None
    graphs = evidence.details.get("graphs", [])
    return {tuple(part["captured"] for part in graph["partitions"]) for graph in graphs} or None


def _same_partitions(cell: CellName, lowered: CellResult | None, found: CellResult | None) -> Claim:
    predicted = partitions_of(lowered, Suite.CUDA_LOWERING)
    seen = partitions_of(found, Suite.CUDAGRAPH) if found and found.provenance.gpu else None
    shown = predicted is not None and seen is not None
    return Claim(
        claim=f"{cell}: Inductor splits the graphs on the device as it did without it",
        predicted=partitions_text(predicted),
        by=_predicted_by(lowered),
        found=partitions_text(seen) if seen is not None else why_not(found, Suite.CUDAGRAPH, "partitions"),
        ended=(Ended.HELD if predicted == seen else Ended.BROKEN) if shown else Ended.NOT_SHOWN,
    )


def partitions_text(kinds: set[tuple[bool, ...]] | None) -> str:
    if kinds is None:
        return "not seen"
    told = (" then ".join("captured" if piece else "kept out" for piece in one) or "not split" for one in sorted(kinds))
    return "; ".join(told)


def _replayed(cell: CellName, found: CellResult | None) -> Claim:
    ended, told = replay_of(found) if found else (Ended.NOT_SHOWN, "the cell has no result")
    return Claim(
        claim=f"{cell}: every decode step of warm forecasts, mean and sampled, replays a captured graph",
        predicted="yes",
        by="the rules of a replay, rehearsed on a CPU",
        found=told,
        ended=ended,
    )


def _not_taken(cell: CellName, lowered: CellResult | None, found: CellResult | None) -> Claim:
    predicted = predicted_figure(lowered) if lowered else None
    figure = measured(found, Suite.CUDAGRAPH, "cudagraphs")
    reasons = reasons_of(lowered, Suite.CUDA_LOWERING)
    expected = predicted.value if predicted else None
    value = figure.value if figure else None
    seen = reasons_of(found, Suite.CUDAGRAPH)
    found_text = why_not(found, Suite.CUDAGRAPH, "cudagraphs")
    if value is not None:
        found_text = f"{value:g}; {'; '.join(seen[:_REASONS_TOLD]) or 'no reason was logged'}"
    ended = Ended.NOT_SHOWN
    if expected is not None and value is not None:
        same_reason = not expected or bool({*map(_comparable, reasons)} & {*map(_comparable, seen)})
        ended = Ended.HELD if bool(expected) == bool(value) and same_reason else Ended.BROKEN
    claim = "take it whole" if expected == 0 else "do not take it, for the reasons that production's logs have"
    return Claim(
        claim=f"{cell}: CUDA graphs {claim}",
        predicted=(f"{expected:g} graphs; " if expected is not None else "")
        + ("; ".join(reasons[:_REASONS_TOLD]) or "no reason"),
        by=_predicted_by(lowered),
        found=found_text,
        ended=ended,
    )


def reasons_of(result: CellResult | None, suite: Suite) -> list[str]:
    """The reasons that torch gave, each once."""
    evidence = result.evidence.get(suite) if result else None
    events = evidence.events if evidence else ()
    return list(dict.fromkeys(event.reason for event in events))


def _comparable(reason: str) -> str:
    """Take out of a reason what differs between a graph compiled without the GPU and the log of one on it."""
    return normalise_reason(_OPERATION.sub("", reason))


def _few_host_syncs(cell: CellName, found: CellResult | None, forecast: str, name: str) -> Claim:
    figure = measured(found, Suite.CUDAGRAPH, name)
    value = figure.value if figure else None
    return Claim(
        claim=f"{cell}: a {forecast} forecast waits for the GPU at its end only",
        predicted=f"at most {MOST_HOST_SYNCS}",
        by="the model's code",
        found=f"{value:g}" if value is not None else why_not(found, Suite.CUDAGRAPH, name),
        ended=Ended.NOT_SHOWN if value is None else Ended.HELD if value <= MOST_HOST_SYNCS else Ended.BROKEN,
    )


def _right_on_the_device(name: str, interpreted: Sequence[CellResult], rows: Sequence[JudgedCell]) -> Claim:
    ratios = [
        figure.value
        for one in interpreted
        if (evidence := one.evidence.get(Suite.CUDA_EQUIVALENCE))
        and (figure := evidence.figures.get("cuda_equivalence"))
        and figure.value is not None
    ]
    on_gpu = [
        row.gates[Gate.EQUIVALENCE] for row in rows if row.result.provenance.gpu and Gate.EQUIVALENCE in row.gates
    ]
    decided = [one for one in on_gpu if one.status in (Status.PASS, Status.FAIL)]
    right = all(one.status is Status.PASS for one in decided)
    return Claim(
        claim=f"{name}: the code that Inductor makes of fixed_size for CUDA forecasts as eager",
        predicted=f"{max(ratios):.2g} of what eager's own noise allows, interpreted" if ratios else "not tried",
        by=f"Triton's interpreter ({INTERPRETED_RUN})",
        found=_worst_text(decided),
        ended=(Ended.HELD if right else Ended.BROKEN) if decided else Ended.NOT_SHOWN,
    )


def _worst_text(decided: Sequence[JudgedGate]) -> str:
    """Tell the worst of these rows; one that raised or forecast NaN has no number and is worse than any."""
    if not decided:
        return "no row was decided on a GPU"
    without = [one for one in decided if one.value is None or math.isnan(one.value)]
    if without:
        return f"{without[0].reason} ({len(without)} of {len(decided)} rows)"
    return f"{max(one.value for one in decided if one.value is not None):.2g} at worst, in {len(decided)} rows"


def _every_gate_decides(name: str, rows: Sequence[JudgedCell]) -> Claim:
    on_gpu = [row for row in rows if row.result.provenance.gpu]
    open_ones = [(row, gate) for row in on_gpu for gate, one in row.gates.items() if one.status is Status.INCONCLUSIVE]
    undecided = sorted({gate.value for _, gate in open_ones})
    # what others on the machine left open shows nothing of what a quiet one could
    shown = bool(on_gpu) and not (undecided and all(_may_be_of_others(row, gate) for row, gate in open_ones))
    return Claim(
        claim=f"{name}: every gate of a row of fixed_size can be decided on a GPU",
        predicted="yes",
        by="evidence made up by CUDA's rules, walked through the gates",
        found=("no row ran on a GPU" if not on_gpu else f"INCONCLUSIVE: {', '.join(undecided)}")
        if undecided or not on_gpu
        else f"all of {len(on_gpu)} rows",
        ended=Ended.NOT_SHOWN if not shown else Ended.BROKEN if undecided else Ended.HELD,
    )


def _may_be_of_others(row: JudgedCell, gate: Gate) -> bool:
    """Tell if a quiet machine might have decided it: any time, and memory while others took some."""
    return gate.rule.is_a_time or bool(disturbed(gate, row.result.evidence.get(gate.rule.suite)))


def _sabotages(evidence: Evidence) -> Claim:
    rehearsal = evidence.campaign.about.rehearsal
    ended, lines = Ended.NOT_SHOWN if rehearsal else Ended.HELD, []
    for sabotage in sabotages.tried(rehearsal=rehearsal):
        cells = [cell for cell in evidence.sabotaged if cell.result.cell.cache == sabotage.cache]
        found = [caught(sabotage, cell) for cell in cells] or [(Ended.NOT_SHOWN, f"{sabotage.name}: no result")]
        if not rehearsal and not all(cell.result.provenance.gpu for cell in cells):
            found.append((Ended.NOT_SHOWN, f"{sabotage.name}: no GPU took part"))
        for how, told in found:
            ended = worse(ended, how)
            lines.append(told)
    return Claim(
        claim="every gate turns red on the GPU for a cache that is wrong on purpose",
        predicted="yes",
        by="the same caches on a CPU",
        found="; ".join(lines),
        ended=ended,
    )
