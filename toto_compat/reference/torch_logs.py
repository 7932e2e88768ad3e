"""A second count of recompiles and graph breaks, from the text of TORCH_LOGS alone, held against a cell's figures."""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from packaging.version import Version
from pydantic import Field
from tabulate import tabulate

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.files import utc_now
from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import Outcome
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Suite
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import read_model, write_model
from toto_compat.evidence.store import StoredCell, cell_path, read_cell
from toto_compat.reference import logged_forecasts
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.progress import say

COUNTS_FILE = "torch_logs.json"
# On purpose not the grammar of contract/torch_messages.py: a count that shares its mistakes would agree with them.
_RECOMPILE = re.compile(r"\[__recompiles\] Recompiling function ")
_GRAPH_BREAK = re.compile(r"\[__graph_breaks\] Graph break(?::| in user code| \()")
_SECONDS = 3600.0


class TwoCounts(StrictModel):
    """One quantity counted twice."""

    by_log: int
    by_cell: int | None  # None: the cell has no figure of it

    @property
    def agree(self) -> bool:
        return self.by_log == self.by_cell


class LogCount(StrictModel):
    """What the log of one process said, beside what the cell said."""

    cell: CellName
    torch: str
    recompiles: TwoCounts
    graph_breaks: TwoCounts
    raised: str = ""  # the last line, where a forecast raised: the log ends there, as the cell's count does
    of_result: str  # when the cell ran that it is held against
    log_lines: int
    log_sha256: str
    taken: str

    @property
    def agree(self) -> bool:
        return self.recompiles.agree and self.graph_breaks.agree


class LogCounts(StrictModel):
    """torch_logs.json of a run."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    method: str = (
        "TORCH_LOGS=recompiles,graph_breaks in a fresh process that takes the recompile suite's forecasts without the "
        "live observer; records that begin with 'Recompiling function' and 'Graph break' are counted in its text"
    )
    counts: tuple[LogCount, ...] = ()


def count_lines(text: str) -> tuple[int, int]:
    """Recompiles and graph breaks that a log of TORCH_LOGS tells."""
    return len(_RECOMPILE.findall(text)), len(_GRAPH_BREAK.findall(text))


def read_counts(run_folder: Path) -> LogCounts:
    path = run_folder / COUNTS_FILE
    return read_model(path, LogCounts) if path.exists() else LogCounts()


def can_be_counted(cell: StoredCell) -> bool:
    """Tell whether the cell has a count of its own to hold another against: other suites may have failed."""
    return _figure(cell, "recompiles_logged") is not None


def is_counted(run_folder: Path, cell: StoredCell) -> bool:
    return any(one.cell == cell.cell and one.of_result == cell.stored for one in read_counts(run_folder).counts)


def why_not_counted(run_folder: Path, cell: CellName) -> str:
    """Say what is wrong with the second count of a cell that is there; empty where there is one and it agrees."""
    stored = read_cell(cell_path(run_folder, cell))
    if not is_counted(run_folder, stored):
        return "was not counted a second time" if can_be_counted(stored) else ""
    agreeing = [one.agree for one in read_counts(run_folder).counts if one.cell == cell]
    return "" if all(agreeing) else "the two counts differ"


def add_count(run_folder: Path, count: LogCount) -> None:
    others = [one for one in read_counts(run_folder).counts if one.cell != count.cell]
    write_model(run_folder / COUNTS_FILE, LogCounts(counts=(*others, count)))


def count_by_log(cell: StoredCell) -> LogCount:
    """Run the cell's forecasts again in its environment, in a process of their own, and read what torch logged."""
    request = cell.request
    runtime = open_runtime("venv", limits=request.limits, device=Device.CPU)
    prepared = runtime.prepare(request.cell.environment, request.environment, say)
    with tempfile.TemporaryDirectory(prefix="toto-compat-log-") as name:
        folder = Path(name)
        specification, log = folder / "request.json", folder / "torch.log"
        specification.write_text(_own(request, folder).model_dump_json(by_alias=True), encoding="utf-8")
        # the file itself, with -P: the staged source holds only what cells run
        words = ("{python}", "-P", str(logged_forecasts.__file__), str(specification))
        command = runtime.attached(prepared, words, folder, terminal=False)
        variables = {
            **command.variables,
            **request.variables,
            "TORCH_LOGS": "recompiles,graph_breaks",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"),
        }
        with log.open("wb") as stream:
            try:
                done = subprocess.run(
                    command.words, env=variables, cwd=command.folder, stderr=stream, timeout=_SECONDS, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise EnvironmentBuildError(f"{cell.cell}: its log was not complete after an hour") from error
        return counted(cell, log.read_text(encoding="utf-8", errors="replace"), done.returncode)


def counted(cell: StoredCell, text: str, code: int) -> LogCount:
    """Hold what a log tells against what the cell counted."""
    if logged_forecasts.BEGIN not in text:
        raise EnvironmentBuildError(
            f"{cell.cell}: no forecast was taken under TORCH_LOGS:\n    " + "\n    ".join(text.splitlines()[-8:])
        )
    recompiles, breaks = count_lines(text)
    return LogCount(
        cell=cell.cell,
        torch=cell.provenance.torch,
        recompiles=TwoCounts(by_log=recompiles, by_cell=_figure(cell, "recompiles_logged")),
        graph_breaks=TwoCounts(by_log=breaks, by_cell=_figure(cell, "graph_breaks")),
        raised=(text.splitlines() or [""])[-1][:300] if code else "",
        of_result=cell.stored,
        log_lines=len(text.splitlines()),
        log_sha256=hashlib.sha256(text.encode()).hexdigest(),
        taken=utc_now(),
    )


def _own(request: CellRequest, folder: Path) -> CellRequest:
    return request.model_copy(update={"work_folder": str(folder), "quiet_lock": None, "references": None})


def _figure(cell: StoredCell, name: str) -> int | None:
    evidence = cell.evidence.get(Suite.RECOMPILE)
    figure = evidence.figures.get(name) if evidence and evidence.outcome is Outcome.MEASURED else None
    return int(figure.value) if figure and figure.value is not None else None


def counts_table(counts: Sequence[LogCount]) -> str:
    """The two counts side by side, oldest release first."""
    rows = [
        [
            one.torch,
            one.cell.partition("/")[2],
            _shown(one.recompiles),
            _shown(one.graph_breaks),
            "yes" if one.agree else "no",
        ]
        for one in sorted(counts, key=lambda one: Version(one.torch))
    ]
    headers = ["torch", "row", "recompiles, log / cell", "graph breaks, log / cell", "agree"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _shown(counts: TwoCounts) -> str:
    return f"{counts.by_log} / {'none' if counts.by_cell is None else counts.by_cell}"
