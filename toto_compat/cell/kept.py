"""Upstream eager's answers inside a cell: in the orchestrator's memory while a candidate's process runs."""

import shutil
from pathlib import Path
from typing import Any

from toto_compat.contract.references import (
    ANSWERS,
    REFERENCES_FOLDER,
    TRUTHS,
    References,
    read_references,
    references_of,
    write_references,
)
from toto_compat.contract.suites import Group

_HIDDEN = Path("kept-from-the-candidate")
# where the processes of a cell look for them, in its work folder
ANSWERS_PLACE = _HIDDEN / ANSWERS
TRUTHS_PLACE = Path("equivalence", TRUTHS)
_PLACES = {ANSWERS: ANSWERS_PLACE, TRUTHS: TRUTHS_PLACE}


class KeptFromTheCandidate:
    """Files that a candidate could give back (the answers) or tamper with (the values fed under teacher forcing).

    The answers are on the disk only for processes that never import it. Every process starts with both as they were
    when they were taken in, whatever a candidate before it did to the disk.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._key = ""
        self._contents: dict[Path, bytes] = {}

    def take_given(self, told: References) -> None:
        """Take in what the host has put into the work folder, and off the disk; UnusableReferencesError if it is wrong.

        Called before any process is started.
        """
        folder = self._work / REFERENCES_FOLDER
        try:
            given = read_references(folder, told)
        finally:
            _clear(folder)
        self._contents.update({_PLACES[name]: content for name, content in given.items()})
        self._key = told.key

    def before(self, group: Group) -> None:
        """Prepare the disk for a process of this group."""
        _clear(self._work / _HIDDEN)
        for place, content in self._contents.items():
            if place.parent == _HIDDEN and group.rule.imports_the_candidate:
                continue
            path = self._work / place
            _clear(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def after(self, group: Group) -> None:
        """Take in what a process that never imported the candidate has left."""
        if group.rule.imports_the_candidate:
            return
        left = [_HIDDEN / path.name for path in (self._work / _HIDDEN).glob("*")]
        for place in (*left, TRUTHS_PLACE):
            if place not in self._contents and (self._work / place).is_file():
                self._contents[place] = (self._work / place).read_bytes()

    def references(self, made: dict[str, Any]) -> References | None:
        """Tell what the candidate is held to; None where upstream eager gave no answers."""
        return references_of(self._files, made, self._key) if len(self._files) == len(_PLACES) else None

    def hand_over(self) -> None:
        """Leave the answers where the host looks for them."""
        write_references(self._work / REFERENCES_FOLDER, self._files)

    @property
    def _files(self) -> dict[str, bytes]:
        return {name: self._contents[place] for name, place in _PLACES.items() if place in self._contents}


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
