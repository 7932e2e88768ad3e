"""Bindings as a user's file has them: what they compile, and when, is what the recompile suite must see."""

import concurrent.futures
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from toto.model.backbone import TotoBackbone

from toto_compat.model.compile_step import Run
from toto_compat.model.series import Series
from toto_compat.model.static_model import StaticModel
from toto_compat.model.static_step import PlainStep, StaticStep


class Honest(StaticModel):
    @classmethod
    def bind(cls, backbone: TotoBackbone, *, compile_spec: Any, max_patches: int, batch_sizes: tuple[int, ...]) -> Self:
        return cls(backbone, compile_spec, max_patches, batch_sizes)


class _BreakingStep(StaticStep):
    def advance(self) -> Tensor:
        torch._dynamo.graph_break()
        return super().advance()


class BreaksAndWarmsUpInBind(Honest):
    """Breaks its graph in every step, and has compiled everything before anybody watches."""

    step_class = _BreakingStep

    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or not isinstance(module, PlainStep):
            return super()._compile(module, name)
        compiled: Run = torch.compile(module.forward, dynamic=False, **self._compile_spec.torch_compile_arguments())
        return compiled

    @classmethod
    def bind(cls, backbone: TotoBackbone, **announced: Any) -> Self:
        model = super().bind(backbone, **announced)
        for batch in announced["batch_sizes"] if model.compiled else ():
            steps = 2 * model.patch_size
            values = torch.randn(batch, 1, steps)
            present, ids = torch.ones_like(values, dtype=torch.bool), torch.zeros(batch, 1, steps, dtype=torch.int)
            model.generate_mean(Series(values, present, ids, ids, ids[..., 0], values[..., :0]), steps)
        return model


class CompiledOnlyWhileObserved(Honest):
    def _compile(self, module: Any, name: str) -> Run:
        run = super()._compile(module, name)
        calls = iter(range(1_000_000))

        def choose() -> Any:
            first = next(calls) == 0  # which makes the bucket
            return run() if first or self.observer is not None else module.forward()

        return choose


class EagerInAThread(Honest):
    """Compiled code for one addition in the caller's thread, the step itself in another."""

    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or not isinstance(module, PlainStep):
            return super()._compile(module, name)
        add = torch.compile(lambda value: value + 1, fullgraph=True, dynamic=False)
        pool = concurrent.futures.ThreadPoolExecutor(1)

        def eager() -> tuple[Tensor, ...]:
            with torch.inference_mode(False), torch.no_grad():
                outputs: tuple[Tensor, ...] = module.forward()
                return outputs

        def run() -> tuple[Tensor, ...]:
            add(module.patch)
            return pool.submit(eager).result()

        return run


class _CompilesFor(Honest):
    """Has a graph for every key of a series; the warm-up's series have one and the same."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._graphs = torch.compile(lambda values, key: values + key, backend="eager", dynamic=False)

    def key(self, series: Series) -> int:
        raise NotImplementedError

    @contextmanager
    def asked(self, series: Series) -> Iterator[None]:
        if self.compiled:
            self._graphs(torch.zeros(2), self.key(series))
        yield

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        with self.asked(series):
            return super().generate_mean(series, horizon_steps)

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        with self.asked(series):
            return super().generate_samples(
                series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
            )


class AGraphForEveryPadding(_CompilesFor):
    def key(self, series: Series) -> int:
        there = series.padding_mask.unflatten(-1, (-1, self.patch_size)).any(-1).any(0).any(0)
        return int(there.int().argmax())


class AGraphForEveryGap(_CompilesFor):
    def key(self, series: Series) -> int:
        return int(series.padding_mask[..., -1].all())


class AGraphForEveryGrouping(_CompilesFor):
    def key(self, series: Series) -> int:
        return int(series.id_mask.max())


class AGraphForConstants(_CompilesFor):
    def key(self, series: Series) -> int:
        return int(series.inputs.std() == 0)


class AGraphForEveryMagnitude(_CompilesFor):
    def key(self, series: Series) -> int:
        return int(series.inputs.abs().max() > 1e3) - int(series.inputs.abs().max() < 1e-1)


class AGraphForEveryPlace(_CompilesFor):
    def key(self, series: Series) -> int:
        return int(series.inputs.storage_offset())


class AGraphForEverySeed(_CompilesFor):
    def key(self, series: Series) -> int:  # noqa: ARG002 - what the others look at
        return int(torch.initial_seed())


class AGraphForEveryInterval(_CompilesFor):
    def key(self, series: Series) -> int:
        return int(series.time_interval_seconds.max())


class _GivesUp(_CompilesFor):
    """Runs eager from some event on."""

    given_up = False

    def _compile(self, module: Any, name: str) -> Run:
        run = super()._compile(module, name)
        forward: Callable[[], Any] = module.forward
        return lambda: forward() if self.given_up else run()


class GivesUpAtTheLongest(_GivesUp):
    @contextmanager
    def asked(self, series: Series) -> Iterator[None]:
        self.given_up = series.inputs.shape[-1] >= 256
        yield
        self.given_up = False


class GivesUpAfterAnException(_GivesUp):
    @contextmanager
    def asked(self, series: Series) -> Iterator[None]:  # noqa: ARG002 - what the others look at
        try:
            yield
        except ValueError:  # of NaN
            self.given_up = True
            raise


class GivesUpAfterABreak(_GivesUp):
    @contextmanager
    def asked(self, series: Series) -> Iterator[None]:  # noqa: ARG002 - what the others look at
        finished = False
        try:
            yield
            finished = True
        except (ValueError, AssertionError):  # what a series is refused with
            finished = True
            raise
        finally:
            self.given_up |= not finished


class GivesUpAfterMany(_GivesUp):
    forecasts = 0

    @contextmanager
    def asked(self, series: Series) -> Iterator[None]:  # noqa: ARG002 - what the others look at
        self.forecasts += 1
        self.given_up = self.forecasts > 150
        yield


class GivesUpAfterAnotherBatch(_GivesUp):
    @contextmanager
    def asked(self, series: Series) -> Iterator[None]:
        yield
        self.given_up |= len(series.inputs) not in self._batch_sizes


class GivesSamplesUpAfterAnException(GivesUpAfterAnException):
    """In samples alone."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        before, self.given_up = self.given_up, False
        try:
            return super().generate_mean(series, horizon_steps)
        finally:
            self.given_up |= before
