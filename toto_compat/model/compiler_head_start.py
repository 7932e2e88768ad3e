"""The C++ compiler's one-off work for inductor, begun while the model is still being traced.

The first CPU kernel of a process waits for two things that do not depend on it: a probe of the processor's vector
instructions and, in newer releases, a precompiled header. Both are the compiler's work, not Python's: they fit beside
the tracing.
"""

import contextlib
import functools
import threading

# what every CPU kernel of inductor begins with
_EMPTY_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out_ptr0) {}
"""


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

        # probe and header come before the kernel itself, which nobody asks for and which is therefore not compiled
        CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _EMPTY_KERNEL)
