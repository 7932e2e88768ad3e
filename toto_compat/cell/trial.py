"""What is on trial in a cell: the series it forecasts and the models that forecast them, made when a suite asks."""

import errno
import gc
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from toto_compat.cell.process_tree import OUT_OF_MEMORY_TEXTS
from toto_compat.cell.quiet import QuietLock
from toto_compat.contract.machine_faults import what_the_machine_lacks
from toto_compat.contract.request import CacheRequest, CellRequest, CompileSettings, CsvSeries, Workload
from toto_compat.errors import TotoCompatError
from toto_compat.model.backbone import build_backbone
from toto_compat.model.binding import bind
from toto_compat.model.bound import BoundModel, CompileSpec, unchecked_distributions
from toto_compat.model.forecaster import forecaster_of
from toto_compat.model.series import Series, make_series

_ASKED_OF_A_MODEL = ("generate_mean", "generate_samples", "teacher_forced", "predictive")
UPSTREAM = CacheRequest(name="upstream", source="builtin")
_FULL_DISK_TEXTS = ("No space left on device", "Disk quota exceeded")


class CandidateError(Exception):
    """The compiled forecast raised: evidence against the cell, not a fault of the harness."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def blaming_the_candidate() -> Iterator[None]:
    """Around every call of the compiled model, so that its exceptions are told apart from the harness's own.

    Around nothing else: whatever raises in here counts against the cache, unless it is the user's to solve or the
    machine has run out of something.
    """
    try:
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what a kernel did wrong is told by the next call that waits: let that be here
    except (TotoCompatError, CandidateError):
        raise
    except Exception as error:
        if disk_is_full(error) or is_out_of_memory(error) or fault_of_the_machine(error):
            raise
        raise CandidateError(error) from error


def disk_is_full(error: BaseException) -> bool:
    """Tell whether a full disk is behind an error; a compiler's own is only text in what inductor raises."""
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or any(text in str(cause) for text in _FULL_DISK_TEXTS)
        for cause in all_behind(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether missing memory is behind an error: torch's, Python's, or that of a compiler the kernel killed."""
    return any(
        isinstance(cause, MemoryError | torch.cuda.OutOfMemoryError)
        or any(text in str(cause) for text in OUT_OF_MEMORY_TEXTS)
        for cause in all_behind(error)
    )


def fault_of_the_machine(error: BaseException) -> str:
    """Say what to do if the GPU, its driver or another program on it is behind an error; '' if it may be a cache."""
    return next((advice for cause in all_behind(error) if (advice := what_the_machine_lacks(str(cause)))), "")


def all_behind(error: BaseException) -> Iterator[BaseException]:
    """The error and everything it came from, each once; torch keeps what a backend raised as `inner_exception`."""
    left, seen = [error], set()
    while left:
        cause = left.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        behind = (cause.__cause__, cause.__context__, getattr(cause, "inner_exception", None))
        left += [one for one in behind if isinstance(one, BaseException)]


@dataclass(frozen=True)
class Trial:
    """One cache in one mode on one workload. Every model gets a backbone of its own: binding may change it."""

    workload: Workload
    cache: CacheRequest
    mode: str = "default"
    settings: CompileSettings = field(default_factory=CompileSettings)
    device: str = "cpu"
    checkpoint_folder: str | None = None
    csv: CsvSeries | None = None
    quiet: QuietLock = field(default_factory=lambda: QuietLock(None))

    @staticmethod
    def of(request: CellRequest, quiet: QuietLock) -> "Trial":
        """The request's trial. `quiet` is the lock that this process holds: a second one would wait for the first."""
        return Trial(
            workload=request.workload,
            cache=request.cache,
            mode=request.cell.mode,
            settings=request.settings,
            device=request.device.value,
            checkpoint_folder=request.checkpoint_folder,
            csv=request.csv,
            quiet=quiet,
        )

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.workload.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def max_patches(self) -> int:
        """The longest context plus the longest horizon that any suite asks of this workload."""
        return self.workload.context_patches[-1] + max(self.workload.horizon_patches)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch that this workload asks for, samples counted as the series they are to the model."""
        sampled = [self.workload.batches[0] * per_batch for _, per_batch in self.workload.sampled]
        return tuple(dict.fromkeys((*self.workload.batches, *sampled)))

    def eager(self, cache: CacheRequest = UPSTREAM, *, dtype: torch.dtype | None = None) -> BoundModel:
        """A cache run eager; upstream unless another is named. A float64 reference knows no autocast.

        In less than single precision without torch's checks of distributions, which that precision cannot pass.
        """
        model = bind(self._backbone(dtype), cache, max_patches=self.max_patches, **self._told())
        if dtype is torch.float64:
            return model
        if self.workload.in_half_precision:
            model = _asked_within(unchecked_distributions, model)
        return self._under_autocast(model)

    def compiled(self, *, backend: Callable[..., Any] | None = None, batch_sizes: tuple[int, ...] = ()) -> BoundModel:
        """The candidate: this cell's cache, compiled as the cell says, told which batches the suite will use."""
        spec = CompileSpec(mode=self.mode, settings=self.settings, backend=backend)
        backbone = self._backbone(None)
        told = self._told(max_context=self.workload.context_patches[-1])
        announced: dict[str, Any] = {"max_patches": self.max_patches, "batch_sizes": batch_sizes}
        with blaming_the_candidate():
            return self._under_autocast(bind(backbone, self.cache, compile_spec=spec, **announced, **told))

    def why_upstream_cannot_draw(self) -> str:
        """Return what torch says when upstream eager draws in less than single precision; '' where it can.

        Torch 2.13 has no gamma distribution in half precision on a CPU, and toto-ts draws in the model's precision.
        """
        if not self.workload.in_half_precision:
            return ""
        try:
            with _one_thread():
                model = self.eager()
                series = self.series(self.workload.patch_size, self.workload.context_patches[0], 1)
                model.generate_samples(series, 1, num_samples=1, samples_per_batch=1)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return telling_line(error)
        return ""

    def series(
        self,
        patch_size: int,
        context: int,
        horizon: int,
        *,
        batch: int | None = None,
        variates: int | None = None,
        groups: int | None = None,
        seed_offset: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Series:
        """The workload's series at this length (in patches), on the trial's device."""
        series = make_series(
            self.workload,
            patch_size=patch_size,
            context_patches=context,
            horizon_patches=horizon,
            batch=batch,
            variates=variates,
            groups=groups,
            seed_offset=seed_offset,
            csv=self.csv,
        )
        return series.to(device=self.device, dtype=dtype or self.dtype)

    def _told(self, **more: Any) -> dict[str, Any]:
        """Return what else a binding is told, as far as it can be: how to draw, and the longest context in patches."""
        told = {"draws": self.workload.draws, **more}
        return {name: value for name, value in told.items() if name in inspect.signature(bind).parameters}

    def _under_autocast(self, model: BoundModel) -> BoundModel:
        """Have the model asked under the workload's autocast, as a caller's `with` does it, in any thread."""
        if self.workload.autocast is None:
            return model
        return _asked_within(partial(torch.autocast, self.device, dtype=getattr(torch, self.workload.autocast)), model)

    def _backbone(self, dtype: torch.dtype | None) -> Any:
        return build_backbone(
            self.workload, dtype=dtype or self.dtype, device=self.device, checkpoint_folder=self.checkpoint_folder
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute without OpenMP's threads: a fork of this process, as contestants are, would wait for them for ever."""
    own = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(own)


def _asked_within(enter: Callable[[], AbstractContextManager[Any]], model: BoundModel) -> BoundModel:
    """Have everything that a model is asked answered within a context of its own."""
    forecaster = forecaster_of(model)
    if forecaster is not None:
        forecaster.forecast = _within(enter, forecaster.forecast)
        model.forecaster = forecaster  # type: ignore[attr-defined]
    for name in _ASKED_OF_A_MODEL:
        if hasattr(model, name):
            setattr(model, name, _within(enter, getattr(model, name)))
    return model


def _within(enter: Callable[[], AbstractContextManager[Any]], asked: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(asked)
    def answer(*args: Any, **named: Any) -> Any:
        with enter():
            return asked(*args, **named)

    return answer


def telling_line(error: BaseException) -> str:
    """Type and first line of an error; of what a backend raised where torch only wraps it.

    Triton's begins with a place ('at 10:11:') and the kernel's text: there it is the last line that tells.
    Inductor's of a C++ compiler has a title first and pages of notes last: there it is the compiler's first error.
    """
    inner = getattr(error, "inner_exception", None)  # BackendCompilerFailed: "backend='inductor' raised:"
    if isinstance(inner, BaseException):
        return telling_line(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    tells = lines[-1] if re.fullmatch(r"at \d+:\d+:", lines[0]) else lines[0]
    if type(error).__name__ == "CppCompileError":
        of_compiler = next((line for line in lines if re.search(r"\berror: ", line)), "")
        tells = f"{tells}: {of_compiler.partition('error: ')[2]}" if of_compiler else tells
    return f"{type(error).__name__}: {tells}"


def synchronise(device: str) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
