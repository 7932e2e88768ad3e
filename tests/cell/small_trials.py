"""Trials small enough for tests: the real tiny model, short contexts, few steps."""

from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, CompileSettings, Workload

WORKLOAD = Workload(
    context_patches=(4, 6, 8), horizon_patches=(4, 3), batches=(1, 2), samples=8, samples_per_batch=4, missing=0.05
)
# Traces and guards as ever, but generates no code: counting compilations needs none.
UNLOWERED = CompileSettings(backend="eager")


def trial_of(cache: str, *, settings: CompileSettings | None = None, workload: Workload = WORKLOAD) -> Trial:
    return Trial(
        workload=workload, cache=CacheRequest(name=cache, source="builtin"), settings=settings or CompileSettings()
    )
