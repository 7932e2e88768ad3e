"""The harness's own code, as it was before a candidate's file was imported beside it.

A file that replaces what counts or times it leaves figures that nobody measured. This sees functions that were
replaced, in this package and among those of Python and torch that it measures with. It does not see what is done to
this very check, nor memory that was written over: whoever goes that far is kept out by running what is timed and
compared in other processes, and by nothing else.
"""

import gc
import random
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.profiler

_OWN = "toto_compat"
# What the suites measure with.
_INSTRUMENTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (time, ("time", "monotonic", "perf_counter", "process_time")),
    (gc, ("collect", "freeze")),
    (random, ("SystemRandom",)),
    (threading, ("Thread",)),
    (torch, ("manual_seed", "get_num_threads", "equal")),
    (torch.autograd.profiler, ("record_function", "profile")),
    (torch.profiler, ("profile",)),
)

Seal = Mapping[str, tuple[int, int]]


def seal_harness() -> Seal:
    """Note every function of the harness that is imported by now, and the instruments."""
    return dict(_code_of_harness())


def broken(seal: Seal) -> tuple[str, ...]:
    """Name what was replaced since, as a change that takes a cell's figures back."""
    now = dict(_code_of_harness())
    return tuple(f"{name}: replaced" for name, code in sorted(seal.items()) if now.get(name) != code)


def _code_of_harness() -> Iterator[tuple[str, tuple[int, int]]]:
    for name, module in list(sys.modules.items()):
        if name == _OWN or name.startswith(f"{_OWN}."):
            yield from _code_in(name, vars(module), name)
    for module, names in _INSTRUMENTS:
        for name in names:
            yield f"{module.__name__}.{name}", _identity(getattr(module, name, None))


def _code_in(place: str, members: Mapping[str, Any], module: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, member in list(members.items()):
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(plain, types.FunctionType):
            yield f"{place}.{name}", _identity(plain)
        elif isinstance(plain, property):
            yield f"{place}.{name}", _identity(plain.fget)
        elif isinstance(plain, type):
            yield f"{place}.{name}", (id(plain), 0)
            if plain.__module__ == module:
                yield from _code_in(f"{place}.{name}", vars(plain), "")


def _identity(member: Any) -> tuple[int, int]:
    return id(member), id(getattr(member, "__code__", None))
