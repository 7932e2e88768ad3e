"""What happens to a service between two forecasts: compiled code must be in use after all of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from toto_compat.cell.trial import CandidateError, Trial, blaming_the_candidate
from toto_compat.contract.request import patches
from toto_compat.model.bound import BoundModel, observed
from toto_compat.model.series import Series

MANY = 100  # forecasts in a row, on top of those that the suite took before
_DECODE_STEPS = 2  # of forecasts that are broken off


@dataclass(frozen=True)
class Mishap:
    """One event. What it raises, and what it compiles, is not held against anybody: it may be refused."""

    name: str
    happen: Callable[[], object]


class _BrokenOffError(Exception):
    """Stands for whatever ends a forecast in its midst: a deadline, a client that has gone."""


def mishaps(trial: Trial, model: BoundModel, other_batch: int) -> Iterator[Mishap]:
    """The longest context, series that cannot be forecast, forecasts that are broken off, a batch that nobody
    announced, many forecasts; means and samples."""
    workload, size = trial.workload, model.patch_size
    batch, longest = workload.batches[0], workload.context_patches[-1]
    deciding = min(_DECODE_STEPS + 1, max(workload.horizon_patches)) * size
    per_batch = min((rows for _, rows in workload.sampled), default=0)

    def series(context: int, rows: int = batch) -> Series:
        return trial.series(size, context, patches(deciding, size), batch=rows)

    def ways(of: Series, horizon: int) -> dict[str, Callable[[], object]]:
        asked: dict[str, Callable[[], object]] = {"mean": partial(model.generate_mean, of, horizon)}
        if per_batch:
            asked["samples"] = partial(
                model.generate_samples, of, horizon, num_samples=per_batch, samples_per_batch=per_batch
            )
        return asked

    short = series(workload.context_patches[0])
    for way, forecast in ways(series(longest), max(workload.horizon)).items():
        yield Mishap(f"{way} of the longest of all", forecast)
    for what, odd in _that_cannot_be_forecast(short).items():
        for way, forecast in ways(odd, deciding).items():
            yield Mishap(f"{way} of {what}", forecast)
    for way, forecast in ways(short, deciding).items():
        for step in range(patches(deciding, size)):
            for reason in (_BrokenOffError, KeyboardInterrupt):
                broken = partial(_broken_off, model, forecast, step, reason)
                yield Mishap(f"{way} broken off at step {step} by {reason.__name__}", broken)
    several = series(workload.context_patches[0], other_batch)
    # of one patch to its end, of several up to its first step: where decode steps have static shapes, others are made
    # among shapes that nobody announced, if the profile has those
    yield Mishap(f"mean of batch {other_batch}, one patch", partial(model.generate_mean, several, size))
    for way, forecast in ways(several, deciding).items():
        yield Mishap(
            f"{way} of batch {other_batch}, broken off", partial(_broken_off, model, forecast, 0, _BrokenOffError)
        )
    least = partial(model.generate_mean, short, min(workload.horizon))
    for number in range(MANY):
        yield Mishap(f"forecast {number + 1} of {MANY}", least)


def befall(trial: Trial, mishap: Mishap) -> str:
    """Let it happen; return the error that it ended with, if any. A fault of the machine stays one."""
    try:
        with blaming_the_candidate():
            mishap.happen()
    except CandidateError as error:
        return type(error.cause).__name__
    finally:
        trial.quiet.give_way()
    return ""


def _that_cannot_be_forecast(series: Series) -> dict[str, Series]:
    values, ids = series.inputs, series.id_mask.clone()
    ids[..., ids.shape[-1] // 2 + 1 :] += 1  # in the midst of a patch
    newest = torch.arange(values.shape[-1], device=values.device) >= values.shape[-1] - 2
    shown = replace(series, padding_mask=series.padding_mask | newest)
    return {
        "NaN": replace(shown, inputs=torch.where(newest, torch.nan, values)),
        "infinity": replace(shown, inputs=torch.where(newest, torch.inf, values)),
        "a patch with two ids": replace(series, id_mask=ids),
        "nothing but padding": replace(
            series, inputs=torch.zeros_like(values), padding_mask=torch.zeros_like(series.padding_mask)
        ),
    }


def _broken_off(model: BoundModel, forecast: Callable[[], object], at: int, reason: type[BaseException]) -> None:
    @contextmanager
    def raising(step: int) -> Iterator[None]:
        if step == at:
            raise reason
        yield

    with suppress(reason), observed(model, raising):
        forecast()
