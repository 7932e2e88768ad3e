"""One contest in one fresh process of the torch environment: `python contest.py <specification> <output>`."""

import resource
import sys
import time
from pathlib import Path
from typing import Any, Literal, Self

from toto_compat.contract.request import CacheRequest, Workload
from toto_compat.contract.statistics import taking_turns
from toto_compat.contract.strict_model import StrictModel


class Contest(StrictModel):
    """Says who forecasts what, how often. A contestant is '<cache> eager' or '<cache> compiled'."""

    model: Literal["tiny", "base"]
    contestants: tuple[str, ...]
    context_steps: int
    horizon_steps: int
    samples: int = 0
    samples_per_batch: int = 16
    rounds: int
    one_off_first: bool = True  # what every first compilation of a process pays, before anybody's time is taken


class ContestResult(StrictModel):
    """Holds what was measured, by contestant; many values are in the order they were taken."""

    timings: dict[str, tuple[float, ...]]  # milliseconds per forecast
    first_forecast_s: dict[str, float]
    kernels_ms: dict[str, tuple[float, ...]]  # time inside compiled graphs alone, per forecast
    peak_rss_bytes: int


def run(contest: Contest) -> ContestResult:
    """First forecasts apart, then rounds of one forecast each in turn."""
    # here and not above: the host reads what a contest is without torch
    import torch

    from toto_compat.model.backbone import build_backbone
    from toto_compat.model.binding import bind
    from toto_compat.model.bound import CompileSpec
    from toto_compat.model.series import make_series

    torch.set_num_threads(1)
    workload = Workload(model=contest.model)
    backbone = build_backbone(workload, dtype=torch.float32, device="cpu")
    patch = backbone.patch_embed.stride
    context, horizon = contest.context_steps // patch, -(-contest.horizon_steps // patch)
    series = make_series(workload, patch_size=patch, context_patches=context, horizon_patches=horizon)

    def forecast(model: Any) -> float:
        start = time.perf_counter()
        if contest.samples:
            model.generate_samples(
                series,
                contest.horizon_steps,
                num_samples=contest.samples,
                samples_per_batch=contest.samples_per_batch,
            )
        else:
            model.generate_mean(series, contest.horizon_steps)
        return time.perf_counter() - start

    if contest.one_off_first:
        torch.compile(lambda x: (x @ x).softmax(-1) + 1)(torch.ones(8, 8))
    models, first = {}, {}
    for name in contest.contestants:
        cache, _, how = name.partition(" ")
        spec = CompileSpec() if how == "compiled" else None
        request = CacheRequest(name=cache, source="builtin")
        start = time.perf_counter()
        models[name] = bind(backbone, request, compile_spec=spec, max_patches=context + horizon)
        forecast(models[name])
        first[name] = time.perf_counter() - start  # binding included: fixed_size starts the compiler there
        forecast(models[name])
    timings: dict[str, list[float]] = {name: [] for name in models}
    kernels: dict[str, list[float]] = {name: [] for name in models}
    with _GraphClock() as clock:
        for name in taking_turns(list(models), contest.rounds):
            before = clock.seconds
            timings[name].append(forecast(models[name]) * 1e3)
            kernels[name].append((clock.seconds - before) * 1e3)
    return ContestResult(
        timings={name: tuple(values) for name, values in timings.items()},
        first_forecast_s=first,
        kernels_ms={name: tuple(values) for name, values in kernels.items()},
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


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
