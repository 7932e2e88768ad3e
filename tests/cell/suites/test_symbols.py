"""The suite of the user's own series, with real upstream eager against candidates that are right, wrong or fail."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toto.inference.forecaster import TotoForecaster

from tests.cell.small_trials import TWO_LAYERS, WORKLOAD
from toto_compat.cell.session import Session
from toto_compat.cell.suites import symbols
from toto_compat.cell.suites.speed_figures import COMPILED
from toto_compat.cell.suites.symbols import Forgiving, contest_of, relative_difference, run_symbols
from toto_compat.cell.trial import Trial
from toto_compat.contract.csv_file import read_csv
from toto_compat.contract.request import CacheRequest, CellProfile, CsvSeries, SymbolSeries
from toto_compat.contract.result import Outcome, SuiteEvidence
from toto_compat.model import backbone
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series, window_series

pytestmark = pytest.mark.cell

PATCH = WORKLOAD.patch_size
ROWS = 40 * PATCH


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "SHAPES", {"tiny": TWO_LAYERS})
    # a single symbol is forecast thirty times for its timing, which nothing here looks at
    monkeypatch.setattr("toto_compat.contract.symbols.FEWEST_TIMED_FORECASTS", 5)


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., SymbolSeries]:
    """Write a series and give it as a cell gets it."""

    def write(name: str, values: Callable[[int], float | str], rows: int = ROWS) -> SymbolSeries:
        path = tmp_path / f"{name}.csv"
        lines = [f"{1_700_000_000 + 86_400 * row},{values(row)}" for row in range(rows)]
        path.write_text("\n".join(["time,close", *lines]), encoding="utf-8")
        return SymbolSeries(name=name, series=CsvSeries(path=str(path), time_column="time", value_columns=("close",)))

    return write


def waves(row: int) -> float:
    return 100 + 10 * math.sin(row / 9) + (row * 37 % 11)


class Candidate:
    """Upstream eager under another name, with something done to its forecasts or beside them."""

    def __init__(self, model: BoundModel, changed: Callable[[Series, Tensor], Tensor]) -> None:
        self._model, self._changed = model, changed
        self.patch_size, self.cache_class = model.patch_size, "tests:Candidate"

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self._changed(series, self._model.generate_mean(series, horizon_steps))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SuiteEvidence]:
    def run_on(
        *given: SymbolSeries, changed: Callable[[Series, Tensor], Tensor] = lambda _series, forecast: forecast
    ) -> SuiteEvidence:
        def make(trial: Trial, name: str) -> Any:
            return Candidate(trial.eager(), changed) if name == COMPILED else Forgiving(trial.eager())

        monkeypatch.setattr(symbols, "make_contestant", make)
        trial = Trial(workload=WORKLOAD, cache=CacheRequest(name="fixed_size", source="builtin"))
        return run_symbols(Session(trial, CellProfile(iterations=1), symbols=given))

    return run_on


def row(evidence: SuiteEvidence, symbol: str) -> dict[str, Any]:
    return next(one for one in evidence.details["symbols"] if one["symbol"] == symbol)


def value(evidence: SuiteEvidence, figure: str) -> float | None:
    return evidence.figures[figure].value


def test_eager_against_itself_differs_by_nothing(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    short = given("SHORT", waves, rows=PATCH + 4 * PATCH + 30)
    gaps = given("GAPS", lambda row: "" if row % 5 == 0 or row == ROWS - 1 else waves(row))
    evidence = run(short, gaps, given("FLAT", lambda _row: 5.0))
    assert evidence.outcome is Outcome.MEASURED
    assert [value(evidence, name) for name in ("symbol_mae", "symbol_recompiles")] == [0.0, 0.0]
    assert (value(evidence, "symbol_equivalence") or 9.0) <= 1.0
    assert row(evidence, "SHORT")["context"] % PATCH  # so that it was padded
    assert all(one["mae_eager"] == one["mae_compiled"] for one in evidence.details["symbols"])


def test_the_worst_symbol_decides_and_is_named(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    def wrong_on_large(series: Series, forecast: Tensor) -> Tensor:
        return forecast * 1.5 if series.inputs.max() > 1000 else forecast

    evidence = run(given("GOOD", waves), given("BAD", lambda row: 100 * waves(row)), changed=wrong_on_large)
    assert (value(evidence, "symbol_equivalence") or 0.0) > 1000
    assert (value(evidence, "symbol_mae") or 0.0) > 0.01
    assert evidence.details["worst"]["symbol_mae"] == evidence.details["worst"]["symbol_equivalence"] == "BAD"
    assert row(evidence, "GOOD")["difference"] == 0.0


def test_who_reads_the_held_out_values_has_no_error_and_is_not_equal(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    spied = given("SPIED", waves)
    columns = read_csv(spied.series)

    def looked_up(series: Series, forecast: Tensor) -> Tensor:
        after = [
            waves((int(series.timestamp_seconds[0, 0, -1]) - 1_700_000_000) // 86_400 + 1 + step)
            for step in range(forecast.shape[-1])
        ]
        return torch.tensor(after).expand_as(forecast)

    assert columns.values[0][-1] == waves(ROWS - 1)
    evidence = run(spied, changed=looked_up)
    assert row(evidence, "SPIED")["mae_compiled"] < 1e-3
    assert (value(evidence, "symbol_equivalence") or 0.0) > 1000


def test_who_answers_with_an_earlier_forecast_is_not_equal(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    known: list[Tensor] = []

    def remembered(_series: Series, forecast: Tensor) -> Tensor:
        known.append(forecast)
        return known[max(0, len(known) - 2)]

    assert (value(run(given("A", waves), changed=remembered), "symbol_equivalence") or 0.0) > 100


def test_compilations_count_for_the_symbol_that_was_forecast(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    def compiles_on_large(series: Series, forecast: Tensor) -> Tensor:
        if series.inputs.max() > 1000:
            namespace: dict[str, Any] = {}
            exec("def fresh(values):\n    return values + 0", namespace)  # noqa: S102 - a code object of its own
            return torch.compile(namespace["fresh"], backend="eager")(forecast)
        return forecast

    evidence = run(given("SMALL", waves), given("LARGE", lambda row: 100 * waves(row)), changed=compiles_on_large)
    large = row(evidence, "LARGE")
    assert (row(evidence, "SMALL")["recompiles"], large["recompiles"]) == (0, large["windows"])
    assert value(evidence, "symbol_recompiles") == large["windows"]


def test_nan_from_the_candidate_is_a_figure_that_is_no_number(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    evidence = run(given("A", waves), changed=lambda _series, forecast: forecast * torch.nan)
    assert math.isnan(value(evidence, "symbol_mae") or 0.0)
    assert evidence.details["worst"]["symbol_mae"] == "A"


def test_a_candidate_that_raises_is_blamed_with_the_symbol(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    def raises(series: Series, forecast: Tensor) -> Tensor:
        if series.inputs.max() > 1000:
            raise IndexError("out of range")
        return forecast

    evidence = run(given("GOOD", waves), given("BAD", lambda row: 100 * waves(row)), changed=raises)
    assert evidence.outcome is Outcome.MODEL_FAILED
    assert evidence.failure is not None
    assert evidence.failure.message == "BAD: IndexError: out of range"


@pytest.fixture
def eager_without_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = TotoForecaster.generate_mean

    def refuses(self: Any, inputs: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if inputs.max() > 1000:
            raise ValueError("expected finite parameters")
        answer: Tensor = real(self, inputs, *arguments, **named)
        return answer

    monkeypatch.setattr(TotoForecaster, "generate_mean", refuses)
    return iter(())


@pytest.mark.usefixtures("eager_without_answer")
def test_a_series_that_eager_cannot_forecast_decides_nothing_and_is_named(
    run: Callable[..., SuiteEvidence], given: Callable[..., SymbolSeries]
) -> None:
    evidence = run(given("GOOD", waves), given("MAD", lambda row: 100 * waves(row)))
    assert evidence.outcome is Outcome.MEASURED
    for figure in evidence.figures.values():
        assert figure.value is None
        assert figure.missing.startswith("MAD: upstream eager has no finite forecast") or "turns" in figure.missing
    assert row(evidence, "GOOD")["difference"] == 0.0


def test_a_short_context_is_padded_as_toto_ts_pads(given: Callable[..., SymbolSeries]) -> None:
    columns = read_csv(given("A", waves).series)
    series, present = window_series(columns, 7, PATCH + 3, PATCH, PATCH)
    assert series.inputs.shape == (1, 1, 2 * PATCH)
    assert not series.padding_mask[..., : PATCH - 3].any()
    assert series.padding_mask[..., PATCH - 3 :].all()
    assert series.inputs[0, 0, PATCH - 3] == pytest.approx(waves(7))
    assert series.truth[0, 0, 0] == pytest.approx(waves(7 + PATCH + 3))
    assert present.all()


def test_what_is_missing_is_masked_also_where_it_is_the_newest_value(given: Callable[..., SymbolSeries]) -> None:
    columns = read_csv(given("A", lambda row: "" if row == 99 else waves(row)).series)
    series, present = window_series(columns, 100 - PATCH, PATCH, 8, PATCH)
    assert not series.padding_mask[0, 0, -1]
    _, present = window_series(columns, 98 - PATCH, PATCH, 8, PATCH)
    assert [bool(one) for one in present[0, 0, :3]] == [True, False, True]


def test_every_forecast_of_a_symbol_is_of_another_window(given: Callable[..., SymbolSeries]) -> None:
    trial = Trial(workload=WORKLOAD, cache=CacheRequest(name="fixed_size", source="builtin"))
    contest = contest_of(given("A", waves), trial, 1)
    assert len({tuple(series.inputs.flatten().tolist()) for series, _ in contest.series}) == contest.windows.count == 5


@pytest.mark.parametrize(
    ("eager", "compiled", "expected"),
    [(2.0, 2.0, 0.0), (2.0, 2.1, 0.05), (0.0, 0.0, 0.0), (0.0, 1e-9, 1e-3), (2.0, math.inf, math.inf)],
)
def test_a_difference_is_over_eagers_error_or_over_rounding(eager: float, compiled: float, expected: float) -> None:
    assert relative_difference(eager, compiled, 1e-6) == pytest.approx(expected)
