"""Switches of torch that are turned and put back: what a look before and after a forecast does not show.

Torch's own setters are watched from before a candidate's file is imported until its process ends, and dynamo's settings
are looked at whenever it begins to compile. What torch turns while it compiles is its own affair, and what the harness
turns is the harness's.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo import convert_frame
from torch.backends import ContextProp

from toto_compat.cell.switches import changed, numerics, switches
from toto_compat.contract.request import CompileSettings

# In torch._C, and some of them in torch as well. Autocast is not here: it is a forecast's own, in its own thread, and
# what it does to the numbers is equivalence's to say.
SETTERS = (
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cublas_allow_tf32",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cudnn_allow_tf32",
    "_set_cudnn_enabled",
    "_set_cudnn_benchmark",
    "_set_cudnn_deterministic",
    "_set_deterministic_algorithms",
    "_set_default_dtype",
    "_set_mkldnn_enabled",
    "_set_sdp_use_flash",
    "_set_sdp_use_mem_efficient",
    "_set_sdp_use_math",
    "set_flush_denormal",
    "set_num_threads",
)
# Of the compiler, those that decide what is counted. Others torch.compile itself turns for what it compiles, by its
# arguments: `dynamic=False` is one of dynamo's.
COUNTED_BY = frozenset(
    f"dynamo.{name}"
    for name in (
        "recompile_limit",
        "accumulated_recompile_limit",
        "cache_size_limit",
        "accumulated_cache_size_limit",
        "fail_on_recompile_limit_hit",
        "skip_code_recursive_on_recompile_limit_hit",
        "suppress_errors",
        "disable",
    )
)
_HARNESS = "toto_compat.cell."


@contextmanager
def watching_the_switches(settings: CompileSettings) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Return a function that names what was turned since, put back or not."""
    seen: dict[str, None] = {}
    numbers_before, all_before = numerics(), switches()

    def look_at_numerics(setter: str, arguments: tuple[Any, ...]) -> None:
        try:
            now = numerics()
        except RuntimeError as error:  # torch refuses to tell once old and new names of a switch were mixed
            seen[f"switches that torch no longer tells: {str(error).splitlines()[0]}"] = None
            return
        turned = [name for name, value in now.items() if value != numbers_before[name] and name != "autocast"]
        for name in turned:
            seen[f"{name} from {numbers_before[name]!r} to {now[name]!r}, for a time"] = None
        if setter == "set_flush_denormal" and any(arguments):  # which nothing tells
            seen["flush_denormal to True, for a time"] = None

    def look_at_compiler() -> None:
        for one in changed(all_before, switches(), settings):
            if one.partition(" ")[0] in COUNTED_BY:
                seen[f"{one}, while it compiled"] = None

    with ExitStack() as stack:
        for name in SETTERS:
            for place in (torch._C, torch):
                if hasattr(place, name):
                    watched = _watched(getattr(place, name), functools.partial(look_at_numerics, name))
                    stack.enter_context(mock.patch.object(place, name, watched))
        for prop, setter in _properties_of_backends():
            watched = _watched(setter, functools.partial(look_at_numerics, ""))
            stack.enter_context(mock.patch.object(prop, "setter", watched))
        stack.enter_context(_before_each_compilation(look_at_compiler))
        yield lambda: tuple(seen)


def _watched(setter: Callable[..., Any], look: Callable[[tuple[Any, ...]], None]) -> Callable[..., Any]:
    @functools.wraps(setter)
    def set_and_look(*arguments: Any, **named: Any) -> Any:
        answer = setter(*arguments, **named)
        if not _is_compiling() and not _harness_calls():
            look(arguments)
        return answer

    return set_and_look


def _is_compiling() -> bool:
    return torch._guards.CompileContext.current_compile_id() is not None


def _harness_calls() -> bool:
    """Tell whether the nearest frame that is neither torch's nor this file's is the harness's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.partition(".")[0] not in ("torch", "functools", "contextlib"):
            return module.startswith(_HARNESS)
        frame = frame.f_back
    return False


def _properties_of_backends() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """`torch.backends.cudnn.allow_tf32` and its like hold their setters themselves."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.backends."):
            for prop in vars(type(module)).values():
                if isinstance(prop, ContextProp):
                    yield prop, prop.setter


@contextmanager
def _before_each_compilation(look: Callable[[], None]) -> Iterator[None]:
    original = convert_frame._compile

    @functools.wraps(original)
    def look_and_compile(*args: Any, **kwargs: Any) -> Any:
        look()
        return original(*args, **kwargs)

    with mock.patch.object(convert_frame, "_compile", look_and_compile):
        yield
