"""The interpreter that runs this, as an environment: what is installed in it is what is tested."""

import hashlib
import platform
import sys
from importlib import metadata

from pydantic import ValidationError

from toto_compat.contract.installed_torch import torch_version
from toto_compat.contract.request import Environment
from toto_compat.errors import EnvironmentBuildError

_HINT = "install torch and toto-ts beside this command, or take --runtime venv"


def here_environment() -> tuple[str, Environment]:
    """Name and describe what is installed here; an error where it is no torch and toto-ts to test."""
    version = torch_version()
    if not version:
        raise EnvironmentBuildError(f"no torch is installed for {sys.executable}", hint=_HINT)
    toto_ts = _version("toto-ts")
    if toto_ts is None:
        raise EnvironmentBuildError(f"no toto-ts is installed for {sys.executable}", hint=_HINT)
    release, _, build = version.partition("+")
    try:
        environment = Environment(
            torch=release,
            build=build or "cpu",
            python=".".join(platform.python_version_tuple()[:2]),
            toto_ts=toto_ts,
            xformers=_version("xformers"),
        )
    except ValidationError as error:
        raise EnvironmentBuildError(f"torch {version} is no release that the matrix can name", hint=_HINT) from error
    return f"torch-{release}-{environment.build}", environment


def freeze() -> str:
    """List every distribution of this interpreter, as `pip freeze` would: it is the lock of this environment."""
    named = {(one.metadata["Name"] or "").lower().replace("_", "-"): one.version for one in metadata.distributions()}
    lines = [f"{name}=={version}" for name, version in sorted(named.items()) if name]
    return "\n".join([f"python=={platform.python_version()}", *lines]) + "\n"


def freeze_lock() -> str:
    return f"here:{hashlib.sha256(freeze().encode()).hexdigest()}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
