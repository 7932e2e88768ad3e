"""Finds the interpreter and the C++ compiler that an environment needs, or says how to get them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toto_compat.errors import EnvironmentBuildError

_PROBE = """
import importlib.util, json, os, sys, sysconfig
print(json.dumps({
    "executable": getattr(sys, "_base_executable", None) or sys.executable,
    "minor": "%d.%d" % sys.version_info[:2],
    "version": "%d.%d.%d" % sys.version_info[:3],
    "headers": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    "venv": importlib.util.find_spec("ensurepip") is not None and importlib.util.find_spec("venv") is not None,
}))
"""


@dataclass(frozen=True)
class Interpreter:
    executable: str
    version: str  # 3.13.1
    headers: bool  # Python.h: inductor compiles its CPU kernels against it
    venv: bool  # can make virtualenvs with pip in them

    @property
    def lacks(self) -> str:
        missing = [name for name, there in (("its headers (Python.h)", self.headers), ("venv", self.venv)) if not there]
        return " and ".join(missing)


def find_python(minor: str) -> Interpreter:
    """Find the first interpreter for '3.13' that can make virtualenvs and compile: this one, PATH, pyenv, uv."""
    incomplete: list[Interpreter] = []
    for candidate in candidate_pythons(minor):
        interpreter = probe_python(candidate, minor)
        if interpreter and not interpreter.lacks:
            return interpreter
        if interpreter:
            incomplete.append(interpreter)
    if incomplete:
        first = incomplete[0]
        raise EnvironmentBuildError(
            f"Python {minor} at {first.executable} lacks {first.lacks}",
            hint=f"`apt-get install python{minor}-dev python{minor}-venv`, or `uv python install {minor}`",
        )
    raise EnvironmentBuildError(f"Python {minor} is not on this machine", hint=how_to_get_python(minor))


def how_to_get_python(minor: str) -> str:
    return (
        f"`uv python install {minor}`, or `pyenv install {minor}`, or your system's python{minor} with its -dev package"
    )


def candidate_pythons(minor: str) -> Iterator[str]:
    """Yield interpreters worth asking, in order; lazily, since uv takes a moment."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == minor:
        yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = Path(folder or ".") / f"python{minor}"
        if path.is_file() and os.access(path, os.X_OK):
            yield str(path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    # the newest patch release first: 3.13.11 is after 3.13.9
    releases = [path for path in (pyenv / "versions").glob(f"{minor}.*") if path.name.split(".")[-1].isdigit()]
    for release in sorted(releases, key=lambda path: int(path.name.split(".")[-1]), reverse=True):
        yield str(release / "bin" / "python")
    if uv := shutil.which("uv"):
        printed = _output([uv, "python", "find", "--no-project", minor])
        if printed:
            yield printed.splitlines()[-1].strip()


def probe_python(executable: str, minor: str) -> Interpreter | None:
    """Ask the interpreter itself; None if it does not run or is another release (a pyenv shim without one, say)."""
    try:
        facts = json.loads(_output([executable, "-I", "-c", _PROBE]))
    except ValueError:
        return None
    if facts["minor"] != minor:
        return None
    return Interpreter(facts["executable"], facts["version"], facts["headers"], facts["venv"])


def find_compiler() -> str:
    """Find the C++ compiler that inductor will be told to use: $CXX, g++ or clang++."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        compiler = shutil.which(name) if name else None
        if compiler:
            return compiler
    raise EnvironmentBuildError(
        "no C++ compiler: inductor compiles its kernels with g++ or clang++, so no cell can be run",
        hint="`apt-get install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora, RHEL), or set CXX to a compiler",
    )


def compiler_version(compiler: str) -> str:
    return (_output([compiler, "--version"]).splitlines() or [""])[0]


def _output(command: list[str]) -> str:
    """Return what a quick command prints; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
