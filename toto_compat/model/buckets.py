"""The shapes that fixed_size holds: buffers and compiled code for each, made at one visible moment, dropped by use.

A bucket is a decode step for a number of rows, a pass over contexts up to a number of patches, or draws. A forecast
takes a bucket that is there before it makes one: padding costs less than a compile. What was announced is made at once,
at the first forecast that is within it; after that, nothing within the announced maxima is ever compiled again.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from toto_compat.contract.bucket_messages import BUCKET_LOGGER, compiling_bucket, dropping_bucket
from toto_compat.model.compile_step import Run, no_full_collections

# The limit that a code object per bucket takes away from dynamo. A bucket holds compiled code that took 10 to 20 s of a
# forecast, and its buffers (94 MB at 16 series of 80 patches on the base model). 16 is five times the three batches of
# the matrix: a service that needs more should pad its batches to fewer sizes.
MAX_BUCKETS = 16
SMALLEST_PASS = 8  # patches: fewer are padded, which costs next to nothing while the weights are what takes time
# What a row costs beside the weights that a step reads anyway: 16 rows take about twice as long as one (`base`, CPU).
_ROWS_LIKE_THE_WEIGHTS = 16
_LOG = logging.getLogger(BUCKET_LOGGER)


@dataclass(frozen=True)
class StepShape:
    """Says what a decode step is made for. `mixed` is autocast's precision."""

    batch: int
    variates: int
    capacity: int  # patches
    mixed: torch.dtype | None = None

    def __str__(self) -> str:
        under = "" if self.mixed is None else f", autocast {str(self.mixed).removeprefix('torch.')}"
        return f"decode step for batch {self.batch}, variates {self.variates}, capacity {self.capacity}{under}"


@dataclass(frozen=True)
class PassShape:
    """Says what a pass over contexts is made for; a `whole` one predicts behind every patch."""

    patches: int
    variates: int
    series: int
    whole: bool = False
    mixed: torch.dtype | None = None

    def __str__(self) -> str:
        under = "" if self.mixed is None else f", autocast {str(self.mixed).removeprefix('torch.')}"
        all_of_it = ", predicting all" if self.whole else ""
        return (
            f"context pass for {self.patches} patches, variates {self.variates}, series {self.series}{all_of_it}{under}"
        )


@dataclass(frozen=True)
class DrawShape:
    """Says what draws of a predicted patch are made for: any number of samples and points."""

    variates: int

    def __str__(self) -> str:
        return f"patch draws for variates {self.variates}"


Shape = StepShape | PassShape | DrawShape


@dataclass(frozen=True)
class Bucket:
    """Holds a module with its buffers, and how to run it: compiled, or as it is."""

    module: Any
    run: Run


class Buckets:
    """The buckets of one model, the least recently used first, and never more than `most`."""

    def __init__(self, most: int, compiling: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`compiling` is entered around every compile."""
        self.most = most
        self._compiling = compiling
        self.largest_batch: int | None = None  # what memory was enough for, once it was not enough for more
        self.unchecked: list[Shape] = []  # made since somebody last looked
        self._held: dict[Shape, Bucket] = {}

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def values(self) -> list[Bucket]:
        return list(self._held.values())

    def steps(self) -> list[StepShape]:
        return [shape for shape in self._held if isinstance(shape, StepShape)]

    def passes(self) -> list[PassShape]:
        return [shape for shape in self._held if isinstance(shape, PassShape)]

    def clear(self) -> None:
        self._held.clear()

    def take(self, shape: Shape, make: Callable[[Shape], Bucket], *, compiled: bool, announced: bool) -> Bucket:
        """Give the bucket of this shape, made if it is not there; it becomes the most recently used."""
        if shape not in self._held:
            self._make(shape, make, compiled=compiled, announced=announced)
        self._held[shape] = self._held.pop(shape)
        return self._held[shape]

    def _make(self, shape: Shape, make: Callable[[Shape], Bucket], *, compiled: bool, announced: bool) -> None:
        while len(self._held) >= self.most:
            oldest = next(iter(self._held))
            del self._held[oldest]
            _LOG.warning(dropping_bucket(str(oldest), self.most))
        if compiled:
            line = compiling_bucket(str(shape), len(self._held) + 1, self.most, announced=announced)
            _LOG.log(logging.INFO if announced else logging.WARNING, line)
        bucket = make(shape)
        with no_full_collections(), self._compiling():
            bucket.run()  # compiles here, on empty buffers, rather than in the middle of a forecast
        self._held[shape] = bucket
        self.unchecked.append(shape)

    def forget_batches_from(self, batch: int) -> None:
        """Memory was not enough for this many rows: free what is held, and make no step as large as that again."""
        self.largest_batch = batch - 1
        self._held = {
            shape: bucket
            for shape, bucket in self._held.items()
            if not isinstance(shape, StepShape) or shape.batch < batch
        }

    def allows(self, batch: int) -> bool:
        return self.largest_batch is None or batch <= self.largest_batch


def cheapest_batch(rows: int, batches: list[int]) -> int:
    """Choose the batch to decode these rows in, as often as it takes: a step reads all weights whatever its rows."""
    return min(batches, key=lambda batch: (ceil(rows / batch) * (_ROWS_LIKE_THE_WEIGHTS + batch), batch))


def room_for(patches: int) -> int:
    """Give the room of a pass over so many patches: the next power of two, so that few lengths are compiled."""
    return max(SMALLEST_PASS, 1 << (patches - 1).bit_length())
