"""The user's own series: every symbol's held-out values forecast by upstream eager and by the candidate, in turn.

Both are contestants in processes of their own. The one that takes the time and compares never imports a user's file,
and upstream eager's never does either.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toto_compat.cell.contest import Contest
from toto_compat.cell.contestant import Contestant, ContestantError, series_bytes
from toto_compat.cell.machine_conditions import machine_conditions
from toto_compat.cell.quiet import QuietLock
from toto_compat.cell.session import Session
from toto_compat.cell.suites.speed_figures import COMPILED, UPSTREAM_EAGER, unfair_turns
from toto_compat.cell.suites.timed_forecasts import TimedForecast, worst_ratio_to
from toto_compat.cell.trial import Trial
from toto_compat.contract.csv_file import read_csv
from toto_compat.contract.request import SymbolSeries
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.statistics import ratio_of_medians
from toto_compat.contract.suites import Suite
from toto_compat.contract.symbols import Windows, lengths_of, windows_of
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series, window_series

METHOD = (
    "the newest values of every symbol are held out and forecast with generate_mean at the workload's first context "
    "and horizon, again and again, each time one row earlier; short contexts are padded as toto-ts pads; upstream "
    "eager and the candidate take turns in processes of their own after a warm-up on other series; MAE against the "
    "values held out, the candidate's forecasts against eager's by equivalence's rule, compilations counted per "
    "symbol; the worst symbol is the figure"
)
SPEEDUP = "symbol_speedup"
# figure: the column of the rows that it is the worst of, and what that is
FIGURES = {
    "symbol_equivalence": ("equivalence", "largest error of a forecast over what is allowed"),
    "symbol_mae": ("difference", "difference of the two MAEs over eager's"),
    "symbol_recompiles": ("recompiles", "compilations begun while a symbol was forecast"),
    SPEEDUP: ("speedup", "upstream eager / compiled, ratio of medians"),
}
NO_FINITE_FORECAST = "upstream eager has no finite forecast of it: nothing to compare with"
# Of the size of what is held out: a MAE below it is nothing but rounding, and not to be divided by
_ROUNDING = 1e-6
_WARM_UP_SEED = 7_000


@dataclass
class SymbolContest:
    """One symbol: its windows, and what was made of them."""

    symbol: SymbolSeries
    windows: Windows
    series: list[tuple[Series, Tensor]]  # and where the values held out are there
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {UPSTREAM_EAGER: [], COMPILED: []})
    forecasts: list[dict[str, Tensor]] = field(default_factory=list)
    compilations: int = 0
    problem: str = ""  # why there is nothing to compare

    def mae(self, contestant: str) -> float:
        """Mean absolute error over all that was held out and is there."""
        errors = [
            (forecast[contestant].double().cpu() - series.truth.double().cpu()).abs()[present]
            for forecast, (series, present) in zip(self.forecasts, self.series, strict=True)
        ]
        return float(torch.cat(errors).mean())

    @property
    def size_of_truth(self) -> float:
        return float(torch.cat([series.truth.double().cpu()[present] for series, present in self.series]).abs().mean())


def run_symbols(session: Session) -> SuiteEvidence:
    """Forecast every symbol and say how the candidate did on the worst one."""
    trial = session.trial
    alone = replace(trial, quiet=QuietLock(None))  # who has the lock is the process that takes the time
    contests = [contest_of(symbol, trial, len(session.symbols)) for symbol in session.symbols]
    with ExitStack() as stack:
        eager, compiled = (
            stack.enter_context(
                Contestant(
                    name,
                    partial(make_contestant, alone, name),
                    device=trial.device,
                    settings=trial.settings,
                    watched=name == COMPILED,
                )
            )
            for name in (UPSTREAM_EAGER, COMPILED)
        )
        try:
            return conduct(session, eager, compiled, contests)
        except (SymbolFailedError, ContestantError) as error:
            return failed_evidence(error)


class SymbolFailedError(Exception):
    """A contestant failed on a symbol; `eager_can` tells whether upstream eager forecasts all of its windows."""

    def __init__(self, symbol: str, error: ContestantError, *, eager_can: bool) -> None:
        super().__init__(symbol)
        self.symbol = symbol
        self.error = error
        self.eager_can = eager_can


class Forgiving:
    """Upstream eager that answers NaN where it raises: a series that it cannot forecast is no end of the contest."""

    def __init__(self, model: BoundModel) -> None:
        self._model = model
        self.patch_size, self.cache_class = model.patch_size, model.cache_class

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        try:
            return self._model.generate_mean(series, horizon_steps)
        except (ValueError, RuntimeError):  # torch's distributions refuse what is not finite
            return torch.full((*series.inputs.shape[:2], horizon_steps), torch.nan)


def make_contestant(trial: Trial, name: str) -> Any:
    """The model of a contestant, made in its own process; every symbol is a batch of one."""
    return trial.compiled(batch_sizes=(1,)) if name == COMPILED else Forgiving(trial.eager())


def contest_of(symbol: SymbolSeries, trial: Trial, symbols: int) -> SymbolContest:
    """Cut the windows of a symbol, in the precision and on the device of the trial."""
    columns = read_csv(symbol.series)
    workload = trial.workload
    windows = windows_of(symbol.name, len(columns.timestamps), "of this cell", workload, symbols)
    cut = []
    for start in windows.starts:
        series, present = window_series(columns, start, windows.context, windows.horizon, workload.patch_size)
        cut.append((series.to(device=trial.device, dtype=trial.dtype), present))
    return SymbolContest(symbol, windows, cut)


def conduct(
    session: Session, eager: Contestant, compiled: Contestant, contests: Sequence[SymbolContest]
) -> SuiteEvidence:
    """The contest itself, and what it shows."""
    trial = session.trial
    eager.introduction()
    session.cache_class_elsewhere = compiled.introduction().cache_class
    warm_up(trial, (eager, compiled))
    compiled.compilations()  # those of the warm-up are not the symbols'
    trial.quiet.give_way()
    with trial.quiet.timing():
        before = machine_conditions()
        used_before = [contestant.cpu_seconds() for contestant in (eager, compiled)]
        for contest in contests:
            forecast_symbol(contest, eager, compiled)
        used = [one.cpu_seconds() - then for one, then in zip((eager, compiled), used_before, strict=True)]
        after = machine_conditions()
    session.changed_elsewhere = tuple(
        dict.fromkeys(one for contestant in (eager, compiled) for one in contestant.end())
    )
    timings = {name: [ms for one in contests for ms in one.milliseconds[name]] for name in (UPSTREAM_EAGER, COMPILED)}
    unfair = unfair_turns(timings, used, threads=torch.get_num_threads()) if trial.device == "cpu" else ()
    models = trial.eager(), trial.eager(dtype=torch.float64)
    rows = [row_of(contest, *models) for contest in contests]
    if unfair:  # then no time means anything
        rows = [row | dict.fromkeys(("speedup", "speedup_low", "speedup_high")) for row in rows]
    return SuiteEvidence(
        suite=Suite.SYMBOLS,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures=figures_of(rows, unfair),
        details={"symbols": rows, "worst": worst_of(rows), "conditions": [{"before": before, "after": after}]},
    )


def warm_up(trial: Trial, contestants: Sequence[Contestant]) -> None:
    """Two forecasts each at the smallest and the largest context, as in every other suite, on series of no symbol."""
    workload = trial.workload
    horizon = lengths_of(workload)[1]
    for number, context in enumerate(2 * (workload.context_patches[0], workload.context_patches[-1])):
        series = trial.series(
            workload.patch_size,
            context,
            workload.horizon_patches[0],
            batch=1,
            variates=1,
            seed_offset=_WARM_UP_SEED + number,
        )
        for contestant in contestants:
            contestant.forecast(series_bytes(series), horizon)


def forecast_symbol(contest: SymbolContest, eager: Contestant, compiled: Contestant) -> None:
    """Every window by both, in turn, if upstream eager can forecast the newest one at all."""
    horizon, windows = contest.windows.horizon, iter([series for series, _ in contest.series])
    if not is_forecast_by(eager, contest.series[0][0], horizon):
        contest.problem = NO_FINITE_FORECAST
        return

    def next_window() -> tuple[Series, bytes]:
        series = next(windows)
        return series, series_bytes(series)

    try:
        timings, rounds = Contest((eager, compiled), next_window, horizon).rounds(contest.windows.count)
    except ContestantError as error:
        whole = error.name == UPSTREAM_EAGER or all(is_forecast_by(eager, one, horizon) for one, _ in contest.series)
        raise SymbolFailedError(contest.symbol.name, error, eager_can=whole) from error
    contest.milliseconds, contest.forecasts = timings, [answers for _, answers in rounds]
    contest.compilations = compiled.compilations()
    if not all(bool(answers[UPSTREAM_EAGER].isfinite().all()) for answers in contest.forecasts):
        contest.problem = NO_FINITE_FORECAST


def is_forecast_by(eager: Contestant, series: Series, horizon: int) -> bool:
    return bool(eager.forecast(series_bytes(series), horizon).isfinite().all())


# --- what it shows ----------------------------------------------------------------------------------------------------


def failed_evidence(error: SymbolFailedError | ContestantError) -> SuiteEvidence:
    """Say who failed, on which symbol; it counts against the candidate if upstream eager can forecast the series."""
    cause = error.error if isinstance(error, SymbolFailedError) else error
    blamed = cause.failed.by_the_model and cause.name == COMPILED
    failure = cause.failed.failure
    if isinstance(error, SymbolFailedError):
        blamed = blamed and error.eager_can
        told = "" if error.eager_can else f" ({NO_FINITE_FORECAST})"
        failure = failure.model_copy(update={"message": f"{error.symbol}: {failure.message}{told}"})
    return SuiteEvidence(
        suite=Suite.SYMBOLS, outcome=Outcome.MODEL_FAILED if blamed else Outcome.ERROR, failure=failure
    )


def row_of(contest: SymbolContest, eager: BoundModel, exact: BoundModel) -> dict[str, Any]:
    """The row of one symbol; None where there is nothing to say."""
    row: dict[str, Any] = {
        "symbol": contest.symbol.name,
        "mae_eager": None,
        "mae_compiled": None,
        "difference": None,
        "equivalence": None,
        "speedup": None,
        "speedup_low": None,
        "speedup_high": None,
        "recompiles": None,
        "context": contest.windows.context,
        "horizon": contest.windows.horizon,
        "windows": contest.windows.count,
        "notes": list(contest.symbol.notes),
        "problem": contest.problem,
    }
    if contest.problem:
        return row
    timed = [
        TimedForecast(series, eager=answers[UPSTREAM_EAGER], candidate=answers[COMPILED])
        for (series, _), answers in zip(contest.series, contest.forecasts, strict=True)
    ]
    over_eager = ratio_of_medians(contest.milliseconds[UPSTREAM_EAGER], contest.milliseconds[COMPILED])
    mae_eager, mae_compiled = contest.mae(UPSTREAM_EAGER), contest.mae(COMPILED)
    return row | {
        "mae_eager": mae_eager,
        "mae_compiled": mae_compiled,
        "difference": relative_difference(mae_eager, mae_compiled, _ROUNDING * contest.size_of_truth),
        "equivalence": worst_ratio_to(eager, exact, timed),
        "speedup": over_eager.value,
        "speedup_low": over_eager.low,
        "speedup_high": over_eager.high,
        "recompiles": contest.compilations,
    }


def relative_difference(eager: float, compiled: float, rounding: float) -> float:
    """How far the candidate's MAE is from eager's, over eager's; NaN if it has none."""
    difference = abs(compiled - eager)
    if math.isnan(difference) or difference == 0.0:
        return difference
    scale = max(eager, rounding)
    return difference / scale if scale > 0.0 else math.inf


def worst_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The symbol that each figure is of; none of those that a symbol has no figure for."""
    found = {name: _worst_row(rows, column, smallest=name == SPEEDUP) for name, (column, _) in FIGURES.items()}
    return {name: row["symbol"] for name, row in found.items() if row is not None}


def figures_of(rows: Sequence[Mapping[str, Any]], unfair: Sequence[str]) -> dict[str, Figure]:
    """The worst symbol of each; none where a symbol has no figure, since that one may be the worst."""
    figures = {name: _figure(rows, name) for name in FIGURES}
    if unfair:
        why = f"the contestants' turns were not their own: {'; '.join(unfair)}"
        figures[SPEEDUP] = Figure(value=None, unit="x", missing=why)
    return figures


def _figure(rows: Sequence[Mapping[str, Any]], name: str) -> Figure:
    column, what = FIGURES[name]
    is_speedup = name == SPEEDUP
    unit, worst = "x" if is_speedup else "", _worst_row(rows, column, smallest=is_speedup)
    if worst is None:
        without = next(row for row in rows if row[column] is None)
        return Figure(value=None, unit=unit, missing=f"{without['symbol']}: {without['problem']}")
    low, high = (worst["speedup_low"], worst["speedup_high"]) if is_speedup else (None, None)
    method = f"{what}; the worst of {len(rows)}: {worst['symbol']}"
    return Figure(value=float(worst[column]), unit=unit, low=low, high=high, method=method)


def _worst_row(rows: Sequence[Mapping[str, Any]], column: str, *, smallest: bool) -> Mapping[str, Any] | None:
    if any(row[column] is None for row in rows):
        return None

    def badness(row: Mapping[str, Any]) -> float:
        value = float(row[column])
        return math.inf if math.isnan(value) else -value if smallest else value

    return max(rows, key=badness)
