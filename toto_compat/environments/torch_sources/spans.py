"""Tables over releases: a value per span of neighbouring releases, so that a table stays readable and small."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.version import Version

# A list of plain values, as json writes it over several lines. A text of torch's may hold brackets, but no line breaks.
_LIST = re.compile(r"\[\n\s+((?:[^\[\]{}\n]*\n\s*)+?)\]")
_BREAK = re.compile(r",\n\s*")
FOLDER = Path(__file__).parent


def load(table: str) -> dict[str, Any]:
    """Read one of the tables that lie beside this module."""
    text = (resources.files("toto_compat.environments.torch_sources") / table).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def write(table: str, document: Mapping[str, object], folder: Path = FOLDER) -> None:
    """Write a table, lists of plain values on one line; whoever reads at the same time gets the old one or the new."""
    text = json.dumps(document, indent=1, sort_keys=False)
    text = _LIST.sub(lambda held: "[" + _BREAK.sub(", ", held[1]).strip() + "]", text)
    unfinished = folder / f"{table}.unfinished"
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(folder / table)


def ordered(releases: Mapping[str, object] | Sequence[str]) -> list[str]:
    return sorted(releases, key=Version)


def nearest(torch: str, releases: Sequence[str]) -> str:
    """Name the release that speaks for a torch: the same, else the newest that is not newer, else the oldest."""
    release = Version(Version(torch).public)
    not_newer = [one for one in releases if Version(one) <= release]
    return not_newer[-1] if not_newer else releases[0]


def spans(values: Mapping[str, object], releases: Sequence[str]) -> list[list[object]]:
    """Fold a value per release into [first, last, value] of neighbours that agree; releases without one end a span."""
    folded: list[list[object]] = []
    end = -1
    for at, release in enumerate(releases):
        if release not in values:
            continue
        value = values[release]
        if folded and end == at - 1 and _same(folded[-1][2], value):
            folded[-1][1] = release
        else:
            folded.append([release, release, value])
        end = at
    return folded


def _same(one: object, other: object) -> bool:
    # True == 1 and 1 == 1.0 for Python; a default that changed its type has changed
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def unfolded(folded: Sequence[Sequence[Any]], releases: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Give (release, value) for every release of every span."""
    for first, last, value in folded:
        for release in releases[releases.index(first) : releases.index(last) + 1]:
            yield release, value
