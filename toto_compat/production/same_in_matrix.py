"""Which cells of stored runs show what a log shows: the way from a line in production to the evidence about it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toto_compat.errors import InputError
from toto_compat.evidence.left_file import read_left_file

_LARGEST_FILE = 200_000_000


@dataclass(frozen=True)
class Seen:
    """Says that a cell of a stored run showed an event."""

    kind: str
    function: str
    reason: str  # normalised
    cell: str
    run: str


def stored_runs(names: Sequence[str], results: Path = Path("results")) -> list[Path]:
    """Find the folders of the named runs; without names those of results/reference, if there are any."""
    if not names:
        return sorted(path.parent for path in results.glob("reference/*/run.json"))
    folders = []
    for name in names:
        folder = next((path for path in (results / name, Path(name)) if (path / "run.json").exists()), None)
        if folder is None:
            raise InputError(f"--run {name}: no such run", hint=f"Give the name of a folder in {results}, or a path.")
        folders.append(folder)
    return folders


def seen_in(runs: Sequence[Path]) -> list[Seen]:
    """Gather all that the cells of these runs saw the compiler do. A damaged file only shows less."""
    return [seen for run in runs for path in sorted(run.glob("cells/**/*.json")) for seen in _seen_in_cell(run, path)]


def _seen_in_cell(run: Path, path: Path) -> Iterator[Seen]:
    # Read without the schema: this only points at evidence, and must not wait for what judges it.
    try:
        cell: Any = json.loads(read_left_file(path, _LARGEST_FILE))
        name, suites = str(cell["cell"]), list(cell["evidence"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    for suite in suites:
        if not isinstance(suite, dict):
            continue
        grouped = suite.get("details", {}).get("reasons", [])
        told = [(one.get("kind"), one.get("function"), one.get("reason")) for one in grouped if isinstance(one, dict)]
        events = [one for one in suite.get("events", ()) if isinstance(one, dict)]
        told += [(one.get("kind"), one.get("function"), one.get("normalised_reason")) for one in events]
        for kind, function, reason in dict.fromkeys(told):
            yield Seen(str(kind), str(function or ""), str(reason or ""), name, run.name)


def cells_showing(kind: str, function: str, reason: str, seen: Sequence[Seen]) -> list[str]:
    """Name the cells that show the same, best match first: with its function, else the reason elsewhere."""
    of_kind = [one for one in seen if one.kind == kind and one.reason == reason and reason]
    exact = [one for one in of_kind if one.function == function]
    return list(dict.fromkeys(f"{one.cell} ({one.run})" for one in exact or of_kind))
