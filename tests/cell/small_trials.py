"""Trials small enough for tests: the real tiny model, short contexts, few steps."""

from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, CompileSettings, Workload
from toto_compat.model.backbone import SHAPES

WORKLOAD = Workload(context=(128, 192, 256), horizon=(128, 96), batches=(1, 2), sampling=("8/4",), missing=0.05)
# The tiny model with every kind of layer once.
TWO_LAYERS = {
    **SHAPES["tiny"],
    "num_layers": 2,
    "spacewise_every_n_layers": 2,
    "embed_dim": 32,
    "num_heads": 2,
    "mlp_hidden_dim": 48,
    "output_distribution_kwargs": {"k_components": 3},
}
# Traces and guards as ever, but generates no code: counting compilations needs none.
UNLOWERED = CompileSettings(backend="eager")


def trial_of(cache: str, *, settings: CompileSettings | None = None, workload: Workload = WORKLOAD) -> Trial:
    return Trial(
        workload=workload, cache=CacheRequest(name=cache, source="builtin"), settings=settings or CompileSettings()
    )
