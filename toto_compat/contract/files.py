"""Writing a file whole or not at all, and the one way in which times are written."""

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path


def utc_now() -> str:
    """The time as it is stored: ISO 8601, UTC, whole seconds, with a Z."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename: a reader sees the old file or the whole new one, also when the disk is full."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
