"""One contest in one fresh process of the torch environment: `python contest.py <specification> <output>`."""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from toto_compat.contract.request import CacheRequest, Workload
from toto_compat.contract.statistics import taking_turns
from toto_compat.contract.strict_model import StrictModel


class Contest(StrictModel):
    """Says who forecasts what, how often.

    A contestant is '<cache> eager', '<cache> compiled' or 'fixed_size stream', compiled with toto-ts's random stream.
    """

    model: Literal["tiny", "base"]
    contestants: tuple[str, ...]
    context_steps: int
    horizon_steps: int
    samplings: tuple[tuple[int, int], ...] = ()  # samples and their batch, one after the other; none is a mean forecast
    rounds: int
    rounds_of: dict[str, int] = Field(default={})  # fewer for those who take long, spread over the others' rounds
    threads: int = 1
    as_a_service: bool = False  # through toto-ts's forecast(), with compile_toto told what is to come
    one_off_first: bool = True  # what every first compilation of a process pays, before anybody's time is taken


class ContestResult(StrictModel):
    """Holds what was measured, by contestant; many values are in the order they were taken."""

    timings: dict[str, tuple[float, ...]]  # milliseconds per forecast
    first_forecast_s: dict[str, float]
    kernels_ms: dict[str, tuple[float, ...]]  # time inside compiled graphs alone, per forecast
    peak_rss_bytes: int


def run(contest: Contest) -> ContestResult:
    """Make the first forecasts apart, then rounds of one forecast each in turn."""
    # here and not above: the host reads what a contest is without torch
    import torch

    from toto_compat.model.backbone import build_backbone

    torch.set_num_threads(contest.threads)
    backbone = build_backbone(Workload(model=contest.model), dtype=torch.float32, device="cpu")
    if contest.one_off_first:
        torch.compile(lambda x: (x @ x).softmax(-1) + 1)(torch.ones(8, 8))
    forecasts: dict[str, Callable[[], object]] = {}
    first: dict[str, float] = {}
    for name in contest.contestants:
        start = time.perf_counter()
        forecasts[name] = (_service if contest.as_a_service else _bound)(contest, name, backbone)
        forecasts[name]()
        first[name] = time.perf_counter() - start  # binding included: fixed_size starts the compiler there
        if name not in contest.rounds_of:  # who takes long is eager, and as warm as after two
            forecasts[name]()
    timings: dict[str, list[float]] = {name: [] for name in forecasts}
    kernels: dict[str, list[float]] = {name: [] for name in forecasts}
    with _GraphClock() as clock:
        for number, name in enumerate(taking_turns(list(forecasts), contest.rounds)):
            if not _takes_part(contest, name, number // len(forecasts)):
                continue
            before, start = clock.seconds, time.perf_counter()
            forecasts[name]()
            timings[name].append((time.perf_counter() - start) * 1e3)
            kernels[name].append((clock.seconds - before) * 1e3)
    return ContestResult(
        timings={name: tuple(values) for name, values in timings.items()},
        first_forecast_s=first,
        kernels_ms={name: tuple(values) for name, values in kernels.items()},
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _takes_part(contest: Contest, name: str, current_round: int) -> bool:
    """Spread the rounds of those who have fewer evenly over all rounds."""
    wanted = contest.rounds_of.get(name, contest.rounds)
    return (current_round + 1) * wanted // contest.rounds > current_round * wanted // contest.rounds


def _bound(contest: Contest, name: str, backbone: Any) -> Callable[[], object]:
    """Return the forecast of a model as the suites bind it."""
    # torch is where the contest runs, not where it is read
    from toto_compat.model.binding import bind
    from toto_compat.model.bound import CompileSpec

    cache, _, how = name.partition(" ")
    series, context, horizon = _series(contest, backbone)
    model = bind(
        backbone,
        CacheRequest(name=cache, source="builtin"),
        compile_spec=None if how == "eager" else CompileSpec(),
        max_patches=context + horizon,
        draws="toto-ts" if how == "stream" else None,
    )

    def forecast() -> None:
        if not contest.samplings:
            model.generate_mean(series, contest.horizon_steps)
        for samples, per_batch in contest.samplings:
            model.generate_samples(series, contest.horizon_steps, num_samples=samples, samples_per_batch=per_batch)

    return forecast


def _service(contest: Contest, name: str, backbone: Any) -> Callable[[], object]:
    """Return the forecast as a service asks for it: toto-ts's forecast(), and compile_toto told what is to come."""
    # torch is where the contest runs, not where it is read
    from toto.data.util.dataset import MaskedTimeseries
    from toto.inference.forecaster import TotoForecaster

    from toto_compat.model.forecaster import compile_toto

    cache, _, how = name.partition(" ")
    if name == "upstream eager":
        forecaster = TotoForecaster(backbone)
    else:
        forecaster = compile_toto(
            backbone,
            cache=cache,
            mode=None if how == "eager" else "default",
            max_context=contest.context_steps,
            max_horizon=contest.horizon_steps,
            batch_sizes=tuple(per_batch for _, per_batch in contest.samplings),
            draws="toto-ts" if how == "stream" else None,
        )
    series, _, _ = _series(contest, backbone)
    inputs = MaskedTimeseries(
        series.inputs, series.padding_mask, series.id_mask, series.timestamp_seconds, series.time_interval_seconds
    )

    def forecast() -> None:
        for samples, per_batch in contest.samplings:
            forecaster.forecast(inputs, contest.horizon_steps, num_samples=samples, samples_per_batch=per_batch)

    return forecast


def _series(contest: Contest, backbone: Any) -> tuple[Any, int, int]:
    """Return the series, and its context and horizon in patches."""
    # torch is where the contest runs, not where it is read
    from toto_compat.model.series import make_series

    patch = backbone.patch_embed.stride
    context, horizon = contest.context_steps // patch, -(-contest.horizon_steps // patch)
    workload = Workload(model=contest.model)
    series = make_series(workload, patch_size=patch, context_patches=context, horizon_patches=horizon)
    return series, context, horizon


class _GraphClock:
    """Adds up the time spent inside inductor's compiled graphs while the block runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Self:
        # torch is where the contest runs, not where it is read
        from torch._inductor import output_code

        self._class = output_code.CompiledFxGraph
        self._original = original = self._class.__call__

        def timed(graph: Any, inputs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(graph, inputs)
            finally:
                self.seconds += time.perf_counter() - start

        self._class.__call__ = timed
        return self

    def __exit__(self, *_: object) -> None:
        self._class.__call__ = self._original


if __name__ == "__main__":
    specification, output = map(Path, sys.argv[1:])
    contest = Contest.model_validate_json(specification.read_text(encoding="utf-8"))
    output.write_text(run(contest).model_dump_json(), encoding="utf-8")
