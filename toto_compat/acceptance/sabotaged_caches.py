"""Caches that are wrong on purpose. The acceptance lays a copy of this file beside its matrix, as a user's own."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from toto_compat.model import sabotaged
from toto_compat.model.bound import CompileSpec
from toto_compat.model.compile_step import Run
from toto_compat.model.static_model import StaticModel
from toto_compat.model.static_step import PlainStep


class Bound(StaticModel):
    @classmethod
    def bind(
        cls,
        backbone: Any,
        *,
        compile_spec: CompileSpec | None,
        max_patches: int | None,
        batch_sizes: tuple[int, ...],
    ) -> Self:
        return cls(backbone, compile_spec, max_patches, batch_sizes)


class KeepsOldOutputs(Bound):
    """Hands out what the graph wrote to, where it must be copied: the next replay overwrites it."""

    def _named(self, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("df", "loc", "scale", "probs"), parameters, strict=True))


class WritesAnInput(Bound):
    """Counts its steps in a tensor that it is given: Inductor cannot capture what writes to such an input."""

    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or not isinstance(module, PlainStep):
            return super()._compile(module, name)
        steps = torch.zeros((), device=module.patch.device)

        def counted(count: Tensor) -> Any:
            count.add_(1)
            return module.forward()

        arguments = self._compile_spec.torch_compile_arguments()
        run = torch.compile(counted, fullgraph=True, dynamic=False, **arguments)
        return lambda: run(steps)


class LeakingMask(Bound, sabotaged.LeakingMask):
    pass


class SilentDowncast(Bound, sabotaged.SilentDowncast):
    pass


class BucketPerLength(Bound, sabotaged.BucketPerLength):
    pass


class EagerInDisguise(Bound, sabotaged.EagerInDisguise):
    pass


class HoardsMemory(Bound, sabotaged.HoardsMemory):
    pass


class LeaksMemory(Bound, sabotaged.LeaksMemory):
    pass


class Slow(Bound, sabotaged.Slow):
    pass
