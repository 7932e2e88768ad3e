"""Weights from a local folder or a hub, brought to the host before any cell runs: cells have no network."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toto_compat.contract.request import PATCH_SIZES, Workload
from toto_compat.errors import InputError
from toto_compat.matrix.schema import Matrix

_WEIGHTS = "model.safetensors"
_FILES = ["config.json", _WEIGHTS]
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_HUB_ID = re.compile(r"^(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w(?:(?!\.\.)[\w./-])*))?\Z")
_ACCEPTED = "a folder with config.json and model.safetensors, or organisation/name@revision"


def with_checkpoint(matrix: Matrix, workloads: Iterable[str], specification: str) -> Matrix:
    """Put the weights that were named on the command line in the place of these workloads' own.

    A local folder is relative to the working directory there. Lengths are patches of the checkpoint's model.
    """
    local = _local_folder(specification, Path.cwd())
    named = str(local) if local is not None else "@".join(filter(None, _hub_id(specification)))
    changed = {}
    for name in workloads:
        workload = matrix.workloads[name]
        model = _model_of(local) if local is not None else "base"  # what hubs have is of its shape
        try:
            changed[name] = Workload.model_validate(workload.model_dump() | {"checkpoint": named, "model": model})
        except ValidationError as error:
            raise InputError(
                f"--checkpoint {specification}: does not fit the workload {name}: {error.errors()[0]['msg']}",
                hint="take a profile with a workload of that model",
            ) from error
    return matrix.model_copy(update={"workloads": {**matrix.workloads, **changed}})


@cache  # a hash of half a gigabyte, the same for every cell
def checkpoint_name(specification: str, folder: Path) -> str:
    """Say which weights these are, for the provenance: a hub's name and commit, or a folder and what is in it."""
    match = _HUB_ID.match(specification)
    if match is not None and folder.parent.name == "snapshots":
        return f"{match['repository']}@{folder.name}"
    with (folder / _WEIGHTS).open("rb") as file:
        return f"{folder.name} (sha256 of {_WEIGHTS}: {hashlib.file_digest(file, 'sha256').hexdigest()})"


def _model_of(folder: Path) -> str:
    """Tell from its patches which model's shape a checkpoint has."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stride = config.get("stride", config.get("patch_size"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"checkpoint {folder}: config.json cannot be read: {error}", hint="toto-ts saves it"
        ) from error
    for model, size in PATCH_SIZES.items():
        if size == stride:
            return model
    sizes = " or ".join(str(size) for size in PATCH_SIZES.values())
    raise InputError(
        f"checkpoint {folder}: its patches have {stride!r} points", hint=f"models with patches of {sizes} can be run"
    )


def find_checkpoint(specification: str, *, relative_to: Path) -> Path | None:
    """Find the checkpoint's folder if it is on this machine; nothing is downloaded. A wrong name is an error."""
    local = _local_folder(specification, relative_to)
    if local is not None:
        return local
    repository, revision = _hub_id(specification)
    hub = _hub(specification)
    try:
        return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except Exception:  # the hub client raises its own, requests' and OS errors alike: not here yet
        return None


def resolve_checkpoint(specification: str, *, relative_to: Path) -> Path:
    """Give a folder as it is, a hub id as the folder that its pinned revision was downloaded to."""
    local = _local_folder(specification, relative_to)
    if local is not None:
        return local
    repository, revision = _hub_id(specification)
    hub = _hub(specification)
    try:
        commit = hub.HfApi().model_info(repository, revision=revision).sha
        folder = hub.snapshot_download(repository, revision=commit, allow_patterns=_FILES)
    except Exception as error:  # the hub client raises its own, requests' and OS errors alike
        raise InputError(
            f"checkpoint {repository}@{revision or 'main'}: cannot be fetched: {type(error).__name__}: {error}",
            hint="check the id and the network, or give a local folder with config.json and model.safetensors",
        ) from error
    return Path(folder)


def _local_folder(specification: str, relative_to: Path) -> Path | None:
    if not specification:  # of a variable that is not set: it would be the folder that it is relative to
        raise InputError("no checkpoint is named: the word is empty", hint=f"accepted: {_ACCEPTED}")
    folder = (relative_to / specification).expanduser()
    try:
        if not folder.is_dir():
            return None
    except OSError as error:
        told = f"checkpoint {specification}: cannot be read: {error.strerror}"
        raise InputError(told, hint=f"accepted: {_ACCEPTED}") from error
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if _WEIGHTS in missing and (pickled := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)):
        raise InputError(
            f"checkpoint {folder}: {', '.join(pickled)}: weights in pickle's format run code when they are read",
            hint=f"convert them to {_WEIGHTS} (`safetensors.torch.save_file`) where you trust their origin",
        )
    if not missing and (why := _why_no_safetensors(folder / _WEIGHTS)):
        raise InputError(
            f"checkpoint {folder}: {_WEIGHTS} is not in that format: {why}",
            hint="get the file again from where you trust it",
        )
    if missing:
        raise InputError(f"checkpoint {folder}: no {' and no '.join(missing)}", hint="toto-ts saves both files")
    return folder.resolve()


def _why_no_safetensors(path: Path) -> str:
    """Tell by its first bytes why a file of weights is none that can be loaded; '' if it may be one."""
    try:
        with path.open("rb") as file:
            start, size = file.read(9), os.fstat(file.fileno()).st_size
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    # eight bytes of length, then so much JSON
    if start[8:] == b"{" and 8 + int.from_bytes(start[:8], "little") <= size:
        return ""
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return "it begins as a pickle or an archive does"
    return "it does not begin with a header" if start else "it is empty"


def _hub_id(specification: str) -> tuple[str, str | None]:
    match = _HUB_ID.match(specification)
    if match is None:
        raise InputError(
            f"checkpoint {specification!r}: neither a folder nor a hub id",
            hint=f"accepted: {_ACCEPTED}",
        )
    return match["repository"], match["revision"]


def _hub(specification: str) -> Any:
    try:
        # here and not above: only a checkpoint on a hub is worth the half second
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise InputError(
            f"checkpoint {specification}: {error.name} is needed to download it and is not installed here",
            hint=f"`{sys.executable} -m pip install {error.name}`, or download it yourself and name the folder",
        ) from error
    return huggingface_hub
