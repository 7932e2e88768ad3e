"""One contestant of a timed contest: a model in a process of its own, handed a series and handing back a forecast.

The process that takes the time never imports a user's file, so that no file can move its clock. A series arrives when
the clock already runs and was met by nobody before; a forecast is numbers and nothing that could be run.
"""

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from toto_compat.cell.group import die_with_the_orchestrator, failure_of
from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.process_tree import tree_cpu_seconds
from toto_compat.cell.tampering import watching_the_candidate
from toto_compat.cell.trial import CandidateError, blaming_the_candidate, synchronise
from toto_compat.contract.request import CompileSettings
from toto_compat.contract.result import Failure
from toto_compat.contract.strict_model import StrictModel
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

_STOP, _COUNT = b"", b"?"
_READY, _FORECAST, _FAILED, _ENDED, _COUNTED = b"R", b"F", b"E", b".", b"#"


class Introduction(StrictModel):
    """Holds what a contestant says of itself before the first forecast."""

    patch_size: int
    cache_class: str


class Failed(StrictModel):
    """Holds what a contestant raised; `by_the_model` if its forecast did, and not what is around it."""

    by_the_model: bool
    failure: Failure


class ContestantError(Exception):
    """A contestant cannot go on."""

    def __init__(self, name: str, failed: Failed) -> None:
        super().__init__(f"{name}: {failed.failure.message}")
        self.name = name
        self.failed = failed


class Contestant:
    """The side of whoever takes the time. Leaving the block ends the process."""

    def __init__(
        self,
        name: str,
        make_model: Callable[[], BoundModel],
        *,
        device: str,
        settings: CompileSettings,
        watched: bool = False,  # so that compilations can be asked for
    ) -> None:
        self.name = name
        self._connection, theirs = multiprocessing.Pipe()
        # a fork has imported torch already; CUDA does not survive one
        context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._process = context.Process(
            target=_serve,
            args=(theirs, make_model, torch.get_num_threads(), device, settings),
            kwargs={"watched": watched},
            name=name,
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def introduction(self) -> Introduction:
        """Wait until the model is made."""
        return Introduction.model_validate_json(self._answer(_READY))

    def forecast(self, series: bytes, horizon_steps: int, samples: int = 0, per_batch: int = 0) -> Tensor:
        """Have the series forecast, the mean or samples; everything between the call and its return is its time."""
        asked = b"".join(number.to_bytes(8, "big") for number in (horizon_steps, samples, per_batch))
        with contextlib.suppress(BrokenPipeError):  # whoever died has left word, or none
            self._connection.send_bytes(asked + series)
        answer = self._answer(_FORECAST)
        try:
            return load(answer)["forecast"]
        except (SafetensorError, KeyError) as error:
            raise self._error(f"its forecast cannot be read: {error}", by_the_model=True) from error

    def compilations(self) -> int:
        """Tell how many compilations it began since it was last asked; it has to be watched."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send_bytes(_COUNT)
        return int(json.loads(self._answer(_COUNTED)))

    def end(self) -> tuple[str, ...]:
        """Tell it that this was all; returns the switches of torch that it changed."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send_bytes(_STOP)
        return tuple(str(one) for one in json.loads(self._answer(_ENDED)))

    def cpu_seconds(self) -> float:
        """Processor time that the contestant and what it started have used so far."""
        return tree_cpu_seconds(self._process.pid)

    def _answer(self, expected: bytes) -> bytes:
        try:
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._process.join()
            raise self._error(f"its process ended with exit code {self._process.exitcode}") from error
        kind, content = answer[:1], answer[1:]
        if kind == _FAILED:
            try:
                raise ContestantError(self.name, Failed.model_validate_json(content))
            except ValidationError as error:
                raise self._error("what it raised cannot be read") from error
        if kind != expected:
            raise self._error("it answered what it was not asked", by_the_model=True)
        return content

    def _error(self, message: str, *, by_the_model: bool = False) -> ContestantError:
        failure = Failure(kind="exception" if by_the_model else "crash", message=f"{self.name}: {message}")
        return ContestantError(self.name, Failed(by_the_model=by_the_model, failure=failure))


def series_bytes(series: Series) -> bytes:
    """A series as it travels: without its continuation, which is nobody's business who forecasts it."""
    return bytes(
        save({field.name: _plain(getattr(series, field.name)) for field in fields(Series) if field.name != "truth"})
    )


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu").contiguous()


def _series_of(content: bytes, device: str) -> Series:
    tensors = {name: values.to(device) for name, values in load(content).items()}
    return Series(**tensors, truth=tensors["inputs"][..., :0])


def _serve(
    connection: Connection,
    make_model: Callable[[], BoundModel],
    threads: int,
    device: str,
    settings: CompileSettings,
    *,
    watched: bool,
) -> None:
    """Make the model, then forecast what comes until told to end."""
    die_with_the_orchestrator()
    torch.set_num_threads(threads)
    watch = CompilerWatch()
    if watched:
        watch.__enter__()  # to the end of this process
    try:
        with watching_the_candidate(settings) as touched_by_it:
            model = make_model()
            introduction = Introduction(patch_size=model.patch_size, cache_class=model.cache_class)
            connection.send_bytes(_READY + introduction.model_dump_json().encode())
            while (asked := connection.recv_bytes()) != _STOP:
                if asked == _COUNT:
                    connection.send_bytes(_COUNTED + json.dumps(len(watch.phases[-1].compile_starts)).encode())
                    watch.mark("since it was asked")
                    continue
                with blaming_the_candidate():
                    forecast = _forecast_of(model, asked, device)
                    synchronise(device)
                connection.send_bytes(_FORECAST + save({"forecast": _plain(forecast)}))
            connection.send_bytes(_ENDED + json.dumps(touched_by_it()).encode())
    except Exception as error:
        cause = error.cause if isinstance(error, CandidateError) else error
        failed = Failed(by_the_model=isinstance(error, CandidateError), failure=failure_of(cause))
        with contextlib.suppress(OSError):
            connection.send_bytes(_FAILED + failed.model_dump_json().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what is to be done at the end of the process that this one is a fork of is not this one's to do


def _forecast_of(model: BoundModel, asked: bytes, device: str) -> Tensor:
    horizon, samples, per_batch = (int.from_bytes(asked[at : at + 8], "big") for at in (0, 8, 16))
    series = _series_of(asked[24:], device)
    if samples:
        return model.generate_samples(series, horizon, num_samples=samples, samples_per_batch=per_batch)
    return model.generate_mean(series, horizon)
