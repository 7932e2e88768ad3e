"""The lock of a release that is added to the matrix: toto-ts's part as another environment has it, torch's own anew.

pip reads a wheel's metadata in pieces of ten kilobytes, a hundred requests for torch's; what the wheel needs is known
already, so pip is asked for that alone.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from toto_compat.contract.request import Environment
from toto_compat.environments.indexes import index_options
from toto_compat.environments.locks import (
    Lock,
    LockedPackage,
    asked_of,
    check_torch,
    lock_path,
    locked,
    make_lock,
    ordered,
    parse_lock,
    pips_words,
    size_of,
)
from toto_compat.environments.package_index import WheelFile
from toto_compat.environments.pythons import find_python
from toto_compat.environments.wheel_facts import WheelFacts
from toto_compat.errors import EnvironmentBuildError


def lock_release(
    name: str, environment: Environment, wheel: WheelFile, facts: WheelFacts, beside: Mapping[str, Environment]
) -> Lock:
    """Lock a new environment; where no other one has its Python and pins, all of it is resolved, which takes longer."""
    sibling = find_sibling(environment, beside)
    if sibling is None:
        return make_lock(name, environment)
    toto_layer = sibling.layer("toto")
    try:
        resolved = _resolve(environment, facts.requirements, toto_layer, name)
    except EnvironmentBuildError:
        # torch may ask for another version of what both layers need: then the layers have to be found together
        return make_lock(name, environment)
    kept = {package.name for package in toto_layer}
    new = [item for item in resolved if canonicalize_name(item["metadata"]["name"]) not in kept]
    with ThreadPoolExecutor(8) as pool:
        own = list(pool.map(lambda item: locked(item, set()), new))
    lock = Lock(name, environment.python, asked_of(environment), ordered([*toto_layer, _torch(wheel), *own]))
    check_torch(lock, environment)
    return lock


def find_sibling(environment: Environment, beside: Mapping[str, Environment]) -> Lock | None:
    """Find the lock of an environment that differs in its torch alone."""
    for name, other in beside.items():
        path = lock_path(name)
        try:
            lock = parse_lock(path.read_text(encoding="utf-8"), path)
        except (OSError, EnvironmentBuildError):
            continue
        if lock.asked == asked_of(other) and set(_but_torch(lock.asked)) == set(_but_torch(asked_of(environment))):
            return lock
    return None


def _but_torch(asked: Iterable[str]) -> list[str]:
    return [line for line in asked if not line.startswith(("torch==", "build "))]


def _torch(wheel: WheelFile) -> LockedPackage:
    if not wheel.sha256:
        raise EnvironmentBuildError(
            f"the package index gives no sha256 for {wheel.file}",
            hint="use an index that publishes hashes: a lock without them pins nothing",
        )
    return LockedPackage("torch", str(wheel.version), wheel.sha256, wheel.file, size_of(wheel.url), "torch")


def _resolve(
    environment: Environment, requirements: Sequence[str], constraints: Sequence[LockedPackage], name: str
) -> list[dict[str, Any]]:
    """Ask this program's pip what it would install into the environment's Python; nothing is installed anywhere."""
    if not requirements:
        return []
    interpreter = find_python(environment.python)
    with tempfile.TemporaryDirectory(prefix="toto-compat-lock-") as folder:
        report, pinned = Path(folder, "report.json"), Path(folder, "constraints.txt")
        pinned.write_text("".join(f"{one.name}=={one.version}\n" for one in constraints), encoding="utf-8")
        wanted = Path(folder, "requirements.txt")
        wanted.write_text("".join(f"{one}\n" for one in requirements), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "--python", interpreter.executable, "install", "--dry-run"]
        command += ["--ignore-installed", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "-q"]
        command += ["--use-feature=fast-deps", "--report", str(report), *index_options(environment)]
        command += ["-c", str(pinned), "-r", str(wanted)]
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=variables
        )
        if done.returncode != 0:
            raise EnvironmentBuildError(f"{name} cannot be locked:\n    {pips_words(done.stderr)}")
        installs: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return installs
