"""Weights from a local folder or a hub, brought to the host before any cell runs: cells have no network."""

import re
import sys
from pathlib import Path
from typing import Any

from toto_compat.errors import InputError

_FILES = ["config.json", "model.safetensors"]
_HUB_ID = re.compile(r"^(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?$")


def find_checkpoint(specification: str, *, relative_to: Path) -> Path | None:
    """The checkpoint's folder if it is on this machine already; nothing is downloaded. A wrong name is an error."""
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
    folder = (relative_to / specification).expanduser()
    if not folder.is_dir():
        return None
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise InputError(f"checkpoint {folder}: no {' and no '.join(missing)}", hint="toto-ts saves both files")
    return folder.resolve()


def _hub_id(specification: str) -> tuple[str, str | None]:
    match = _HUB_ID.match(specification)
    if match is None:
        raise InputError(
            f"checkpoint {specification!r}: neither a folder nor a hub id",
            hint="accepted: a folder with config.json and model.safetensors, or organisation/name@revision",
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
