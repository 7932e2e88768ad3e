"""The files that a request names, as a cell sees them: read-only, and nothing beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toto_compat.contract.request import CellRequest
from toto_compat.evidence.files import cache_folder
from toto_compat.matrix.user_cache import BUILTIN, split_source, user_cache_files
from toto_compat.runtimes.source import stage_files


def with_inputs(request: CellRequest, seen: Callable[[Path, str], str]) -> CellRequest:
    """Give the request with paths as the cell sees them; `seen(path, name)` shows it a file or folder and says where.

    A cache of the user's own comes with the files of its folder that it imports, staged: what it does not import it
    cannot read, whatever the runtime.
    """
    changes: dict[str, Any] = {}
    if request.cache.source != BUILTIN:
        file, class_name = split_source(request.cache.source)
        staged = stage_files(user_cache_files(file), cache_folder() / "caches")
        source = f"{seen(staged, 'cache')}/{file.name}:{class_name}"
        changes["cache"] = request.cache.model_copy(update={"source": source})
    if request.csv is not None:
        path = Path(request.csv.path)
        changes["csv"] = request.csv.model_copy(update={"path": f"{seen(path, f'csv/{path.name}')}"})
    if request.checkpoint_folder is not None:
        changes["checkpoint_folder"] = seen(Path(request.checkpoint_folder), "checkpoint")
    return request.model_copy(update=changes)
