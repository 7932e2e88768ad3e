"""An honest binding of upstream eager, as a user's file could have it. The wrong ones are made from it.

They run eager: compiling would not mend them.
"""

from typing import Any, Self

from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.model.bound import CompileSpec, WholeModel
from toto_compat.model.series import Series


class Honest:
    """Upstream eager behind the interface that the suites use. `seen` is what it makes of a series first."""

    draws = "toto-ts"
    compiled = True
    cache_class = "tests:Honest"

    def __init__(self, eager: WholeModel, max_patches: int, batch_sizes: tuple[int, ...]) -> None:
        self.eager = eager
        self.patch_size = eager.patch_size
        self.max_patches = max_patches
        self.batch_sizes = batch_sizes

    @classmethod
    def bind(
        cls,
        backbone: TotoBackbone,
        *,
        compile_spec: CompileSpec | None,  # noqa: ARG003 - the interface's
        max_patches: int,
        batch_sizes: tuple[int, ...],
    ) -> Self:
        return cls(WholeModel(backbone, KVCache, None), max_patches, batch_sizes)

    @property
    def observer(self) -> Any:
        return self.eager.observer

    @observer.setter
    def observer(self, observer: Any) -> None:
        self.eager.observer = observer

    def seen(self, series: Series) -> Series:
        return series

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        return self.eager.teacher_forced(self.seen(series), truth)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.eager.generate_mean(self.seen(series), horizon_steps)

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        return self.eager.generate_samples(
            series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
        )
