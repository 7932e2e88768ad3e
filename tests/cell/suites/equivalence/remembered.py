"""Eager's answers, computed once: the bindings on trial wrap one model and differ in what they do with its answers."""

import copy
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from toto_compat.model.bound import WholeModel
from toto_compat.model.series import Series

_Answers = dict[bytes, tuple[Any, Tensor | None]]


def remember_eager(patch: pytest.MonkeyPatch) -> None:
    """Answer again what an eager model of the same weights was asked before; draws move the random state on as then."""
    answers: _Answers = {}
    for name, draws in (("generate_mean", False), ("teacher_forced", False), ("generate_samples", True)):
        patch.setattr(WholeModel, name, _remembered(getattr(WholeModel, name), answers, draws=draws))


def _remembered(method: Callable[..., Any], answers: _Answers, *, draws: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def answer(model: WholeModel, *asked: Any, **how: Any) -> Any:
        if model.compiled or model.observer is not None:  # whoever observes wants to see the steps
            return method(model, *asked, **how)
        key = _identity(method.__name__, model, (*asked, torch.get_rng_state() if draws else None), how)
        if key not in answers:
            right = method(model, *asked, **how)
            answers[key] = copy.deepcopy(right), torch.get_rng_state() if draws else None
            return right
        known, moved_on = answers[key]
        if moved_on is not None:
            torch.set_rng_state(moved_on)
        return copy.deepcopy(known)

    return answer


def _identity(name: str, model: WholeModel, asked: tuple[Any, ...], how: dict[str, Any]) -> bytes:
    """Everything that an answer of eager depends on."""
    checked = torch.distributions.Distribution._validate_args  # else NaN is answered and not refused
    within = (torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), checked)
    digest = hashlib.sha256(repr((name, model.cache_class, sorted(how.items()), within)).encode())
    parts = [value for one in asked for value in (vars(one).values() if isinstance(one, Series) else (one,))]
    for part in (*model.model.state_dict().values(), *parts):
        if isinstance(part, Tensor):
            digest.update(repr((part.dtype, part.shape, part.stride())).encode())
            digest.update(part.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        else:
            digest.update(repr(part).encode())
    return digest.digest()
