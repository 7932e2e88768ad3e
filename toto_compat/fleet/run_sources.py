"""Runs as they come from other machines: folders, folders of folders, zipped artifacts; none of them is trusted."""

import re
import stat
import zipfile
from pathlib import Path, PurePosixPath

from toto_compat.errors import InputError, SelectionError
from toto_compat.evidence.files import DAMAGED_ZIP, read_model, storage_errors
from toto_compat.evidence.store import Run, RunInfo, cell_path, find_run, load_run, log_path

_LARGEST_FILE = 64 * 1024**2  # a cell's file has about 0.4 MB
_LARGEST_ARTIFACT = 2 * 1024**3
_MOST_FILES = 100_000  # a run of 10,000 cells has 20,001
_DEEPEST = 4  # artifacts/<name>/results/<run>/run.json
_DEEPEST_FILE = _DEEPEST + len(("cells", "environment", "cache", "mode.json"))  # parts of its name
_PART_OF_A_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")


def runs_of(source: str, results: Path, scratch: Path) -> list[Run]:
    """Every run that is meant by a name under results/, a folder, a folder that holds runs, or a zipped artifact."""
    path = Path(source)
    with storage_errors(path, "read"):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_file:
        path = _unpacked(path, scratch)
    elif not is_folder or (path / "run.json").exists():
        return [checked_run(find_run(source, results))]
    folders = _runs_below(path)
    if not folders:
        raise SelectionError(f"{source}: no run in it", hint="a run is a folder with run.json and cells/")
    return [checked_run(folder) for folder in folders]


def _runs_below(folder: Path) -> list[Path]:
    found = [
        folder / "run.json",
        *(one for depth in range(1, _DEEPEST + 1) for one in folder.glob("*/" * depth + "run.json")),
    ]
    # results/latest is a link to a run that is there anyway
    return sorted({one.parent.resolve() for one in found if one.is_file() and not one.parent.is_symlink()})


def checked_run(folder: Path) -> Run:
    """Read a run that another machine wrote. What names a place outside of it, or is not what it says, is refused."""
    _check_file(folder / "run.json")
    for name in read_model(folder / "run.json", RunInfo).cells:
        if not all(_PART_OF_A_NAME.fullmatch(part) for part in name.split("/")):
            raise InputError(f"{folder / 'run.json'}: cells: {name!r} is no name of a cell", hint=_LEAVE_OUT)
        if cell_path(folder, name).exists():
            _check_file(cell_path(folder, name))
    run = load_run(folder)
    for cell in run.cells:
        if cell.cell != cell.request.cell:
            raise InputError(
                f"{cell_path(folder, cell.cell)}: holds a result of {cell.cell}, asked as {cell.request.cell}",
                hint=_LEAVE_OUT,
            )
    return run


def log_of(run: Run, cell: str) -> Path | None:
    """The log that a cell left in its run, if it is a file that can be copied."""
    log = log_path(run.folder, cell)
    if log.is_symlink() or not log.is_file() or log.stat().st_size > _LARGEST_FILE:
        return None
    return log


_LEAVE_OUT = "the file was changed or damaged: get the artifact again, or leave this run out"


def _check_file(path: Path) -> None:
    """Refuse a link, a device and a file that no run writes, before anything of it is read."""
    with storage_errors(path, "read"):
        facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise InputError(f"{path}: not a plain file", hint=_LEAVE_OUT)
    if facts.st_size > _LARGEST_FILE:
        raise InputError(f"{path}: {facts.st_size / 10**6:.0f} MB, no run writes files that large", hint=_LEAVE_OUT)


def _unpacked(artifact: Path, scratch: Path) -> Path:
    """Unpack what a CI system zipped, into a folder of its own; only names of runs, only below that folder."""
    target = scratch / f"{len(list(scratch.iterdir()))}-{artifact.name}"
    try:
        with zipfile.ZipFile(artifact) as packed:
            members = [one for one in packed.infolist() if not one.is_dir()]
            if sum(one.file_size for one in members) > _LARGEST_ARTIFACT:
                raise InputError(f"{artifact}: unpacks to more than 2 GB", hint=_LEAVE_OUT)
            if len(members) > _MOST_FILES:
                raise InputError(f"{artifact}: unpacks to {len(members)} files, no runs have as many", hint=_LEAVE_OUT)
            for member in members:
                inside = PurePosixPath(member.filename)
                if inside.is_absolute() or ".." in inside.parts or "\\" in member.filename:
                    raise InputError(f"{artifact}: holds {member.filename!r}, outside of its folder", hint=_LEAVE_OUT)
                if inside.suffix not in (".json", ".log") or member.file_size > _LARGEST_FILE:
                    continue  # the table and the page are made anew
                if len(inside.parts) > _DEEPEST_FILE:
                    continue  # nobody looks there, and a thousand folders in each other are hard to be rid of
                packed.extract(member, target)  # writes links as the plain files that they are in the archive
    except (*DAMAGED_ZIP, OSError) as error:
        raise InputError(
            f"{artifact}: cannot be unpacked: {error}", hint="a run is a folder, or a .zip of one"
        ) from error
    target.mkdir(parents=True, exist_ok=True)
    return target
