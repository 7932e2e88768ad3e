"""Do the pins of an incident exist? pip is asked, with the user's own settings, before anything is downloaded."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

from toto_compat.contract.request import Environment
from toto_compat.environments.indexes import index_options
from toto_compat.environments.requirements import FORK, requirements_of
from toto_compat.errors import EnvironmentBuildError, InputError
from toto_compat.matrix.document import KeyPath, describe_mistakes, read_document
from toto_compat.repro.incident import INCIDENT_HINT
from toto_compat.repro.pins import Pins

_NOT_FOUND = re.compile(r"No matching distribution found for (?P<name>[A-Za-z0-9._-]+)(?P<version>[=<>!~][^\s;(]*)?")
_VERSIONS = re.compile(r"\(from versions: (?P<versions>[^)]*)\)")
_PATIENCE_SECONDS = 600


def check_pins_exist(path: Path, pins: Pins, environment: Environment) -> None:
    """Ask pip for a wheel of every pin; InputError names the line and key of the first that there is none of."""
    wanted = requirements_of(environment)
    bare = [one for one in wanted.without_dependencies if not one.startswith(FORK)]
    with tempfile.TemporaryDirectory(prefix="toto-compat-pins-") as folder:
        # wheels alone: pip tells of another Python's packages only so, and a lock holds nothing else
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--no-input"]
        command += ["-q", "--disable-pip-version-check", "--only-binary=:all:", "--target", folder]
        command += ["--python-version", environment.python, *index_options(environment)]
        command += [wanted.torch, *wanted.others, *bare]
        try:
            asked = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=_PATIENCE_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise EnvironmentBuildError(
                "pip got no answer from the package index within ten minutes", hint="check pip's index settings"
            ) from error
    if asked.returncode == 0:
        return
    missing = _NOT_FOUND.search(asked.stderr)
    if missing is None:
        said = [line for line in asked.stderr.splitlines() if line.startswith("ERROR")] or ["pip said nothing"]
        raise EnvironmentBuildError(
            f"pip cannot say whether the pins of {path} exist: {' '.join(said[-2:])}",
            hint="check pip's index settings, and that the incident's Python release exists",
        )
    versions = _VERSIONS.search(asked.stderr)
    known = [one.strip() for one in (versions["versions"] if versions else "").split(",") if one.strip() != "none"]
    found = f"{missing['name']}{missing['version'] or ''}, of which the package index has no wheel"
    accepted = f"a release that it has for Python {environment.python}"
    if known:
        accepted += f": {', '.join(known[-5:])}"
    mistake = read_document(path).mistake(key_of_pin(pins, missing["name"]), found, accepted)
    raise InputError(describe_mistakes(path, [mistake]), hint=INCIDENT_HINT)


def key_of_pin(pins: Pins, package: str) -> KeyPath:
    """Say where in the incident a package is pinned."""
    name = canonicalize_name(package)
    for written in pins.packages:
        if canonicalize_name(written) == name:
            return ("pins", "packages", written)
    key = {"torch": "torch", "toto-ts": "toto_ts", "xformers": "xformers"}.get(name)
    if key is not None and getattr(pins, key) is not None:
        return ("pins", key)
    if pins.freeze is not None or pins.frozen:
        return ("pins", "freeze" if pins.freeze is not None else "frozen")
    return ("pins",)
