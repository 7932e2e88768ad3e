"""A second model in the same process: the same shape and announcement, other weights.

A service that loads two checkpoints has both. What a cache keeps by shape, for all models of the process, is right for
the first one alone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from toto_compat.cell.trial import Trial
from toto_compat.model import binding
from toto_compat.model.binding import load_user_cache
from toto_compat.model.bound import BoundModel

_LARGER = 4.0  # of `tiny`'s: 1,024 drawn points of the one are nearly five times what chance allows of the other


@dataclass(frozen=True)
class OtherWeights(Trial):
    """The same trial of a model whose every parameter holds its values in reverse: as large, and another function.

    So a checkpoint has a twin too, which is the same in every precision. What nobody trained predicts much the same
    distributions whatever its weights are: there the head's are larger as well, and samples tell one from the other.
    """

    @staticmethod
    def of_trial(trial: Trial) -> "OtherWeights":
        return OtherWeights(**{one.name: getattr(trial, one.name) for one in fields(Trial)})

    def _backbone(self, dtype: torch.dtype | None) -> Any:
        backbone = super()._backbone(dtype)
        with torch.no_grad():
            for name, parameter in backbone.named_parameters():
                larger = name.startswith("output_distribution.") and self.checkpoint_folder is None
                parameter.copy_(parameter.flip(tuple(range(parameter.dim()))) * (_LARGER if larger else 1.0))
        return backbone


def bound_beside(trial: Trial) -> BoundModel:
    """The cell's cache once more, compiled and told the same, of other weights."""
    with _imported_once():
        return OtherWeights.of_trial(trial).compiled(batch_sizes=trial.batch_sizes)


@contextmanager
def _imported_once() -> Iterator[None]:
    """Bind the class that was bound before. A user's file is imported anew otherwise, and what it keeps for all models
    of a process would be new as well."""
    with mock.patch.object(binding, "load_user_cache", _class_of_before):
        yield


def _class_of_before(source: str) -> type:
    path, _, name = source.rpartition(":")
    cls = getattr(sys.modules.get(f"user_cache_{Path(path).stem}"), name, None)
    return cls if isinstance(cls, type) else load_user_cache(source)
