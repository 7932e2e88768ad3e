"""A user's fork of toto-ts as a wheel: built once for what is in it, and kept in the cache folder."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from toto_compat.contract.request import Environment
from toto_compat.environments.build_lock import OnLine
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import cache_folder
from toto_compat.matrix.toto_source import TotoSource, source_files, toto_source

_LONG_AGO = "315532800"  # 1980, the oldest time in a wheel: two builds of one source are the same file
_LAST_LINES = 8


def fork_wheel(environment: Environment, say: OnLine) -> Path | None:
    """Return the wheel of an environment's fork, built if it is not there; None where it has a release."""
    fork = toto_source(environment.toto_ts)
    if fork is None:
        return None
    shelf = cache_folder() / "forks" / re.sub(r"\W+", "-", fork.identity)
    found = sorted(shelf.glob("*.whl"))
    if found:
        os.utime(shelf)
        return found[0]
    say(f"toto-ts: making a wheel of {fork.shown}, {fork.identity[:24]}...")
    shelf.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=shelf.parent) as scratch:
        built = Path(scratch, "built")
        built.mkdir()
        _make_wheel(fork, Path(scratch, "source"), built)
        wheels = [path for path in built.glob("*.whl") if path.name.startswith("toto_ts-")]
        if len(wheels) != 1:
            names = ", ".join(path.name for path in built.glob("*.whl")) or "nothing"
            raise EnvironmentBuildError(
                f"toto_ts {fork.shown}: is no toto-ts: it gives {names}", hint="name a fork of toto-ts in matrix.yaml"
            )
        if fork.kind == "checkout" and TotoSource("checkout", str(Path(scratch, "source"))).identity != fork.identity:
            raise EnvironmentBuildError(f"toto_ts {fork.shown}: was changed while it was read", hint="run it again")
        try:
            built.rename(shelf)
        except OSError:  # another builder was faster
            if not list(shelf.glob("*.whl")):
                raise
    return sorted(shelf.glob("*.whl"))[0]


def _make_wheel(fork: TotoSource, source: Path, built: Path) -> None:
    if fork.kind == "wheel":
        shutil.copyfile(fork.place, built / Path(fork.place).name)
        return
    if fork.kind == "git":
        _clone(fork, source)
    else:
        for name, path in source_files(Path(fork.place)).items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, source / name)
    # of a copy: a build writes into its source
    with tempfile.TemporaryDirectory(prefix="toto-compat-fork-") as scratch:
        copy = Path(scratch, "source")
        shutil.copytree(source, copy)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-input",
            "--no-cache-dir",
            "-q",
            "-w",
            str(built),
        ]
        _run([*pip, str(copy)], fork, "no wheel can be made of it")


def _clone(fork: TotoSource, target: Path) -> None:
    missing = "the repository or the commit cannot be fetched"
    _run(["git", "clone", "--quiet", "--no-checkout", "--", fork.place, str(target)], fork, missing)
    _run(["git", "-C", str(target), "checkout", "--quiet", "--detach", fork.commit], fork, missing)


def _run(command: list[str], fork: TotoSource, trouble: str) -> None:
    variables = os.environ | {"SOURCE_DATE_EPOCH": _LONG_AGO, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=variables
        )
    except OSError as error:
        raise EnvironmentBuildError(
            f"toto_ts {fork.shown}: {command[0]}: {error.strerror}", hint=f"install {Path(command[0]).name}"
        ) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise EnvironmentBuildError(
            f"toto_ts {fork.shown}: {trouble}:\n    " + "\n    ".join(lines[-_LAST_LINES:]),
            hint="check toto_ts of the environment in matrix.yaml",
        )
