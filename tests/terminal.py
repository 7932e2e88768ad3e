"""What a command writes to a terminal: a real one, since many things are only written where somebody looks."""

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def seen_on_a_terminal(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder with a terminal of its own, and return all that it wrote there."""
    leader, follower = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120", **(variables or {})}
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    ):
        os.close(follower)
        written = b""
        while piece := _read(leader):
            written += piece
        os.close(leader)
    return written.decode(errors="replace")


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # the last of its writers is gone
        return b""
