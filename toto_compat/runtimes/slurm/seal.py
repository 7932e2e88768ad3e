"""Tells a run that was submitted from here from one that was brought here.

What a run asks for is run on nodes: setup lines, packages, caches. A run from elsewhere can be looked at; nothing of it
is submitted, cancelled or stored. A key in the cache folder, which nobody else reads, makes the difference.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.files import cache_folder, checked, read_bytes, storage_errors
from toto_compat.evidence.makers import made_by_this_process
from toto_compat.runtimes.slurm.exchange import Exchange, Submission, Submitted, Task


def sealed(submitted: Submitted) -> Submitted:
    return submitted.model_copy(update={"seal": _seal_of(submitted)})


def is_own(submitted: Submitted) -> bool:
    return bool(submitted.seal) and hmac.compare_digest(submitted.seal, _seal_of(submitted))


def check_own(exchange: Exchange, submitted: Submitted) -> None:
    """Refuse to have anything done for a run that was not submitted with this cache folder, or was changed since."""
    if not is_own(submitted):
        raise SelectionError(
            f"{exchange.run}: was not submitted from here, so nothing of it is submitted or cancelled",
            hint=f"it has no seal of {cache_folder()}: set TOTO_COMPAT_CACHE as it was then, or run the matrix again",
        )


def own_task(exchange: Exchange, task: Submission) -> Task:
    """Read a task of a run that is sealed, as it was when that was done."""
    path = exchange.task(task.number)
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != task.content:
        raise StorageError(f"{path}: changed since it was written", hint="run the matrix again")
    return checked(path, Task, content)


def _seal_of(submitted: Submitted) -> str:
    """Hash what is asked for; which jobs came of it changes all the time."""
    changing = {"jobs": (), "refused": 0}
    asked = submitted.model_copy(
        update={
            "tasks": tuple(task.model_copy(update=changing) for task in submitted.tasks),
            "cancelled": False,
            "unanswered": None,
            "seal": "",
        }
    )
    return hmac.new(_key(), asked.model_dump_json().encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Read the key of this cache folder; of two processes that make one at once, both get the same."""
    path = cache_folder() / "slurm.key"
    with storage_errors(path, "made"):
        if not path.exists():
            handle, temporary = tempfile.mkstemp(prefix=f".slurm.key{made_by_this_process()}", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(secrets.token_bytes(32))
                with suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                Path(temporary).unlink()
    return read_bytes(path)
