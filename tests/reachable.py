"""Folders of pytest's made reachable for another user."""

from pathlib import Path


def let_everybody_in(tmp_path: Path) -> None:
    """Open a test's folder and pytest's own above it; without workers the next one up is the whole machine's."""
    of_pytest = (one for one in tmp_path.parents[:3] if one.name.startswith(("pytest-", "popen-")))
    for folder in (tmp_path, *of_pytest):
        folder.chmod(0o755)
