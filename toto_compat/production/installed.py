"""What is installed beside this interpreter, found without importing torch."""

import functools
import importlib.util
import re
from importlib import metadata
from pathlib import Path

from toto_compat.contract.request import Device
from toto_compat.contract.source_hash import hash_contents, read_source
from toto_compat.verdict.verdict_file import Installed

_VERSION = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def torch_version() -> str:
    """Return the version as torch itself names it, with the build that pip may not know: 2.9.0+cu128; '' if none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        found = _VERSION.search((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        found = None
    return found[1] if found else package_version("torch") or ""


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
