"""A file that is new, and there whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toto_compat.errors import StorageError

_ANOTHER = "name another file with -o"


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give a file beside the target to be filled; if all goes well it becomes the target, which must not exist."""
    try:
        if target.exists():
            raise StorageError(f"{target} exists and is not overwritten", hint=_ANOTHER)
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:80]}-", dir=target.parent)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}", hint=_ANOTHER) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        # a link and not a rename: it fails where somebody made the file meanwhile
        os.link(temporary, target)
    except FileExistsError:
        raise StorageError(f"{target} exists and is not overwritten", hint=_ANOTHER) from None
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror or error}", hint=_ANOTHER) from error
    finally:
        temporary.unlink(missing_ok=True)
