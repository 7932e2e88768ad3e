"""Forecasts held-out windows eager and compiled, in the service's own interpreter: `backtest.py <request> <output>`.

What is compared is said by the objects themselves: which cache was bound, and how often compiled graphs really ran.
"""

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from toto_compat.contract.strict_model import StrictModel
from toto_compat.environments.here import freeze_lock


class Window(StrictModel):
    """A stretch of one series: what the model sees, and what came then."""

    symbol: str
    context: tuple[float | None, ...]
    truth: tuple[float | None, ...]
    first_timestamp: int
    interval_seconds: int


class BacktestRequest(StrictModel):
    windows: tuple[Window, ...]
    model: Literal["tiny", "base"] = "base"
    checkpoint: str | None = None  # a folder
    cache: str = "fixed_size"
    mode: str = "default"
    samples: int = 0  # 0: the mean forecast
    samples_per_batch: int = 16
    device: str = "cpu"
    seed: int = 20251030
    score: str = ""  # path/to/file.py:function of (forecast, truth, context) -> number


class Forecasts(StrictModel):
    """One way to forecast: per window the errors, the score of the user's own function and the time."""

    absolute: tuple[float, ...]  # mean absolute error
    squared: tuple[float, ...]  # mean squared error
    percentage: tuple[float | None, ...]  # mean absolute percentage error; None where the truth has a zero
    score: tuple[float, ...]
    milliseconds: tuple[float, ...]


class BacktestResult(StrictModel):
    eager: Forecasts
    compiled: Forecasts
    largest_difference: float  # between the two forecasts, over the size of eager's
    cache_class: str
    graph_calls: int  # of compiled graphs, in the forecasts that were scored
    compilations: int
    eager_because: str
    torch: str
    lock: str  # of this interpreter


def run(request: BacktestRequest) -> BacktestResult:
    """Forecast every window both ways, one after the other, from the same random state."""
    # here and not above: the host reads what a backtest is without torch
    import torch
    from toto.data.util.dataset import MaskedTimeseries
    from toto.inference.forecaster import TotoForecaster

    from toto_compat.contract.request import Workload
    from toto_compat.model.backbone import build_backbone
    from toto_compat.model.forecaster import compile_toto
    from toto_compat.production.switched import cache_class_of

    score = load_score(request.score)
    backbone = build_backbone(
        Workload(model=request.model), dtype=torch.float32, device=request.device, checkpoint_folder=request.checkpoint
    )
    first = request.windows[0]
    batch = max(1, request.samples_per_batch if request.samples else 1)
    eager = TotoForecaster(backbone)
    compiled = compile_toto(
        backbone,
        request.cache,
        request.mode,
        max_context=len(first.context),
        max_horizon=len(first.truth),
        batch_sizes=(batch,),
    )

    def forecast(forecaster: Any, window: Window) -> tuple[list[float], float]:
        values = torch.tensor([[math.nan if one is None else one for one in window.context]], device=request.device)
        known = values.isfinite()
        steps = torch.arange(len(window.context), device=request.device)
        series = MaskedTimeseries(
            torch.where(known, values, 0.0),
            known,
            torch.zeros_like(values, dtype=torch.int),
            (window.first_timestamp + steps * window.interval_seconds)[None],
            torch.tensor([window.interval_seconds], device=request.device),
            0,
        )
        torch.manual_seed(request.seed)
        started = time.perf_counter()
        drawn = {"num_samples": request.samples, "samples_per_batch": request.samples_per_batch}
        answer = forecaster.forecast(series, len(window.truth), **(drawn if request.samples else {}))
        middle = answer.samples.median(dim=-1).values if request.samples else answer.mean
        numbers = middle.double().flatten().tolist()
        return numbers, (time.perf_counter() - started) * 1e3

    with graph_calls() as counted:
        for forecaster in (eager, compiled):  # the first of each compiles and allocates
            forecast(forecaster, first)
        counted.calls = 0
        answers = [[forecast(forecaster, window) for window in request.windows] for forecaster in (eager, compiled)]
        calls = counted.calls
    pairs = zip(answers[0], answers[1], strict=True)
    return BacktestResult(
        eager=scored(answers[0], request.windows, score),
        compiled=scored(answers[1], request.windows, score),
        largest_difference=max(_apart(ours, theirs) for (theirs, _), (ours, _) in pairs),
        cache_class=cache_class_of(compiled),
        graph_calls=calls,
        compilations=counted.compilations,
        eager_because=str(getattr(compiled, "eager_because", "")),
        torch=torch.__version__,
        lock=freeze_lock(),
    )


def scored(
    answers: list[tuple[list[float], float]],
    windows: tuple[Window, ...],
    score: Callable[[list[float], list[float | None], list[float | None]], float] | None,
) -> Forecasts:
    """Hold forecasts against what came; points that nobody measured do not count."""
    absolute, squared, percentage, scores = [], [], [], []
    for (forecast, _), window in zip(answers, windows, strict=True):
        pairs = [(ours, true) for ours, true in zip(forecast, window.truth, strict=True) if true is not None]
        errors = [abs(ours - true) for ours, true in pairs]
        absolute.append(sum(errors) / len(errors))
        squared.append(sum(error**2 for error in errors) / len(errors))
        zero = any(true == 0 for _, true in pairs)
        shares = [] if zero else [abs(ours - true) / abs(true) for ours, true in pairs]
        percentage.append(None if zero else 100 * sum(shares) / len(shares))
        if score is not None:
            scores.append(float(score(forecast, list(window.truth), list(window.context))))
    return Forecasts(
        absolute=tuple(absolute),
        squared=tuple(squared),
        percentage=tuple(percentage),
        score=tuple(scores),
        milliseconds=tuple(taken for _, taken in answers),
    )


def _apart(ours: list[float], theirs: list[float]) -> float:
    size = max(abs(one) for one in theirs) or 1.0
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / size


def load_score(source: str) -> Callable[..., float] | None:
    """Import the user's own function from 'path/to/file.py:function'."""
    if not source:
        return None
    path, _, name = source.rpartition(":")
    spec = importlib.util.spec_from_file_location("users_score", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{source}: no Python file there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., float] = getattr(module, name)
    return function


class _Counted:
    calls = 0
    compilations = 0


@contextlib.contextmanager
def graph_calls() -> Iterator[_Counted]:
    """Count the calls of inductor's compiled graphs, and the compilations, while the block runs."""
    # torch is where the backtest runs, not where it is read
    import torch
    from torch._inductor import output_code

    counted = _Counted()
    cls = output_code.CompiledFxGraph
    original = cls.__call__

    def counting(graph: Any, inputs: Any) -> Any:
        counted.calls += 1
        return original(graph, inputs)

    def started(*_: Any) -> None:
        counted.compilations += 1

    handler = torch._dynamo.callback.callback_handler
    handler.register_start_callback(started)
    cls.__call__ = counting
    try:
        yield counted
    finally:
        cls.__call__ = original
        if started in handler.start_callbacks:
            handler.remove_start_callback(started)


if __name__ == "__main__":
    asked = BacktestRequest.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(run(asked).model_dump_json(), encoding="utf-8")
