"""What was asked of `toto-compat matrix`. It travels beside what the stages hand to each other, not inside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Asked:
    """The command line."""

    selectors: tuple[str, ...] = ()
    profile: str = "quick"
    runtime: Literal["auto", "docker", "venv", "here"] = "auto"
    executor: str = "local"
    detach: bool = False
    device: str = "auto"
    jobs: int | None = None
    fresh: bool = False
    rebuild: bool = False
    run: str | None = None
    require: tuple[str, ...] = ()
    lower_only: bool = False
    architectures: tuple[str, ...] = ()  # in the place of the profile's
    dry_run: bool = False
    as_json: bool = False
    as_part: bool = False  # of something that says itself what came out: no table, no word on compile
    matrix_file: Path | None = None
    results: Path = Path("results")
    data: Path | None = None  # a CSV of the user's, or a folder with one per symbol
    column: str | None = None
    symbols: tuple[str, ...] = ()
    checkpoint: str | None = None  # in the place of the workload's
