"""Where pip gets packages from: the environment's own index where it answers, and the user's settings."""

import configparser
import http.client
import io
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from toto_compat.contract.request import Environment
from toto_compat.errors import EnvironmentBuildError

_PATIENCE_SECONDS = 3.0
_ON = frozenset({"1", "true", "t", "yes", "y", "on"})  # as pip reads a switch


def no_index_is_asked() -> bool:
    """Tell if pip takes what it finds in folders alone."""
    return os.environ.get("PIP_NO_INDEX", "").strip().lower() in _ON


def index_answers(index: str, patience: float = _PATIENCE_SECONDS) -> bool:
    """Tell if a pip index can be reached quickly; any trouble is a no, and so is pip being told to ask none."""
    if no_index_is_asked():
        return False
    if not index.startswith(("https://", "http://")):
        return index.startswith("file://")
    try:
        request = urllib.request.Request(index.rstrip("/") + "/torch/", method="HEAD")  # noqa: S310 - http(s), see above
        with urllib.request.urlopen(request, timeout=patience):  # noqa: S310
            return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def index_options(environment: Environment) -> list[str]:
    """Name the environment's own index to pip, unless it does not answer: pip would wait for it once per package."""
    if environment.index and index_answers(environment.index):
        return ["--extra-index-url", environment.index]
    return []


def pip_settings(index: str | None = None) -> tuple[str, bytes]:
    """Make a pip.conf for a build from the user's index settings and the environment's `index`, with the certificates.

    Folders of this machine are left out: a build does not see them. So is an `index` that does not answer, for which
    pip would wait once per package.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    if index and index_answers(index):
        settings["extra-index-url"] = f"{settings.get('extra-index-url', '')} {index}"
    kept: dict[str, str] = {}
    for key in ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout", "retries"):
        words = [word for word in settings.get(key, "").split() if not word.startswith("file:")]
        if words:
            kept[key] = " ".join(words)
    certificates = b""
    if settings.get("cert"):
        try:
            certificates = Path(settings["cert"]).read_bytes()
        except OSError as error:
            raise EnvironmentBuildError(
                f"pip's certificate bundle {settings['cert']} cannot be read: {error.strerror}",
                hint="correct `pip config get global.cert` or PIP_CERT",
            ) from error
        kept["cert"] = "/build/pip/ca.crt"
    parser = configparser.ConfigParser(interpolation=None)
    parser["global"] = kept
    text = io.StringIO()
    parser.write(text)
    return text.getvalue(), certificates
