"""The caches that come with the package, one row each: whole names here, their code in `caches/` and `model/`.

A new cache is a file in `caches/` and a row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SABOTAGE_PREFIX = "sabotaged:"


@dataclass(frozen=True)
class BuiltinCache:
    """Says where a cache's code is (`module:name` below `toto_compat`) and how it is bound to a backbone.

    `whole_model`: a class with the interface of toto-ts's KV cache, in toto-ts's own model compiled as a whole.
    `binding`: a callable that takes the backbone and makes a model of its own.
    """

    kind: Literal["whole_model", "binding"]
    code: str
    description: str


@dataclass(frozen=True)
class SabotagedCache(BuiltinCache):
    """A cache broken on purpose: `gate` must turn red on it and stay green on its unsabotaged `twin`."""

    gate: str
    twin: str


CACHES: Mapping[str, BuiltinCache] = {
    "upstream": BuiltinCache(
        "whole_model",
        "caches.upstream:KVCache",
        "toto-ts as released: tensor index read with .item(), slices to the valid length",
    ),
    "list_index": BuiltinCache(
        "whole_model",
        "caches.index_variants:ListIndexKVCache",
        "production of 2025-10-30: a Python list of ints, one per time layer",
    ),
    "compile_friendly": BuiltinCache(
        "whole_model",
        "caches.index_variants:CompileFriendlyKVCache",
        "tensor index with explicit graph breaks where it mutates",
    ),
    "fixed_size": BuiltinCache(
        "binding",
        "model.static_model:bind_static",
        "static buffers, a tensor position, attention masked by position",
    ),
}


def _whole(code: str, gate: str, description: str) -> SabotagedCache:
    return SabotagedCache("whole_model", f"model.sabotaged:{code}", description, gate, "upstream")


def _static(code: str, gate: str, description: str) -> SabotagedCache:
    return SabotagedCache("binding", f"model.sabotaged:{code}", description, gate, "fixed_size")


SABOTAGES: Mapping[str, SabotagedCache] = {
    "position_off_by_one": _whole("PositionOffByOne", "equivalence", "rotates decode steps as if one patch later"),
    "stale_values": _whole("StaleValues", "equivalence", "a decode step's values are those of the step before"),
    "leaking_mask": _static("LeakingMask", "equivalence", "attends to slots that were never written"),
    "forgetful_reset": _static("ForgetfulReset", "equivalence", "a new forecast starts at the old one's position"),
    "silent_downcast": _static("SilentDowncast", "equivalence", "keys and values pass through half precision"),
    "recompile_every_step": _static("RecompileEveryStep", "recompiles", "a Python counter in the compiled step"),
    "code_object_per_step": _static(
        "CodeObjectPerStep", "recompiles", "a fresh code object per step: no recompile is logged"
    ),
    "bucket_per_length": _static("BucketPerLength", "recompiles", "a bucket of its own for every length"),
    "compiled_crumb": _static("CompiledCrumb", "compile_active", "one compiled addition a step, the rest eager"),
    "eager_in_disguise": _static("EagerInDisguise", "compile_active", "claims to be compiled and runs eager"),
    "hoards_memory": _static("HoardsMemory", "memory", "keeps four more copies of its buffers"),
    "leaks_memory": _static("LeaksMemory", "memory_growth", "keeps 1 MB of every forecast"),
    "slow": _static("Slow", "speedup", "every step does its work many times over"),
}


def builtin_cache(name: str) -> BuiltinCache:
    """The row of a built-in cache, sabotaged ones (`sabotaged:<name>`) included."""
    if name.startswith(SABOTAGE_PREFIX):
        return SABOTAGES[name.removeprefix(SABOTAGE_PREFIX)]
    return CACHES[name]
