"""Upstream eager's answers for the cells of a run: read from the store, or computed once, where no candidate is."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.contract.references import (
    REFERENCES_FOLDER,
    References,
    UnusableReferencesError,
    read_references,
    write_references,
)
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult
from toto_compat.errors import TotoCompatError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.left_file import read_left_file
from toto_compat.evidence.references import (
    LARGEST_FILE,
    KnownReferences,
    ReferenceStore,
    needs_references,
    references_key,
    request_for_references,
)
from toto_compat.runtimes.cell_process import work_folders
from toto_compat.runtimes.machine import machine_identity
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.source import CellSource

Compute = Callable[[CellRequest], KnownReferences | None]


@dataclass
class SharedReferences:
    """The references of one run. The first cell that needs some finds them stored or computes them, the others wait.

    What was found is held on to by its hashes: files that change meanwhile are given to nobody. References that could
    not be computed are not tried again; each cell then computes its own and says what is wrong.
    """

    store: ReferenceStore
    source_hash: str
    fresh: bool = False  # compute them again, also those that are stored
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _doors: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    _told: dict[str, References | None] = field(default_factory=dict)

    def of(
        self,
        request: CellRequest,
        lock: str,
        compute: Compute,
        note: Callable[[str], None],
        *,
        gpu: str | None = None,
    ) -> KnownReferences | None:
        """Return what this request's cell is held to; None where it needs nothing or must compute its own.

        Of a machine's GPUs, `gpu` is the one that the cell runs on: another kind rounds otherwise."""
        if not needs_references(request):
            return None
        try:
            kinds = [one.name for one in find_gpus() if one.uuid == gpu] if gpu is not None else []
            machine = " | ".join((machine_identity(request.device), *kinds))
            key = references_key(request, lock=lock, source_hash=self.source_hash, machine=machine)
        except TotoCompatError:
            return None  # a file of the workload is gone: the cell will say so
        with self._guard:
            door = self._doors[key]
        with door:
            if key not in self._told:
                found = None if self.fresh else self._stored(key, request.cell.environment, note)
                found = found or self._computed(key, request, compute, note)
                self._told[key] = found.told if found else None
                return found
            told = self._told[key]
        known = self.store.get(key) if told else None
        return known if known and known.told == told else None

    def _stored(self, key: str, environment: str, note: Callable[[str], None]) -> KnownReferences | None:
        found = self.store.get(key)
        if found is None:
            try:
                damage = self.store.set_aside(key)
            except TotoCompatError as error:
                damage = f"stored answers cannot be used and cannot be moved: {error}"
            if damage:
                note(f"{environment}: {damage}")
        return found

    def _computed(
        self, key: str, request: CellRequest, compute: Compute, note: Callable[[str], None]
    ) -> KnownReferences | None:
        computed = compute(request_for_references(request))
        if computed is None:
            return None
        known = KnownReferences(computed.told.model_copy(update={"key": key}), computed.contents)
        try:
            self.store.put(known)
        except TotoCompatError as error:
            note(f"upstream eager's answers are not kept, other cells ask it again: {error}")
        return known


def shared_references(source: CellSource, *, fresh: bool) -> SharedReferences:
    """Make the references of a run whose cells run this source."""
    return SharedReferences(ReferenceStore(cache_folder() / "references" / source.name), source.hash, fresh)


def left_references(folder: Path, result: CellResult) -> KnownReferences | None:
    """Take what a cell that was asked for nothing but references has left; None unless it is whole."""
    told = result.provenance.references
    if told is None or result.failure is not None:
        return None
    for work in work_folders(folder):
        try:
            contents = read_references(work / REFERENCES_FOLDER, told, lambda path: read_left_file(path, LARGEST_FILE))
        except UnusableReferencesError:
            continue
        return KnownReferences(told, contents)
    return None


def give_references(known: KnownReferences | None, work: Path) -> References | None:
    """Put a copy into a cell's work folder. Not a mount: the cell takes it off its disk before a candidate can look."""
    if known is None:
        return None
    write_references(work / REFERENCES_FOLDER, known.contents)
    return known.told
