"""`toto-compat claims`: every figure of the user's documents, confirmed, refuted or waiting, by a cell that says so."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Literal, Self

import click
from packaging.version import Version
from pydantic import Field, model_validator

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import Figure, Kind, Outcome
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError
from toto_compat.evidence.store import Run, StoredCell, find_run, list_runs, load_run
from toto_compat.matrix.gates import Gate
from toto_compat.runtimes.progress import print_out
from toto_compat.verdict.judge import Status, judge, one_line

_CLAIMS_FILE = Path(__file__).with_name("claims.toml")
_UNITS = {"bytes": (1e6, "MB"), "s": (1.0, "s"), "ms": (1.0, "ms")}


class Claim(StrictModel):
    """One figure of a document, and how evidence is held against it."""

    document: str
    said: str
    on: Literal["cuda", "any"]  # whose evidence decides
    cache: str = ""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    settings: str = "stock"
    suite: Suite | None = None
    figure: str = ""
    limit: GateLimit | None = None
    workload: str = ""  # of matrix.yaml, whose cells alone decide: a time of another model says nothing
    beside: str = ""  # another figure of the suite, shown with it
    symbol: str = ""  # the user's own series, which a cell must have been run with to decide
    column: str = ""  # of that series' row, with the weights of a checkpoint
    verdict: Literal["PASS"] | None = None  # of the whole row
    own_figures: dict[Gate, float] = Field(default={})  # the claim's own, held against the limits in use

    @model_validator(mode="after")
    def _can_be_decided(self) -> Self:
        names_a_figure = bool(self.symbol and self.column) or bool(self.suite and self.figure and not self.column)
        by_figure = bool(self.cache and self.limit and names_a_figure)
        by_verdict = bool(self.cache and self.verdict)
        if [by_figure, by_verdict, bool(self.own_figures)].count(True) != 1:
            raise ValueError("a claim is held against a figure with a limit, a verdict, or the claim's own figures")
        return self

    @property
    def row(self) -> str:
        """Name the cell that it speaks of, without its environment."""
        return f"{self.cache}/{self.mode}{'' if self.settings == 'stock' else f'+{self.settings}'}"


class ClaimsFile(StrictModel):
    release: str  # of torch, that the documents measured
    claims: tuple[Claim, ...]


class Finding(StrEnum):
    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    WAITING = "waiting for a GPU"
    NO_EVIDENCE = "no evidence yet"


@dataclass(frozen=True)
class StoredRow:
    """A finished cell, and the run that it lies in."""

    run_name: str
    run: Run
    cell: StoredCell

    @property
    def name(self) -> str:
        return f"`{self.cell.cell}` ({self.run_name})"


@dataclass(frozen=True)
class AuditedClaim:
    """A claim with what evidence says of it. `seen_on_cpu` decides nothing where a GPU has to."""

    claim: Claim
    finding: Finding
    said_by: str
    seen_on_cpu: str = ""


def read_claims(path: Path = _CLAIMS_FILE) -> ClaimsFile:
    return ClaimsFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


def audit(file: ClaimsFile, runs: Mapping[str, Run]) -> tuple[AuditedClaim, ...]:
    """Hold every claim against the cells of these runs, which are named as a reader finds them."""
    rows = [StoredRow(name, run, cell) for name, run in runs.items() for cell in run.cells]
    limits = next((run.info.gates for run in runs.values() if run.info.gates), {})
    return tuple(_audit(claim, file.release, rows, limits) for claim in file.claims)


def _audit(claim: Claim, release: str, rows: Sequence[StoredRow], limits: Mapping[Gate, GateLimit]) -> AuditedClaim:
    if claim.own_figures:
        return _by_own_figures(claim, limits)
    about = [row for row in rows if _is_about(row.cell, claim)]
    asked = [row for row in about if _may_decide(row.cell, claim)]
    deciding = _best([row for row in _nearest(asked, claim, release) if _decides(row, claim)])
    if deciding is None and claim.on == "any" and not about:
        return AuditedClaim(claim, Finding.NO_EVIDENCE, f"run `{command_for(claim)}`")
    if deciding is None:
        on_cpu = _on_cpu(claim, release, [row for row in about if row.cell.request.device is Device.CPU])
        return AuditedClaim(claim, Finding.WAITING, f"run `{command_for(claim, Device.CUDA)}`", on_cpu)
    if claim.verdict is not None:
        return _by_verdict(claim, deciding)
    figure = _deciding_figure(claim, deciding.cell)
    assert figure is not None and figure.value is not None and claim.limit is not None
    finding = Finding.CONFIRMED if claim.limit.admits(figure.value) else Finding.REFUTED
    found = f"{claim.column or claim.figure} {_shown(figure)}, read as {_limit_text(claim.limit, figure.unit)}"
    if any(evidence.skipped for suite, evidence in deciding.cell.evidence.items() if suite in _suites(claim)):
        found += ", of announced shapes alone"
    other = _figure(claim, deciding.cell, claim.beside) if claim.beside else None
    if other is not None and other.value is not None:
        found += f"; {claim.beside} {_shown(other)}"
    return AuditedClaim(claim, finding, f"{deciding.name}: {found}")


def _by_own_figures(claim: Claim, limits: Mapping[Gate, GateLimit]) -> AuditedClaim:
    """Confirm a verdict by its own figures, or refute it where these break the limits in use."""
    broken = []
    for gate, value in claim.own_figures.items():
        limit = limits.get(gate) or gate.rule.default
        if limit is not None and not limit.admits(value):
            broken.append(f"{gate.value} {value:g} (reported), limit {limit.text}")
    finding = Finding.REFUTED if broken else Finding.CONFIRMED
    return AuditedClaim(claim, finding, f"its own figures: {'; '.join(broken) or 'within the limits'}")


def _by_verdict(claim: Claim, row: StoredRow) -> AuditedClaim:
    judged = judge(row.cell, row.run.info.gates)
    finding = Finding.CONFIRMED if judged.verdict is Status.PASS else Finding.REFUTED
    by = f" by {judged.decided_by.value}: {judged.reason}" if judged.decided_by else ""
    return AuditedClaim(claim, finding, one_line(f"{row.name}: {judged.verdict.value}{by}"))


def _is_about(cell: StoredCell, claim: Claim) -> bool:
    name = cell.cell
    return (name.cache, name.mode, name.settings) == (claim.cache, claim.mode, claim.settings)


def _may_decide(cell: StoredCell, claim: Claim) -> bool:
    """Tell if a cell is what a claim is about: on a GPU where it is a GPU's, of its workload, with its series."""
    if cell.request.lower_only or (claim.on == "cuda" and not _on_gpu(cell)):
        return False
    if claim.workload and cell.request.workload_name != claim.workload:
        return False
    has_series = not claim.symbol or claim.symbol in {symbol.name for symbol in cell.request.symbols}
    return has_series and (not claim.column or bool(cell.provenance.checkpoint))


def _on_gpu(cell: StoredCell) -> bool:
    return cell.request.device is Device.CUDA and bool(cell.provenance.gpu)


def _nearest(rows: Sequence[StoredRow], claim: Claim, release: str) -> list[StoredRow]:
    """Keep the cells of the release that is wanted, of the newest where there are none of that.

    What an older version of the suite measured is looked at only where no other was run.
    """
    newest = max((_version(row.cell, claim) for row in rows), default=0)
    rows = [row for row in rows if _version(row.cell, claim) == newest]
    releases = {row.cell.request.environment.torch for row in rows}
    chosen = release if release in releases else max(releases, key=Version, default="")
    return [row for row in rows if row.cell.request.environment.torch == chosen]


def _version(cell: StoredCell, claim: Claim) -> int:
    asked = (Suite.SYMBOLS,) if claim.column else _suites(claim)
    return next((cell.evidence[suite].version for suite in asked if suite in cell.evidence), 0)


def _suites(claim: Claim) -> tuple[Suite, ...]:
    """List the suites that a claim's figure is of: of CUDA graphs also the one that compiles for CUDA without a GPU."""
    lowered = (Suite.CUDA_LOWERING,) if claim.suite is Suite.CUDAGRAPH else ()
    return (claim.suite or Suite.RECOMPILE, *lowered)


def _decides(row: StoredRow, claim: Claim) -> bool:
    """Tell if a cell has what decides a claim: a figure that was measured, or a verdict that can be taken."""
    if claim.verdict is not None:
        # a row that is INCONCLUSIVE confirms and refutes nothing, and a CPU's only speaks of what dynamo did
        judged = judge(row.cell, row.run.info.gates)
        if _on_gpu(row.cell):
            return judged.verdict is not Status.INCONCLUSIVE
        by_dynamo = judged.decided_by is not None and judged.decided_by.rule.suite is Suite.RECOMPILE
        return judged.verdict is Status.FAIL and by_dynamo
    figure = _deciding_figure(claim, row.cell)
    return figure is not None and figure.value is not None and figure.kind is Kind.MEASURED


def _best(rows: Sequence[StoredRow]) -> StoredRow | None:
    """Choose of several cells one on a GPU, of the larger model; when they were run makes no difference."""

    def merit(row: StoredRow) -> tuple[bool, bool, str, str]:
        return _on_gpu(row.cell), row.cell.request.workload.model == "base", row.cell.cell, row.run_name

    return max(rows, key=merit, default=None)


def _deciding_figure(claim: Claim, cell: StoredCell) -> Figure | None:
    """Find the figure that a claim is held against: of the series that it names, else of the cell."""
    if not claim.column:
        return _figure(claim, cell, claim.figure)
    evidence = cell.evidence.get(Suite.SYMBOLS)
    rows = evidence.details.get("symbols", []) if evidence and evidence.outcome is Outcome.MEASURED else []
    values: list[float | None] = [row.get(claim.column) for row in rows if row.get("symbol") == claim.symbol]
    return Figure(value=values[0]) if values else None


def _figure(claim: Claim, cell: StoredCell, name: str) -> Figure | None:
    there = [cell.evidence[suite] for suite in _suites(claim) if suite in cell.evidence]
    figures = [one.figures.get(name) for one in there if one.outcome is Outcome.MEASURED]
    return next(filter(None, figures), None)


def _on_cpu(claim: Claim, release: str, rows: Sequence[StoredRow]) -> str:
    """Say what a CPU's cell has for the figure; times and sizes of another device would only mislead."""
    if not rows:
        return f"no evidence yet: run `{command_for(claim, Device.CPU)}`"
    with_figure = [row for row in rows if (one := _figure(claim, row.cell, claim.figure)) and one.value is not None]
    row = _best(_nearest(with_figure, claim, release))
    figure = _figure(claim, row.cell, claim.figure) if row else None
    if row is None or figure is None or figure.unit in _UNITS:
        return ""
    kind = "" if figure.kind is Kind.MEASURED else f" {figure.kind.value}"
    return f"{row.name}: {claim.figure} {_shown(figure)}{kind}"


def command_for(claim: Claim, device: Device | None = None) -> str:
    """Write the command that gets the evidence a claim waits for."""
    wanted = device or (Device.CUDA if claim.on == "cuda" else Device.CPU)
    if wanted is Device.CUDA:
        own = f" --data {claim.symbol}.csv --checkpoint Datadog/Toto-Open-Base-1.0@REVISION" if claim.symbol else ""
        row = f"{claim.row}@{claim.workload}" if claim.workload else claim.row
        return f"nox -s matrix -- 'torch-2.9.0-cu128/{row}' --profile production-check --device cuda{own}"
    return f"nox -s matrix -- 'torch-2.13.0-cpu/{claim.row}' --device cpu"


def _shown(figure: Figure) -> str:
    assert figure.value is not None
    return _with_unit(figure.value, figure.unit)


def _with_unit(value: float, unit: str) -> str:
    by, name = _UNITS.get(unit, (1.0, unit))
    return f"{value / by:.3g}{f' {name}' if name else ''}"


def _limit_text(limit: GateLimit, unit: str) -> str:
    ends = [("at least", limit.min), ("at most", limit.max)]
    return " and ".join(f"{word} {_with_unit(end, unit)}" for word, end in ends if end is not None)


def claims_markdown(audited: Sequence[AuditedClaim], release: str) -> str:
    """Write the page docs/claims.md; `release` is the torch of the documents."""
    counts = {finding: sum(one.finding is finding for one in audited) for finding in Finding}
    head = [
        "# Claims of the user's documents",
        "",
        "Every figure of five documents about torch.compile and Toto, held against stored evidence.",
        "Written by `toto-compat claims > docs/claims.md`; the claims and how their words are read are in",
        "`toto_compat/repro/claims.toml`.",
        "",
        "What dynamo does (recompiles, limits, graph breaks) is decided before any device is reached, so a CPU's cell",
        "confirms or refutes it. Times, memory, CUDA graphs and the error of a forecast are a GPU's: there the last",
        "column is what a CPU shows meanwhile, and decides nothing. Recompiles are those of whole autoregressive",
        "forecasts at several lengths; the documents count those of forecasts of one patch, which never decode.",
        "",
        f"Cells of torch {release} decide, which the documents measured; where none was run with today's suites, those",
        "of the newest release. Times, memory and errors wait for production's own forecast (`production-float16`),",
        "those of BTCUSD for a cell that was run with that series. A *recompile warning* is read as a limit that was",
        "hit: torch warns of no other recompile, and the documents' analyzer counted no other. The number of",
        "recompiles, which torch tells only when it is asked, stands beside it. A cell that has broken a limit goes on",
        "to no shapes but those announced, as the documents' forecasts were: its counts are of these.",
        "",
        f"{len(audited)} claims: " + ", ".join(f"{number} {finding.value}" for finding, number in counts.items()) + ".",
    ]
    return "\n".join([*head, *_tables(audited)]) + "\n"


def _tables(audited: Sequence[AuditedClaim]) -> Iterator[str]:
    for document, claims in groupby(audited, key=lambda one: one.claim.document):
        yield ""
        yield f"## {document[0].upper()}{document[1:]}"
        yield ""
        yield "| claim | finding | by | on a CPU |"
        yield "|---|---|---|---|"
        for one in claims:
            cells = (one.claim.said, f"**{one.finding.value}**", one.said_by, one.seen_on_cpu or "-")
            yield f"| {' | '.join(_in_cell(cell) for cell in cells)} |"


def _in_cell(text: str) -> str:
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


@click.command("claims")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
def claims_command(runs: tuple[str, ...], results: Path) -> None:
    """Audit the claims of the user's documents by the evidence of these runs, as Markdown.

    Without a RUN the reference runs decide, as committed in docs/claims.md."""
    names = runs or reference_names(results)
    if not names:
        raise SelectionError(f"{results}: no reference run there", hint="name a run: `toto-compat claims latest`")
    print_out(claims_page(results, names), end_line=False)


def reference_names(results: Path) -> tuple[str, ...]:
    """Name the runs that docs/claims.md is made of."""
    return tuple(name for name in list_runs(results) if name.startswith("reference/"))


def claims_page(results: Path, runs: Sequence[str] | None = None) -> str:
    """Write the page by these runs; without them by the reference, as docs/claims.md is committed."""
    names = reference_names(results) if runs is None else runs
    file = read_claims()
    found = {name: load_run(find_run(name, results)) for name in names}
    return claims_markdown(audit(file, found), file.release)
