"""Every shape within what was announced, in one process of a torch environment: `python shapes.py <asked> <output>`.

Counts what is compiled after the warm-up and holds the forecasts against upstream eager, for shapes drawn between the
smallest and the largest that production may ask for.
"""

import itertools
import platform
import random
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from toto_compat.contract.request import CacheRequest, Workload
from toto_compat.contract.strict_model import StrictModel

SEED = 20251030


class Asked(StrictModel):
    """Says which shapes are tried: lengths in points, the corners of all three ranges and so many drawn ones."""

    model: Literal["tiny", "base"] = "tiny"
    context: tuple[int, int] = (64, 4096)
    horizon: tuple[int, int] = (1, 336)
    batch: tuple[int, int] = (1, 512)
    batch_sizes: tuple[int, ...] = (1, 16, 128, 512)  # what is announced
    drawn: int = 60
    also: tuple[tuple[int, int, int], ...] = ()  # shapes to try besides: context, horizon, batch
    autocast: Literal["float16", "bfloat16"] | None = None


class Found(StrictModel):
    """Holds what was counted and compared. Errors are relative to the largest value of the float64 forecast."""

    torch: str
    python: str
    model: str
    autocast: str | None
    shapes: int
    announced: tuple[int, ...]
    compilations_in_warm_up: int
    compilations: int  # after the warm-up
    graph_breaks: int
    error: float  # of fixed_size compiled
    eager_error: float  # of upstream eager
    nudged: float  # how far upstream eager moves with its inputs one unit in the last place apart
    compared: list[tuple[int, int, int]] = Field(default=[])

    @property
    def error_over_allowed(self) -> float:
        """Hold the worst of all shapes against twice eager's worst error, or what one ulp moves eager by."""
        return self.error / max(2 * self.eager_error, self.nudged)


def shapes_of(asked: Asked, patch: int) -> list[tuple[int, int, int]]:
    """List context, horizon and batch: the corners first, the largest before the others, as the warm-up."""
    ends = (sorted(pair, reverse=True) for pair in (asked.context, asked.horizon, asked.batch))
    shapes = [(context, horizon, batch) for context, horizon, batch in itertools.product(*ends)]
    generator = random.Random(SEED)  # noqa: S311 - shapes, no secret
    shapes += asked.also
    for _ in range(asked.drawn):
        context = generator.randint(asked.context[0] // patch, asked.context[1] // patch) * patch
        # as many small batches as large ones: between powers of two, not between numbers
        batch = round(2 ** generator.uniform(0, asked.batch[1].bit_length() - 1))
        shapes.append((context, generator.randint(*asked.horizon), max(asked.batch[0], batch)))
    return list(dict.fromkeys(shapes))


def run(asked: Asked) -> Found:
    """Warm up with the largest and the smallest shape, then forecast all of them, mean and sampled in turn."""
    # here and not above: the host reads what is asked without torch
    import contextlib

    import torch

    from toto_compat.cell.live import CompilerWatch
    from toto_compat.contract.events import EventKind
    from toto_compat.model.backbone import build_backbone
    from toto_compat.model.binding import bind
    from toto_compat.model.bound import CompileSpec
    from toto_compat.model.series import make_series

    workload = Workload(model=asked.model)
    backbone = build_backbone(workload, dtype=torch.float32, device="cpu")
    upstream = CacheRequest(name="upstream", source="builtin")
    eager = bind(backbone, upstream)
    exact = bind(build_backbone(workload, dtype=torch.float64, device="cpu"), upstream)
    patch: int = backbone.patch_embed.stride
    most = asked.context[1] // patch + -(-asked.horizon[1] // patch)
    fixed = bind(
        backbone,
        CacheRequest(name="fixed_size", source="builtin"),
        compile_spec=CompileSpec(),
        max_patches=most,
        max_context=asked.context[1] // patch,
        batch_sizes=asked.batch_sizes,
    )

    def precision() -> Any:
        return torch.autocast("cpu", getattr(torch, asked.autocast)) if asked.autocast else contextlib.nullcontext()

    def series_of(context: int, horizon: int, batch: int) -> Any:
        patches = -(-horizon // patch)
        return make_series(
            workload, patch_size=patch, context_patches=context // patch, horizon_patches=patches, batch=batch
        )

    def sampled(shape: tuple[int, int, int]) -> None:
        context, horizon, batch = shape
        with precision():
            fixed.generate_samples(series_of(context, horizon, 1), horizon, num_samples=batch, samples_per_batch=batch)

    def compared(shape: tuple[int, int, int]) -> tuple[float, float, float]:
        """Return the errors of fixed_size and eager, and how far eager is moved: rows do not depend on each other."""
        context, horizon, batch = shape
        series = series_of(context, horizon, batch)
        with precision():
            ours = fixed.generate_mean(series, horizon)
        rows = sorted({0, batch - 1})
        some = type(series)(*(getattr(series, name)[rows] for name in series.__dataclass_fields__))
        truth = exact.generate_mean(some.to(dtype=torch.float64), horizon)
        with precision():
            theirs = eager.generate_mean(some, horizon)
            moved = eager.generate_mean(some.nudged(1), horizon)
        largest = truth.abs().max()
        return tuple(float(x.abs().max() / largest) for x in (ours[rows] - truth, theirs - truth, moved - theirs))  # type: ignore[return-value]

    shapes = shapes_of(asked, patch)
    errors = []
    with CompilerWatch("warm-up") as watch:
        smallest = asked.context[0], asked.horizon[0], asked.batch[0]
        for shape in (smallest, shapes[0]):
            compared(shape)
            sampled(shape)
        after = watch.mark("after")
        for number, shape in enumerate(shapes):
            errors.append(compared(shape))
            if number % 2:
                sampled(shape)
    warm_up = watch.phases[0]
    ours, theirs, moved = (max(values) for values in zip(*errors, strict=True))
    return Found(
        torch=torch.__version__,
        python=platform.python_version(),
        model=asked.model,
        autocast=asked.autocast,
        shapes=len(shapes),
        announced=asked.batch_sizes,
        compilations_in_warm_up=len(warm_up.compile_starts),
        compilations=len(after.compile_starts),
        graph_breaks=after.count(EventKind.GRAPH_BREAK) + warm_up.count(EventKind.GRAPH_BREAK),
        error=ours,
        eager_error=theirs,
        nudged=moved,
        compared=shapes,
    )


if __name__ == "__main__":
    asked_file, output = map(Path, sys.argv[1:])
    output.write_text(
        run(Asked.model_validate_json(asked_file.read_text(encoding="utf-8"))).model_dump_json(), encoding="utf-8"
    )
