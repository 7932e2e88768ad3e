"""The Triton kernels of a lowered graph: assembled, kept instead of launched, and what each takes of a GPU."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True)
class AssembledKernel:
    """A kernel, and the most that any of its configurations takes of a GPU."""

    name: str
    configurations: int
    registers: int | None = None  # a thread's; None: cuobjdump does not come with this triton
    spilled_bytes: int | None = None  # of a thread, in local memory: its stack
    shared_bytes: int | None = None


@dataclass
class KeptKernels:
    binaries: dict[str, list[bytes]] = field(default_factory=dict)

    def assembled(self) -> list[AssembledKernel]:
        return [_assembled(name, binaries) for name, binaries in self.binaries.items()]


@contextmanager
def keeping_kernels(*, assemble: bool = True) -> Iterator[KeptKernels]:
    """Let Inductor assemble its kernels and keep them where it would load them onto the device."""
    # imported here: torch 2.3 has neither
    from torch._inductor import async_compile
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    kept = KeptKernels()

    def keep(autotuner: Any) -> None:
        binaries = [result.kernel.asm["cubin"] for result in autotuner.compile_results]
        kept.binaries.setdefault(autotuner.fn.__name__, []).extend(binaries)
        autotuner.launchers = [None]

    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        undo.enter_context(mock.patch.object(triton_heuristics.CachingAutotuner, "_make_launchers", keep))
        if not assemble:
            undo.enter_context(mock.patch.object(async_compile.AsyncCompile, "triton", lambda *_, **__: None))
        finished = getattr(async_compile, "CompiledTritonKernels", None)  # of this process, by source
        if finished is not None:
            finished.cache_clear()
        yield kept


def _assembled(name: str, binaries: list[bytes]) -> AssembledKernel:
    usages = [usage for binary in binaries if (usage := resource_usage(binary)) is not None]
    if not usages:
        return AssembledKernel(name, configurations=len(binaries))
    registers, stack, shared, local = map(max, zip(*usages, strict=True))
    return AssembledKernel(name, len(binaries), registers, max(stack, local), shared)


def resource_usage(binary: bytes) -> tuple[int, int, int, int] | None:
    """Registers, stack, shared and local memory of a cubin, as NVIDIA's own tool tells them."""
    tool = cuobjdump()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        )
    return read_usage(told.stdout)


def read_usage(text: str) -> tuple[int, int, int, int] | None:
    """The most of each that cuobjdump printed."""
    found = [tuple(int(number) for number in match.groups()) for match in _USAGE.finditer(text)]
    if not found:
        return None
    registers, stack, shared, local = map(max, zip(*found, strict=True))
    return registers, stack, shared, local


def cuobjdump() -> Path | None:
    """The one that comes with triton."""
    # imported here: not every environment has it
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return tool if tool.exists() else None
