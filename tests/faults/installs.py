"""A package index that goes away in the middle of an install, and a builder that is killed there."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from tests.environments.test_virtualenv import ENVIRONMENT, NAME, add_torch, add_wheel
from tests.faults.outcome import Campaign, Outcome
from tests.faults.trial import ROOT, Damage, Ended, processes_of, promises
from toto_compat.environments.requirements import requirements_of
from toto_compat.environments.virtualenv import read_built, venv_folder

ENVIRONMENT_ERROR = 5
BUILD = """
import sys
from tests.environments.test_virtualenv import ENVIRONMENT, NAME
from toto_compat import cli
from toto_compat.environments.virtualenv import build_venv
cli.cli.get_command = lambda *_: None
setattr(cli, "cli", lambda **_: build_venv(NAME, ENVIRONMENT, print) and 0)
cli.main()
"""


class Index(http.server.ThreadingHTTPServer):
    """A package index on the loopback that breaks off in the middle of one file, and is gone from then on."""

    daemon_threads = True
    breaks_at = ""  # a part of the path
    asked: threading.Event

    def __init__(self, wheels: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.wheels, self.asked, self.gone = wheels, threading.Event(), False
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def page(self, name: str) -> bytes:
        wanted = name.replace("-", "_").lower()
        files = [path for path in self.wheels.iterdir() if path.name.lower().startswith(f"{wanted}-")]
        return "".join(f'<a href="/files/{path.name}">{path.name}</a>\n' for path in files).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.server.gone:
            self._break_off()
            return
        folder, _, name = unquote(self.path).strip("/").partition("/")
        content = self.server.page(name) if folder == "simple" else (self.server.wheels / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if folder == "simple" else "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.breaks_at and self.server.breaks_at in self.path:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.gone = True
            self.server.asked.set()
            self._break_off()
            return
        self.wfile.write(content)

    def _break_off(self) -> None:
        """End the connection for good: closing it here leaves it open as long as a file of it is."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Say nothing: pip's own log tells what it asked for."""


def index_goes_away(campaign: Campaign) -> Iterator[Outcome]:
    """Break off at torch's own wheel, at a page, at a small wheel: the build fails by name and leaves nothing."""
    for place in ("files/torch-", "simple/gluonts", "files/toto_ts-")[: max(1, campaign.moments // 3)]:
        with _project(campaign) as (folder, index):
            index.breaks_at = place
            ended = _build(folder, index)
            broken = promises(ended, ENVIRONMENT_ERROR)
            left = _half_built(folder)
            index.breaks_at, index.gone = "", False
            broken += promises(_build(folder, index), 0) + _not_built(folder)
            damage = Damage(left=(*left, *_half_built(folder), *processes_of(folder)), broken=tuple(broken))
            yield Outcome(place, f"exit code {ended.code}, nothing half-built, built when the index is back", damage)


def builder_killed(campaign: Campaign) -> Iterator[Outcome]:
    """Kill the builder in the middle of a download: the next one removes what it left and builds."""
    with _project(campaign) as (folder, index):
        index.breaks_at = "files/torch-"
        process = _start(folder, index)
        index.asked.wait(120)
        process.kill()
        process.wait()
        index.breaks_at, index.gone = "", False
        broken = promises(_build(folder, index), 0) + _not_built(folder)
        damage = Damage(left=(*_half_built(folder), *processes_of(folder)), broken=tuple(broken))
        yield Outcome("while torch is fetched", "killed, the next one built it", damage)


@contextmanager
def _project(campaign: Campaign) -> Iterator[tuple[Path, Index]]:
    with campaign.trial() as trial:
        wheels = trial.folder / "wheels"
        wheels.mkdir()
        add_torch(wheels, "2.13.0+cpu")
        toto = {f"toto/{path}.py": "" for path in ("__init__", "model/__init__", "model/toto", "inference/__init__")}
        add_wheel(wheels, "toto-ts", "0.2.0", toto | {"toto/inference/forecaster.py": ""})
        for requirement in requirements_of(ENVIRONMENT).others:
            name, _, version = requirement.replace("<", "==").replace(">=", "==").partition("==")
            module = {"numpy/__init__.py": ""} if name == "numpy" else {}
            add_wheel(wheels, name, version.strip("=") or "1.0", module)
        index = Index(wheels)
        try:
            yield trial.folder, index
        finally:
            index.shutdown()
            index.server_close()


def _start(folder: Path, index: Index) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "FAULT_"))}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "1", "PIP_TIMEOUT": "5"}
    pip["PIP_INDEX_URL"] = f"http://127.0.0.1:{index.server_address[1]}/simple"
    own = {"PYTHONPATH": str(ROOT), "TOTO_COMPAT_CACHE": str(folder / "c")}
    return subprocess.Popen(
        [sys.executable, "-c", BUILD],
        cwd=ROOT,
        env={**kept, **pip, **own},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _build(folder: Path, index: Index) -> Ended:
    process = _start(folder, index)
    said, _ = process.communicate()
    return Ended(process.returncode, said)


def _half_built(folder: Path) -> list[str]:
    return [path.name for path in (folder / "c" / "venvs").glob(".building-*")]


def _not_built(folder: Path) -> list[str]:
    built = read_built(venv_folder(NAME, ENVIRONMENT, folder / "c"))
    return [] if built is not None else ["the virtualenv is not there afterwards"]
