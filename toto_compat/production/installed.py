"""What is installed beside this interpreter, found without importing torch."""

import functools
from importlib import metadata

from toto_compat.contract.installed_torch import torch_version
from toto_compat.contract.request import Device
from toto_compat.contract.source_hash import hash_contents, read_source
from toto_compat.verdict.verdict_file import Installed

__all__ = ["installed_for", "package_version", "source_hash", "torch_version"]


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def source_hash() -> str:
    """Return the identity of the code that would be bound, in the terms of a verdict."""
    return hash_contents(read_source())


def installed_for(device: Device, gpu: str | None, torch: str | None = None, toto_ts: str | None = None) -> Installed:
    """Say what a verdict must have been judged on to hold here."""
    return Installed(
        device=device,
        torch=torch or torch_version(),
        toto_ts=toto_ts or package_version("toto-ts") or "",
        xformers=package_version("xformers"),
        gpu=gpu if device is Device.CUDA else None,
        source_hash=source_hash(),
    )
