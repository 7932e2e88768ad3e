"""The C++ compiler's one-off work for inductor, begun while the model is still being traced.

The first CPU kernel of a process waits for two things that do not depend on it: a probe of the processor's vector
instructions and, in newer releases, a precompiled header. Both are the compiler's work, not Python's: they fit beside
the tracing.
"""

import contextlib
import contextvars
import functools
import platform
import threading

import torch

# what every CPU kernel of inductor begins with
_EMPTY_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out_ptr0) {}
"""


def vectors_are_known_to_work() -> bool:
    """Tell whether inductor can take the processor's vectors for granted; whoever has set it, decides.

    Inductor compiles, links and loads a small program for each of three instruction sets, with all of torch's vector
    headers. What that shows is that the compiler knows them, which every compiler for these headers does, and that
    torch was built with them, which torch says itself.
    """
    if getattr(torch._inductor.config.cpp, "vec_isa_ok", False) is not None or platform.machine() != "x86_64":
        return False
    built_for = torch.backends.cpu.get_cpu_capability()  # the best that torch was built with and the processor has
    return built_for == "AVX512" or (built_for == "AVX2" and not torch.cpu._is_avx512_supported())


@functools.cache
def give_compiler_head_start() -> threading.Thread:
    """Prepare in the background, once per process. It changes no result, only who waits for what."""
    thread = threading.Thread(target=_prepare_for_kernels, name="toto-compat compiler head start", daemon=True)
    thread.start()
    return thread


def _prepare_for_kernels() -> None:
    # a missing compiler or another release's internals: the first real kernel meets, or does without, the same
    with contextlib.suppress(Exception):
        # in the thread: the import itself takes a second that nobody shall wait for
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        known = vectors_are_known_to_work() and _settings_are_of_one_thread()
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}) if known else contextlib.nullcontext():
            # probe and header come before the kernel itself, which nobody asks for and which is therefore not compiled
            CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _EMPTY_KERNEL)


def _settings_are_of_one_thread() -> bool:
    """Tell whether a change here stays here: in older releases the main thread would see it come and go."""
    config = torch._inductor.config
    entry = getattr(config, "_config", {}).get("cpp.vec_isa_ok")
    return isinstance(getattr(entry, "user_override", None), contextvars.ContextVar)
