"""The disk that a reference run takes: environments that it built itself are removed before the next release."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toto_compat.contract.request import Environment
from toto_compat.environments.virtualenv import disk_needed, read_built, venv_folder
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import cache_folder, write_atomically
from toto_compat.runtimes.prune import remove, size_of


class BuiltHere:
    """Environments that reference runs built, also those of one that was killed; others are never removed."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or cache_folder()
        self._record = self._cache / "reference" / "built.json"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the only right to build and remove: of two at a time one would remove what the other uses."""
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with (self._record.parent / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise EnvironmentBuildError(
                    "another reference run is building and removing environments here",
                    hint="wait for its end, or run this one with --keep-environments",
                ) from error
            yield

    def announce(self, name: str, environment: Environment, most_bytes: float) -> None:
        """Note an environment that is about to be built; refuse it where it would take more disk than is allowed."""
        folder = venv_folder(name, environment, self._cache)
        if read_built(folder) is not None:
            return
        taken = sum(size_of(self._cache / "venvs" / one) for one in self._names())
        if taken + disk_needed(environment) > most_bytes:
            raise EnvironmentBuildError(
                f"{name}: needs about {disk_needed(environment) / 10**9:.0f} GB beside the {taken / 10**9:.0f} GB of "
                f"other environments, and the plan allows {most_bytes / 10**9:.0f} GB at a time",
                hint="raise most_disk_gb in plan.yaml, or run `toto-compat prune`",
            )
        self._write([*self._names(), folder.name])

    def remove_all(self) -> list[tuple[str, int]]:
        """Remove them; names and bytes."""
        removed = []
        for name in self._names():
            folder = self._cache / "venvs" / name
            if folder.is_dir():
                removed.append((name, size_of(folder)))
                remove(folder)
        self._write([])
        return removed

    def _names(self) -> list[str]:
        try:
            names = json.loads(self._record.read_bytes())
        except (OSError, ValueError):
            return []
        if not isinstance(names, list):
            return []
        # a name, never a path: what is listed here is removed
        return [
            name for name in names if isinstance(name, str) and name and "/" not in name and not name.startswith(".")
        ]

    def _write(self, names: list[str]) -> None:
        write_atomically(self._record, json.dumps(list(dict.fromkeys(names))) + "\n")
