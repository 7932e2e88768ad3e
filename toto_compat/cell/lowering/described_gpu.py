"""A GPU that is only described: within `described`, Inductor and Triton compile for it on a machine that has none.

`torch.cuda.is_available()` and `device_count()` stay as they are. With CUDA unavailable, newer releases of torch trace
fake CUDA tensors with a device guard that does nothing, and dynamo leaves random state and streams alone. All else that
is asked about the device is answered here: its properties, Inductor's device interface, and Triton's driver, of which
only the target is needed to assemble a kernel.
"""

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch.autograd import DeviceType

# the first whose triton (3.5) lets its driver be described
FIRST_RELEASE = (2, 9)
GPU = torch.device("cuda", 0)  # by its index: "cuda" alone asks the driver for the current one
# Where torch keeps what it was once told about the device, over the releases.
_MODULES_WITH_ANSWERS = (
    "torch._inductor.utils",
    "torch._inductor.runtime.hints",
    "torch._inductor.runtime.runtime_utils",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch.utils._triton",
)


@dataclass(frozen=True)
class DescribedGpu:
    """The properties of a well-known card of an architecture, as CUDA tells them."""

    architecture: str
    card: str
    multiprocessors: int
    memory_gb: int
    threads_per_multiprocessor: int
    shared_memory: int  # that a block may ask for
    l2_mb: int

    @property
    def capability(self) -> tuple[int, int]:
        number = int(self.architecture.removeprefix("sm_"))
        return number // 10, number % 10

    @property
    def properties(self) -> Any:
        major, minor = self.capability
        return SimpleNamespace(
            name=self.card,
            major=major,
            minor=minor,
            multi_processor_count=self.multiprocessors,
            total_memory=self.memory_gb << 30,
            warp_size=32,
            max_threads_per_multi_processor=self.threads_per_multiprocessor,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + 1024,
            L2_cache_size=self.l2_mb << 20,
            gcnArchName="",
            uuid="0",
        )


CARDS = {
    card.architecture: card
    for card in (
        DescribedGpu("sm_60", "P100", 56, 16, 2048, 48 << 10, 4),
        DescribedGpu("sm_70", "V100", 80, 16, 2048, 96 << 10, 6),
        DescribedGpu("sm_75", "T4", 40, 16, 1024, 64 << 10, 4),
        DescribedGpu("sm_80", "A100", 108, 80, 2048, 163 << 10, 40),
        DescribedGpu("sm_86", "A10", 72, 24, 1536, 99 << 10, 6),
        DescribedGpu("sm_89", "L40S", 142, 48, 1536, 99 << 10, 96),
        DescribedGpu("sm_90", "H100", 132, 80, 2048, 227 << 10, 50),
        DescribedGpu("sm_100", "B200", 148, 180, 2048, 227 << 10, 126),
        DescribedGpu("sm_103", "B300", 148, 288, 2048, 227 << 10, 126),
        DescribedGpu("sm_120", "RTX 5090", 170, 32, 1536, 99 << 10, 96),
    )
}


def why_not_here() -> str:
    """Say what this environment lacks to compile for CUDA; empty where it lacks nothing."""
    if torch.version.cuda is None:
        return (
            "this environment's torch is a CPU build; `nox -s matrix -- --device cuda --lower-only` takes CUDA builds"
        )
    if torch.__version__ < FIRST_RELEASE:
        first = ".".join(map(str, FIRST_RELEASE))
        return f"torch {torch.__version__} is too old to compile for a GPU that is not there: {first} is the first"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"this environment has no triton ({error})"
    return ""


@contextmanager
def described(gpu: DescribedGpu) -> Iterator[None]:
    """Answer for this GPU, and forget afterwards, and before, what torch kept of another."""
    # imported here: not every environment has it
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = gpu.capability
    properties = gpu.properties
    target = GPUTarget("cuda", major * 10 + minor, 32)
    described_driver = SimpleNamespace(
        launcher_cls=None,
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_device_capability=lambda _device=0: (major, minor),
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: GPU,
    )
    of_torch: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *_, **__: properties,
        "get_device_capability": lambda *_, **__: (major, minor),
        "get_device_name": lambda *_, **__: gpu.card,
        "current_device": lambda: 0,
        "synchronize": lambda *_, **__: None,
        "set_device": lambda *_: None,
    }
    of_interface: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda _device: None,
        "synchronize": lambda _device=None: None,
        "get_compute_capability": lambda _device=None: major * 10 + minor,
        "get_raw_stream": lambda _device: 0,
        "get_device_properties": lambda _device=None: properties,
    }
    of_worker: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda _device=None: properties,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
    }
    with ExitStack() as undo:
        undo.callback(forget_answers)
        for name, answer in of_torch.items():
            undo.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, answer in of_interface.items():
            undo.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        for name, answer in of_worker.items():
            undo.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(answer)))
        # not by set_active: its way back asks for the driver that is not there
        undo.enter_context(mock.patch.object(driver, "_active", described_driver))
        undo.enter_context(device_guard_that_does_nothing())
        forget_answers()
        yield


@contextmanager
def device_guard_that_does_nothing() -> Iterator[None]:
    """Put Meta's device guard, which does nothing, into CUDA's place, as newer releases do by themselves without CUDA.

    2.9's own asks the missing driver about fake tensors, too, in whatever Python calls on one: `~x`, `x.copy_(y)`,
    `x.contiguous()`, `x[..., None]`. Inductor took that for an error of shapes, or of the cache.
    """
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        yield
        return
    cuda, meta = DeviceType.CUDA.value, DeviceType.Meta.value
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (meta + 1)).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[cuda]
    guards[cuda] = guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


def forget_answers() -> None:
    """Clear torch's memoised answers: those of one GPU must not serve the next."""
    for name in _MODULES_WITH_ANSWERS:
        try:
            module = importlib.import_module(name)
        except ImportError:  # its place in another release
            continue
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for owner in owners:
            for attribute in list(vars(owner)):
                clear = getattr(getattr(owner, attribute, None), "cache_clear", None)
                if callable(clear):
                    clear()
