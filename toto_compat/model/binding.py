"""A cache by its name or its file, bound to a backbone."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from toto.model.backbone import TotoBackbone

from toto_compat.contract.caches import builtin_cache
from toto_compat.contract.request import CacheRequest
from toto_compat.errors import InputError
from toto_compat.model.bound import BoundModel, CompileSpec, WholeModel

# What the suites use of a bound model: see BoundModel.
BOUND_INTERFACE = (
    "patch_size",
    "cache_class",
    "compiled",
    "draws",
    "observer",
    "generate_mean",
    "generate_samples",
    "teacher_forced",
)


def bind(
    backbone: TotoBackbone,
    cache: CacheRequest,
    *,
    compile_spec: CompileSpec | None = None,
    max_patches: int | None = None,
    batch_sizes: tuple[int, ...] = (),
    max_buckets: int | None = None,
    draws: str | None = None,
    max_context: int | None = None,
) -> BoundModel:
    """Bind a cache to the backbone, compiled if asked.

    `max_patches` (longest context plus horizon) and `batch_sizes` (series times samples per batch) say what is to come:
    a cache with fixed shapes makes them all at its first forecast, so that a later change compiles nothing.
    `max_buckets` is how many shapes such a cache may hold, `draws` how fixed_size draws samples ('direct', 'toto-ts'),
    `max_context` the longest context in patches; a user's own binding is told none of the three.
    """
    if cache.source != "builtin":
        cls = load_user_cache(cache.source)
        if not hasattr(cls, "bind"):
            return WholeModel(backbone, cls, compile_spec)
        own = cls.bind(backbone, compile_spec=compile_spec, max_patches=max_patches, batch_sizes=batch_sizes)
        return _checked(own, cache.source)
    row = builtin_cache(cache.name)
    module, _, name = row.code.partition(":")
    code: Any = getattr(importlib.import_module(f"toto_compat.{module}"), name)
    if row.kind == "whole_model":
        return WholeModel(backbone, code, compile_spec)
    bound: BoundModel = code(
        backbone, compile_spec, max_patches, batch_sizes, max_buckets, draws=draws, max_context=max_context
    )
    return bound


def _checked(bound: Any, source: str) -> BoundModel:
    """Refuse what a user's `bind` returned if a suite would only stumble over it later."""
    missing = [name for name in BOUND_INTERFACE if not hasattr(bound, name)]
    if missing:
        raise InputError(
            f"cache {source}: what its bind() returns has no {', '.join(missing)}",
            hint=f"the suites use {', '.join(BOUND_INTERFACE)}; README.md has an example",
        )
    own: BoundModel = bound
    return own


def load_user_cache(source: str) -> type:
    """Import the class behind 'path/to/file.py:Class'; the file may import others of its own folder."""
    path_text, _, name = source.rpartition(":")
    path = Path(path_text)
    module_name = f"user_cache_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"cache {source}: no Python file there", hint="give path/to/file.py:Class")
    module = importlib.util.module_from_spec(spec)
    # dynamo imports the module of a function by its name to read its globals
    sys.modules[module_name] = module
    # last, so that a file of the user's takes no other package's place
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise InputError(f"cache {source}: importing it failed: {type(error).__name__}: {error}") from error
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        raise InputError(
            f"cache {source}: {path.name} has no class {name!r}", hint="the name after the colon is the class"
        )
    return cls
