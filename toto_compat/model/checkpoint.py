"""Weights from a local folder or a hub, brought to the host before any cell runs: cells have no network."""

import re
from dataclasses import dataclass
from pathlib import Path

from toto_compat.errors import InputError

_FILES = ("config.json", "model.safetensors")
_HUB_ID = re.compile(r"^(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")


@dataclass(frozen=True)
class ResolvedCheckpoint:
    folder: Path
    revision: str  # a commit of the hub repository, or 'local'


def resolve_checkpoint(specification: str, *, relative_to: Path) -> ResolvedCheckpoint:
    """A folder as it is; a hub id as the folder its pinned revision was downloaded to."""
    folder = (relative_to / specification).expanduser()
    if folder.is_dir():
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise InputError(f"checkpoint {folder}: no {' and no '.join(missing)}", hint="toto-ts saves both files")
        return ResolvedCheckpoint(folder=folder.resolve(), revision="local")
    match = _HUB_ID.match(specification)
    if match is None:
        raise InputError(
            f"checkpoint {specification!r}: neither a folder nor a hub id",
            hint="accepted: a folder with config.json and model.safetensors, or organisation/name@revision",
        )
    return _download(match["repository"], match["revision"])


def _download(repository: str, revision: str | None) -> ResolvedCheckpoint:
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().model_info(repository, revision=revision).sha
        assert commit is not None
        folder = snapshot_download(repository, revision=commit, allow_patterns=list(_FILES))
    except Exception as error:  # the hub client raises its own, requests' and OS errors alike
        raise InputError(
            f"checkpoint {repository}@{revision or 'main'}: cannot be fetched: {type(error).__name__}: {error}",
            hint="check the id and the network, or give a local folder with config.json and model.safetensors",
        ) from error
    return ResolvedCheckpoint(folder=Path(folder), revision=commit)
