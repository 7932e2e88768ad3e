"""The files that a request names, as a cell sees them: copied before it starts, read-only, and nothing beside them."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from toto_compat.contract.request import CellRequest, SymbolSeries
from toto_compat.errors import InputError
from toto_compat.evidence.files import cache_folder, read_bytes
from toto_compat.matrix.toto_source import without_password
from toto_compat.matrix.user_cache import BUILTIN, split_source, user_cache_files
from toto_compat.runtimes.source import stage


def staged(request: CellRequest) -> CellRequest:
    """Give the request with the user's own cache and series copied: an edit from here on changes nothing in the run.

    A cache comes with the files of its folder that it imports: what it does not import it cannot read, whatever the
    runtime. Staging a second time changes nothing. Checkpoints are too large to copy.
    """
    changes: dict[str, Any] = {}
    if request.cache.source != BUILTIN:
        file, class_name = split_source(request.cache.source)
        folder = stage(user_cache_files(file), cache_folder() / "caches")
        changes["cache"] = request.cache.model_copy(update={"source": f"{folder / file.name}:{class_name}"})
    if request.csv is not None:
        path = Path(request.csv.path)
        folder = stage({path.name: read_bytes(path, follow_links=True)}, cache_folder() / "series")
        changes["csv"] = request.csv.model_copy(update={"path": str(folder / path.name)})
    if request.symbols:
        # numbered: a symbol may be called what no path in a container can be
        contents = {f"{number}.csv": _content(symbol) for number, symbol in enumerate(request.symbols)}
        folder = stage(contents, cache_folder() / "series")
        changes["symbols"] = _below(request.symbols, str(folder), contents)
    return request.model_copy(update=changes)


def with_inputs(request: CellRequest, seen: Callable[[Path, str], str]) -> CellRequest:
    """Give the request with paths as the cell sees them; `seen(path, name)` shows it something and says where."""
    request = staged(request)
    changes: dict[str, Any] = {}
    if request.cache.source != BUILTIN:
        file, class_name = split_source(request.cache.source)
        source = f"{seen(file.parent, 'cache')}/{file.name}:{class_name}"
        changes["cache"] = request.cache.model_copy(update={"source": source})
    if request.csv is not None:
        path = Path(request.csv.path)
        changes["csv"] = request.csv.model_copy(update={"path": seen(path, f"csv/{path.name}")})
    if request.symbols:
        paths = [Path(symbol.series.path) for symbol in request.symbols]
        folder = seen(paths[0].parent, "symbols")
        changes["symbols"] = _below(request.symbols, folder, [path.name for path in paths])
    environment = request.environment  # for its provenance; a password in an address is none of the cell's business
    index = environment.index and without_password(environment.index)
    shown = {"toto_ts": without_password(environment.toto_ts), "index": index}
    changes["environment"] = environment.model_copy(update=shown)
    if request.checkpoint_folder is not None:
        changes["checkpoint_folder"] = seen(Path(request.checkpoint_folder), "checkpoint")
    return request.model_copy(update=changes)


def _content(symbol: SymbolSeries) -> bytes:
    content = read_bytes(Path(symbol.series.path), follow_links=True)
    if hashlib.sha256(content).hexdigest() != symbol.content:
        raise InputError(f"{symbol.series.path}: was changed while it was read", hint="run the same command again")
    return content


def _below(symbols: Sequence[SymbolSeries], folder: str, names: Iterable[str]) -> tuple[SymbolSeries, ...]:
    return tuple(
        symbol.model_copy(update={"series": symbol.series.model_copy(update={"path": f"{folder}/{name}"})})
        for symbol, name in zip(symbols, names, strict=True)
    )
