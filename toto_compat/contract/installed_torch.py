"""The version of the torch that is installed, without importing it."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

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
    return found[1] if found else _by_pip()


def _by_pip() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
