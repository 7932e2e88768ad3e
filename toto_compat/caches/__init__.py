"""What is under test. Names here, torch only when one of them is bound."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toto_compat.matrix.schema import Gate

BUILTIN_CACHES = ("upstream", "list_index", "compile_friendly", "fixed_size")


@dataclass(frozen=True)
class Sabotage:
    """A cache broken on purpose: `gate` must turn red on it and stay green on its unsabotaged `twin`."""

    gate: Gate
    twin: str
    description: str


SABOTAGES: Mapping[str, Sabotage] = {
    "position_off_by_one": Sabotage(Gate.EQUIVALENCE, "upstream", "rotates decode steps as if one patch later"),
    "stale_values": Sabotage(Gate.EQUIVALENCE, "upstream", "a decode step's values are those of the step before"),
    "leaking_mask": Sabotage(Gate.EQUIVALENCE, "fixed_size", "attends to slots that were never written"),
    "forgetful_reset": Sabotage(Gate.EQUIVALENCE, "fixed_size", "a new forecast starts at the old one's position"),
    "silent_downcast": Sabotage(Gate.EQUIVALENCE, "fixed_size", "keys and values pass through half precision"),
    "recompile_every_step": Sabotage(Gate.RECOMPILES, "fixed_size", "a Python counter in the compiled step"),
    "code_object_per_step": Sabotage(
        Gate.RECOMPILES, "fixed_size", "a fresh code object per step: no recompile is logged"
    ),
    "eager_in_disguise": Sabotage(Gate.COMPILE_ACTIVE, "fixed_size", "claims to be compiled and runs eager"),
    "slow": Sabotage(Gate.SPEEDUP, "fixed_size", "every step does its work many times over"),
}


def builtin_binding(name: str) -> Callable[..., Any]:
    """The function that binds a built-in cache to a backbone."""
    from toto.model.util import KVCache

    from toto_compat.caches import index_variants, sabotaged
    from toto_compat.model.bound import WholeModel
    from toto_compat.model.static_model import bind_static

    whole_model_caches = {
        "upstream": KVCache,
        "list_index": index_variants.ListIndexKVCache,
        "compile_friendly": index_variants.CompileFriendlyKVCache,
        "sabotaged:position_off_by_one": sabotaged.PositionOffByOne,
        "sabotaged:stale_values": sabotaged.StaleValues,
    }
    if name in whole_model_caches:
        return lambda backbone, compile_spec, *_shapes: WholeModel(backbone, whole_model_caches[name], compile_spec)
    static_models: dict[str, Callable[..., Any]] = {
        "fixed_size": bind_static,
        "sabotaged:leaking_mask": sabotaged.LeakingMask,
        "sabotaged:forgetful_reset": sabotaged.ForgetfulReset,
        "sabotaged:silent_downcast": sabotaged.SilentDowncast,
        "sabotaged:recompile_every_step": sabotaged.RecompileEveryStep,
        "sabotaged:code_object_per_step": sabotaged.CodeObjectPerStep,
        "sabotaged:eager_in_disguise": sabotaged.EagerInDisguise,
        "sabotaged:slow": sabotaged.Slow,
    }
    return static_models[name]
