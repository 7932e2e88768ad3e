"""What was compiled, kept in a folder for the next process.

torch's own artifacts (`torch.compiler.save_cache_artifacts`) hold graphs and the Python around the kernels. On a CPU
the kernels are C++ libraries, and no kind of artifact that 2.13.0 registers holds those: the compiler would be called
for every kernel again. Tried with one small graph on 2.13.0: a second process that was given them found the graph and
ran the compiler as often as the first one had. Inductor's cache folder holds both, in every release, so the files of
that folder are kept.

While a bucket is compiled, and only then, inductor's folder is one of this process's own: TORCHINDUCTOR_CACHE_DIR is
how torch is told. It is filled from the kept file before the first compile, and kept again when a compile added to it.
torch decides by its own keys what of it fits; the key here keeps apart what torch does not look at, such as the
processor that `-march=native` compiled for.

A kernel that this process had already loaded when it was given the folder is not written by torch again and is missing
from what is kept, until a later process adds it.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from toto_compat.contract.bucket_messages import ARTIFACT_LOGGER
from toto_compat.errors import InputError
from toto_compat.model.artifact_file import ArtifactFile, DamagedError
from toto_compat.model.trusted_folder import (
    UntrustedError,
    make_trusted_folder,
    read_trusted,
    trust_folder,
    write_trusted,
)

SUFFIX = ".artifacts"
_LOG = logging.getLogger(ARTIFACT_LOGGER)
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_NOT_KEPT = (".lock", ".tmp", ".o", ".gch", ".pch")


class Artifacts:
    """The kept file of one model, and the private folder that inductor works in meanwhile."""

    def __init__(self, cache_dir: Path, key: Mapping[str, str]) -> None:
        """Refuse a folder that is not ours alone, before anything is compiled; what is kept for the key is taken."""
        self.key = dict(key)
        self._why_not_written = ""
        try:
            self._folder: Path | None = make_trusted_folder(cache_dir)
        except OSError as error:
            self._folder, self._why_not_written = None, f"it cannot be made: {error.strerror}"
            _LOG.warning("%s: nothing kept is used and nothing will be written: %s", cache_dir, self._why_not_written)
        self._private = _private_folder()
        digest = hashlib.sha256(repr(sorted(self.key.items())).encode()).hexdigest()
        self._name = digest[:32] + SUFFIX
        self.path = (self._folder or cache_dir) / self._name  # where it is kept, if it is
        self._known: dict[str, int] = {}
        kept = self._read() if self._folder is not None else None
        if kept is not None:
            self._unpack(kept)

    def _unpack(self, kept: ArtifactFile) -> None:
        try:
            kept.unpack(self._private)
        except OSError as error:
            _LOG.warning("%s: compiling cold, %s cannot be filled: %s", self._folder, self._private, error.strerror)
            self._private = _private_folder()  # half of it would be worse than nothing
        else:
            self._known = self._sizes()
            _LOG.info("%s: %d compiled files are used", self._folder, len(kept.files))

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Let inductor work in the private folder; behind the block, keep what it added."""
        before = {name: os.environ.get(name) for name in _FOLDERS}
        os.environ.update(zip(_FOLDERS, (str(self._private), str(self._private / "triton")), strict=True))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        self._keep()

    def _read(self) -> ArtifactFile | None:
        assert self._folder is not None
        path = self._folder / self._name
        try:
            kept = ArtifactFile.from_bytes(read_trusted(path))
        except FileNotFoundError:
            _LOG.warning("%s: compiling cold: %s", self._folder, self._why_nothing_fits())
            return None
        except (OSError, DamagedError) as error:
            _LOG.warning("%s: compiling cold, the file is ignored: %s", path, error)
            return None
        if kept.key != self.key:
            _LOG.warning("%s: compiling cold, the file is ignored: it is of another key", path)
            return None
        return kept

    def _why_nothing_fits(self) -> str:
        """Name what differs from the most similar of the files that are there."""
        assert self._folder is not None
        differences: list[list[str]] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                other = ArtifactFile.from_bytes(read_trusted(path)).key
            except (OSError, DamagedError, UntrustedError):
                continue
            differing = [name for name in self.key if other.get(name) != self.key[name]]
            differences.append([f"{name} is {self.key[name]!r}, kept is {other.get(name)!r}" for name in differing])
        if not differences:
            return "nothing is kept there"
        fewest = min(differences, key=len)
        return "; ".join(fewest)

    def _keep(self) -> None:
        """Write all of it again if there is more than before. A failure costs the next start, not this forecast."""
        if self._folder is None:
            return
        try:
            sizes = self._sizes()
            if sizes == self._known:
                return
            self._known = sizes
            files = {name: (self._private / name).read_bytes() for name in sizes}
            trust_folder(self._folder)
            write_trusted(self._folder / self._name, ArtifactFile(self.key, files).to_bytes())
        except (OSError, InputError) as error:
            reason = error.message if isinstance(error, InputError) else str(error.strerror)
            if not self._why_not_written:
                self._why_not_written = reason
                _LOG.warning("%s: nothing was written: %s", self._folder, reason)
        else:
            _LOG.info("%s: %d compiled files are kept in %s", self._folder, len(files), self._name)

    def _sizes(self) -> dict[str, int]:
        return {
            path.relative_to(self._private).as_posix(): path.stat().st_size
            for path in sorted(self._private.rglob("*"))
            if path.is_file() and not path.is_symlink() and not path.name.endswith(_NOT_KEPT)
        }


def _private_folder() -> Path:
    """Make a folder for this process alone, below the user's own choice for inductor; it goes when the process ends."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    below = Path(chosen or tempfile.gettempdir()).absolute()
    try:
        below.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="toto-compat-", dir=below))  # mode 0700
        trust_folder(folder)
    except (OSError, UntrustedError) as error:
        reason = error.message if isinstance(error, UntrustedError) else str(error.strerror)
        raise InputError(
            f"inductor needs a folder of this process's own below {below}: {reason}",
            hint="set TORCHINDUCTOR_CACHE_DIR or TMPDIR to a folder of your own",
        ) from error
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child still needs its parent's
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
