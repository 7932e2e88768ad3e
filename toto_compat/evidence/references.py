"""Upstream eager's answers in the user's cache folder, so that they are computed once per environment and workload.

    references/<source of the cell's side>/<key>/references.json, references.safetensors, truths.safetensors

A folder appears whole, and what is in it is used only if it is what references.json says. Only what was computed where
no candidate is gets in: it is what later candidates are held to.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.references import References, UnusableReferencesError, read_references, write_references
from toto_compat.contract.request import CacheRequest, CellRequest, CompileSettings, Limits
from toto_compat.contract.suites import Group, Suite, suites_of
from toto_compat.errors import StorageError
from toto_compat.evidence.files import (
    make_folder,
    may_be_read_later,
    read_model,
    set_aside,
    storage_errors,
    sync_files,
    sync_folder,
    write_model,
)
from toto_compat.evidence.left_file import read_left_file
from toto_compat.evidence.makers import made_by_this_process
from toto_compat.evidence.store import cell_key
from toto_compat.matrix.user_cache import BUILTIN

LARGEST_FILE = 2_000_000_000
_TOLD = "references.json"
_UPSTREAM = "upstream"
_SOURCES_KEPT = 3  # tens to hundreds of MB for each workload and environment


@dataclass(frozen=True)
class KnownReferences:
    """References that were read and checked, with what is in their files."""

    told: References
    contents: dict[str, bytes]


def needs_references(request: CellRequest) -> bool:
    return any(suite in request.profile.suites for suite in suites_of(Group.REFERENCE))


def request_for_references(request: CellRequest) -> CellRequest:
    """Ask for the references that this request's cell is held to: nothing in here is of its candidate."""
    profile = request.profile.model_copy(update={"suites": (Suite.EQUIVALENCE,), "repeats": 1})
    return request.model_copy(
        update={
            "cell": CellName.of(request.cell.environment, _UPSTREAM, "default"),
            "cache": CacheRequest(name=_UPSTREAM, source=BUILTIN),
            "settings": CompileSettings(),
            "profile_name": "references",
            "profile": profile,
            "workload_name": "",
            "demands": (),
            "symbols": (),
            "only_references": True,
        }
    )


def references_key(request: CellRequest, *, lock: str, source_hash: str, machine: str) -> str:
    """Hash everything that references depend on: cells that are held to the same ones have the same key."""
    # of the limits only the threads change what is computed
    asked = request_for_references(request).model_copy(update={"limits": Limits(threads=request.limits.threads)})
    return cell_key(asked, lock=lock, source_hash=source_hash, machine=machine)


@dataclass(frozen=True)
class ReferenceStore:
    """References by key, of one source of the cell's side: those of another are never asked for again."""

    folder: Path

    def get(self, key: str) -> KnownReferences | None:
        """Return what is stored under the key; None where anything is wrong with it, and it is computed again."""
        try:
            return self._read(key)
        except (StorageError, UnusableReferencesError):
            return None

    def _read(self, key: str) -> KnownReferences:
        place = self.folder / key
        told = read_model(place / _TOLD, References)
        if told.key != key:
            raise UnusableReferencesError(f"{place}: holds those of another key")
        return KnownReferences(told, read_references(place, told, lambda path: read_left_file(path, LARGEST_FILE)))

    def set_aside(self, key: str) -> str:
        """Move what cannot be used out of the way, to be looked at; return what to say about it, mostly nothing."""
        place, kept = self.folder / key, self.folder / "damaged" / key
        if not place.exists():
            return ""
        try:
            self._read(key)
        except (StorageError, UnusableReferencesError) as error:
            if may_be_read_later(error):
                return f"stored answers cannot be read now and are computed again: {error}"
            set_aside(place, kept)
            return f"stored answers cannot be used and are computed again; they lie in {kept} now: {error}"
        return ""

    def put(self, known: KnownReferences) -> None:
        """Store them in the place of what is there. Of two runners that do so at once one is kept, whole."""
        place = self.folder / known.told.key
        with storage_errors(place, "written"):
            make_folder(self.folder)
            # beside the folder of this source: a killed runner leaves no key that is half there
            prefix = f".building-references{made_by_this_process()}"
            building = Path(tempfile.mkdtemp(prefix=prefix, dir=self.folder.parent))
            try:
                write_references(building / "new", known.contents)
                write_model(building / "new" / _TOLD, known.told)
                sync_files(building / "new")
                with suppress(FileNotFoundError):
                    place.rename(building / "replaced")
                try:
                    (building / "new").rename(place)
                except OSError:
                    if not place.exists():
                        raise
                sync_folder(self.folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
            self._drop_old_sources()

    def _drop_old_sources(self) -> None:
        """Remove those of sources that were not run for the longest: every edit of the cell's side makes a new one.

        Never its own, which a clock that was put back makes the oldest. Another runner may do the same at once."""
        os.utime(self.folder)
        used: dict[Path, float] = {}
        for folder in self.folder.parent.glob("[!.]*"):
            with suppress(FileNotFoundError):
                used[folder] = folder.stat().st_mtime
        used.pop(self.folder, None)
        for old in sorted(used, key=used.__getitem__)[: 1 - _SOURCES_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
