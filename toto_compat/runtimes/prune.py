"""`toto-compat prune`: removes virtualenvs, staged sources and references that no environment of matrix.yaml needs."""

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import click

from toto_compat.environments.virtualenv import venv_folder
from toto_compat.errors import StorageError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.makers import made_on_another_machine, without_machine
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.runtimes.local import abandoned_scratch
from toto_compat.runtimes.source import read_source, staged_name

_LONGEST_BUILD_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Leftover:
    path: Path
    why: str
    size: int


def find_leftovers(matrix: Matrix, cache: Path, *, everything: bool) -> list[Leftover]:
    """List what can go; with `everything` also what is in use, the stored results and the logs of builds."""
    needed = {venv_folder(name, environment, cache) for name, environment in matrix.environments.items()}
    needed |= {cache / folder / staged_name(read_source()) for folder in ("sources", "references")}
    leftovers = []
    for folder in ("venvs", "sources", "references"):
        for path in sorted((cache / folder).glob("*")) + sorted((cache / folder).glob(".*-*")):
            # the log and the lock of a virtualenv lie beside it
            owner = path.with_name(path.name.removesuffix(".lock").removesuffix(".log"))
            if everything or owner not in needed:
                why = "half-built" if path.name.startswith(".") else "in use" if owner in needed else "no longer needed"
                leftovers.append(Leftover(path, why, size_of(path)))
    leftovers += [
        Leftover(path, "of a cell whose runner was killed", size_of(path)) for path in abandoned_scratch(cache / "s")
    ]
    if everything:
        kept = {"evidence": "stored results", "caches": "staged caches", "probes": "answers of probes"}
        there = [(cache / name, why) for name, why in kept.items() if (cache / name).exists()]
        leftovers += [Leftover(path, why, size_of(path)) for path, why in there]
    return list({leftover.path: leftover for leftover in leftovers if not _is_locked(leftover.path)}.values())


def size_of(path: Path) -> int:
    """Count bytes on disk; a file with several names counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        try:
            facts = one.lstat()
        except OSError:
            continue
        if (facts.st_dev, facts.st_ino) not in seen:
            seen.add((facts.st_dev, facts.st_ino))
            total += facts.st_blocks * 512
    return total


def remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            # out of sight first: nobody may start to use a virtualenv that is half gone
            doomed = path.with_name(f".removing-{path.name.lstrip('.')}-{os.getpid()}")
            path.rename(doomed)
            shutil.rmtree(doomed)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be removed: {error.strerror}", hint="check who owns the folder") from error


def _is_locked(path: Path) -> bool:
    """Tell if another process is building this virtualenv now, or may be: one of another machine that began today."""
    name = path.name
    if name.startswith(".building-"):
        if made_on_another_machine(name) and time.time() - path.stat().st_mtime < _LONGEST_BUILD_SECONDS:
            return True
        name = without_machine(name).removeprefix(".building-").rpartition("-")[0]
    lock = path.with_name(f"{name.removesuffix('.lock').removesuffix('.log')}.lock")
    if not lock.is_file():
        return False
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@click.command("prune")
@click.option("--all", "everything", is_flag=True, help="Also what is in use, and the store of finished cells.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@matrix_option
def prune_command(everything: bool, dry_run: bool, matrix_file: Path | None) -> None:
    """Remove virtualenvs, staged sources and references that no environment of matrix.yaml needs any more."""
    cache = cache_folder()
    leftovers = find_leftovers(load_matrix(find_matrix_file(matrix_file)), cache, everything=everything)
    for leftover in leftovers:
        click.echo(f"{_size(leftover.size):>9}  {leftover.path.relative_to(cache)}  ({leftover.why})")
        if not dry_run:
            remove(leftover.path)
    total = _size(sum(leftover.size for leftover in leftovers))
    click.echo(
        f"{'would free' if dry_run else 'freed'} {total} in {cache}" if leftovers else f"nothing to remove in {cache}"
    )


def _size(size: int) -> str:
    return f"{size / 10**9:.2f} GB" if size >= 10**8 else f"{size / 10**6:.1f} MB"
