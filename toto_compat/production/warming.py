"""Compiles what a service will need, in the service's own interpreter: `python -m ...warming <request> <output>`.

It forecasts what was announced, as the service will, and counts what had to be compiled for it. A first process fills
the folder, a second one shows that nothing is left to compile.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, Literal

from toto_compat.contract.bucket_messages import ARTIFACT_LOGGER
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import InputError

Precision = Literal["float32", "float64", "bfloat16", "autocast-float16", "autocast-bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "float64", "bfloat16", "autocast-float16", "autocast-bfloat16")


class WarmRequest(StrictModel):
    """Says what the service will announce and forecast; lengths in points."""

    cache_dir: str
    model: Literal["tiny", "base"] = "base"
    checkpoint: str | None = None  # a folder
    mode: str = "reduce-overhead"
    max_context: int = 512
    max_horizon: int = 64
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()  # that forecasts begin with; none: the longest
    samples: int = 256  # 0: means alone
    variates: int = 1
    precision: Precision = "float32"
    draws: str = "direct"
    device: str = "cpu"
    threads: int | None = None  # None: as many as torch takes


class WarmResult(StrictModel):
    """Holds what one process compiled or found, and the file that it is kept in."""

    torch: str
    key: dict[str, str]
    file: str
    file_bytes: int | None  # None: there is no such file
    not_written: str  # why
    graphs_compiled: int
    graphs_found: int
    compiler_calls: int  # that built something: asking a compiler for its version builds nothing
    kept_files: int
    seconds: float  # binding and first forecasts


class Refused(StrictModel):
    """Holds an error that the user can act on."""

    message: str
    hint: str


def run(request: WarmRequest) -> WarmResult:
    """Forecast everything that was announced, and count."""
    # before torch is imported, which takes seconds: a folder that others can write to is refused at once
    from toto_compat.model.trusted_folder import make_trusted_folder

    folder = Path(request.cache_dir).expanduser()
    try:
        make_trusted_folder(folder)
    except OSError as error:
        raise InputError(
            f"{folder}: the folder cannot be made: {error.strerror}", hint="name a --cache-dir that this user can make"
        ) from error

    # here and not above: the host reads what a request is without torch
    import torch
    from torch._dynamo.utils import counters

    from toto_compat.contract.request import Workload
    from toto_compat.model.artifact_file import ArtifactFile
    from toto_compat.model.backbone import build_backbone

    if request.threads is not None:
        torch.set_num_threads(request.threads)
    weights = getattr(torch, request.precision) if "-" not in request.precision else torch.float32
    backbone = build_backbone(
        Workload(model=request.model), dtype=weights, device=request.device, checkpoint_folder=request.checkpoint
    )
    warnings = _Warnings()
    with built_by_a_compiler() as built, warnings.heard():
        started = time.perf_counter()
        for context in sorted(request.contexts or (request.max_context,)):
            forecaster = _forecast_announced(request, backbone, folder, context)
        seconds = time.perf_counter() - started
    artifacts = forecaster._static.artifacts
    content = artifacts.path.read_bytes() if artifacts.path.is_file() else None
    return WarmResult(
        torch=torch.__version__,
        key=artifacts.key,
        file=str(artifacts.path),
        file_bytes=None if content is None else len(content),
        not_written="; ".join(line for line in warnings.lines if "nothing was written" in line),
        graphs_compiled=counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
        graphs_found=counters["inductor"]["fxgraph_cache_hit"],
        compiler_calls=len(built),
        kept_files=0 if content is None else len(ArtifactFile.from_bytes(content).files),
        seconds=seconds,
    )


def _forecast_announced(request: WarmRequest, backbone: Any, folder: Path, context: int) -> Any:
    """Bind as the service will, and forecast from a context of this length: one patch, all patches, every batch."""
    # torch is where this runs, not where it is read
    import torch
    from toto.data.util.dataset import MaskedTimeseries

    from toto_compat.contract.request import Workload
    from toto_compat.model.forecaster import compile_toto
    from toto_compat.model.series import make_series

    forecaster = compile_toto(
        backbone,
        mode=request.mode,
        max_context=request.max_context,
        max_horizon=request.max_horizon,
        batch_sizes=request.batch_sizes,
        draws=request.draws,
        cache_dir=folder,
    )
    if getattr(forecaster, "eager_because", ""):
        raise InputError(
            f"fixed_size does not cover {forecaster.eager_because}: nothing would be compiled",
            hint="a service would run this model eager; docs/compile-toto.md lists what is covered",
        )
    patch: int = backbone.patch_embed.stride
    series = make_series(
        Workload(model=request.model),
        patch_size=patch,
        context_patches=ceil(context / patch),
        horizon_patches=1,
        batch=1,
        variates=request.variates,
    ).to(device=request.device, dtype=backbone.unembed.weight.dtype)
    inputs = MaskedTimeseries(
        series.inputs[..., -context:],
        series.padding_mask[..., -context:],
        series.id_mask[..., -context:],
        series.timestamp_seconds[..., -context:],
        series.time_interval_seconds,
        0,
    )
    half = request.precision.partition("autocast-")[2]
    mixed = torch.autocast(request.device.partition(":")[0], getattr(torch, half)) if half else contextlib.nullcontext()
    with mixed:
        for horizon in sorted({min(patch, request.max_horizon), request.max_horizon}):
            forecaster.forecast(inputs, horizon, num_samples=None)
            for batch in request.batch_sizes if request.samples else ():
                asked = ceil(request.samples / batch) * batch
                forecaster.forecast(inputs, horizon, num_samples=asked, samples_per_batch=batch)
    if forecaster.stepped_aside:
        raise InputError(f"fixed_size stepped aside: {forecaster.eager_because}", hint="nothing of it should be kept")
    return forecaster


@contextlib.contextmanager
def built_by_a_compiler() -> Iterator[list[str]]:
    """Collect the command lines with which this process has a compiler build a library, while the block runs."""
    built: list[str] = []
    listening = [True]

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if listening[0] and event == "subprocess.Popen":
            words = arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[1]]
            if "-o" in [str(word) for word in words]:
                built.append(" ".join(map(str, words)))

    sys.addaudithook(heard)  # it stays for the life of the process
    try:
        yield built
    finally:
        listening[0] = False


class _Warnings(logging.Handler):
    """Keeps what the artifacts warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        logger = logging.getLogger(ARTIFACT_LOGGER)
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


def main(asked: Path, output: Path) -> None:
    request = WarmRequest.model_validate_json(asked.read_text(encoding="utf-8"))
    try:
        answer: StrictModel = run(request)
    except InputError as error:
        answer = Refused(message=error.message, hint=error.hint)
    output.write_text(answer.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
