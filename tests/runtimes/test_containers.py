"""However a cell's container ends, that is told and nothing of it stays: with real containers."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

from tests.environments.small_project import REPOSITORY
from tests.runtimes.containers import job_of, own_containers, run
from toto_compat.environments.engine import open_client
from toto_compat.environments.leftovers import remove_leftovers
from toto_compat.runtimes.cell_process import LOG_FILE
from toto_compat.runtimes.container_end import ContainerEnd
from toto_compat.runtimes.containers import Containers

pytestmark = pytest.mark.docker


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something another process does; fails the test if it never comes."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.05)


def test_output_is_live_logged_and_kept(client: docker.DockerClient, image: str, cell: Path) -> None:
    end, lines = run(
        client, job_of(image, cell, "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(3)")
    )
    assert end.process.code == 3
    assert {"to stdout", "to stderr"} <= set(lines)
    assert "to stderr" in (cell / LOG_FILE).read_text()
    assert own_containers(client) == []


def test_a_timeout_kills_and_keeps_the_log(client: docker.DockerClient, image: str, cell: Path) -> None:
    script = "import signal; print('before the hang', flush=True); signal.pause()"
    end, _ = run(client, job_of(image, cell, script, timeout=5.0))
    assert end.process.timed_out
    assert not end.lost
    assert "before the hang" in (cell / LOG_FILE).read_text()
    assert own_containers(client) == []


def test_a_timeout_needs_none_of_the_connection(
    client: docker.DockerClient, image: str, cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over ssh, where a request waits for ever."""
    monkeypatch.setattr(Container, "wait", lambda self, **_: self.client.api.wait(self.id))
    end, _ = run(client, job_of(image, cell, "import signal; signal.pause()", timeout=2.0))
    assert end.process.timed_out


EAT = "x = bytearray(1)\nwhile True: x += bytes(2**20)\n"


def test_out_of_memory_is_told_apart_from_a_crash(client: docker.DockerClient, image: str, cell: Path) -> None:
    end, _ = run(client, job_of(image, cell, EAT))
    assert end.out_of_memory
    assert end.process.over_memory
    crash, _ = run(client, job_of(image, cell, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert crash.process.code == 137
    assert not crash.out_of_memory


def test_a_child_killed_for_memory_is_noticed_although_the_cell_goes_on(
    client: docker.DockerClient, image: str, cell: Path
) -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {EAT!r}]); print('went on')"
    end, lines = run(client, job_of(image, cell, script))
    assert "went on" in lines
    assert end.process.code == 0
    assert end.out_of_memory


def test_stop_ends_what_runs_and_lets_nothing_start(client: docker.DockerClient, image: str, cell: Path) -> None:
    containers = Containers(client)
    started = threading.Event()
    ends: list[ContainerEnd] = []
    script = "import signal; print('running', flush=True); signal.pause()"
    job = job_of(image, cell, script)
    thread = threading.Thread(target=lambda: ends.append(containers.run(job, lambda _: started.set())))
    thread.start()
    assert started.wait(60)
    containers.stop()
    thread.join(60)
    assert ends[0].process.stopped
    assert containers.run(job, lambda _: None).process.stopped
    assert own_containers(client) == []


def test_a_stop_just_before_the_start_ends_the_container(
    client: docker.DockerClient, image: str, cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    containers = Containers(client)
    start = Container.start

    def start_late(container: Container) -> None:
        containers.stop()
        start(container)

    monkeypatch.setattr(Container, "start", start_late)
    end = containers.run(job_of(image, cell, "import signal; signal.pause()"), lambda _: None)
    assert end.process.stopped
    assert own_containers(client) == []


def test_a_container_killed_from_outside_is_an_end_like_any_other(
    client: docker.DockerClient, image: str, cell: Path
) -> None:
    def kill_it(_: str) -> None:
        client.containers.get(own_containers(client)[0]).kill()

    job = job_of(image, cell, "import signal; print('running', flush=True); signal.pause()")
    end = Containers(client).run(job, kill_it)
    assert end.process.code == 137
    assert not end.out_of_memory
    assert not end.process.timed_out
    assert own_containers(client) == []


def test_a_container_ends_with_its_runner_even_if_that_is_killed(
    client: docker.DockerClient, image: str, cell: Path
) -> None:
    job = job_of(image, cell, "import signal; print('running', flush=True); signal.pause()")
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.runtimes.containers import job_of\n"
        "from toto_compat.environments.engine import open_client\n"
        "from toto_compat.runtimes.containers import Containers\n"
        "job = job_of(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[2], 'script.py').read_text(), timeout=600.0)\n"
        "Containers(open_client()).run(job, lambda line: print(line, flush=True))\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program, image, str(job.folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert runner.stdout is not None
    assert runner.stdout.readline() == "running\n"

    def of_runner() -> list[str]:
        listed = client.containers.list(all=True, filters={"label": "toto-compat.runner"}, ignore_removed=True)
        mine = [one for one in listed if f":{runner.pid}:" in one.labels["toto-compat.runner"]]
        return [str(one.status) for one in mine]

    assert of_runner() == ["running"]
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    until(lambda: of_runner() == ["exited"])  # the supervisor inside noticed that its runner is gone
    assert any("toto-compat-" in left for left in remove_leftovers(client))
    assert of_runner() == []


def test_an_engine_that_goes_away_is_told_as_that(
    client: docker.DockerClient, image: str, cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CuttableSocket(Path("/var/run/docker.sock"), tmp_path / "cut.sock") as cuttable:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{cuttable.path}")
        through = open_client(timeout=20)
        job = job_of(image, cell, "import signal; print('running', flush=True); signal.pause()")
        end = Containers(through).run(job, lambda _: cuttable.cut())
    assert "went away" in end.lost
    assert "running" in (cell / LOG_FILE).read_text()
    until(lambda: all(client.containers.get(name).status == "exited" for name in own_containers(client)))
    for name in own_containers(client):
        client.containers.get(name).remove(force=True)


def test_a_connection_that_breaks_while_waiting_is_no_end(
    client: docker.DockerClient, image: str, cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CuttableSocket(Path("/var/run/docker.sock"), tmp_path / "cut.sock") as cuttable:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{cuttable.path}")
        script = (
            "import pathlib, sys, time\nprint('running', flush=True)\n"
            "while not pathlib.Path('go').exists(): time.sleep(0.05)\nsys.exit(7)\n"
        )

        def break_once(_: str) -> None:
            until(lambda: cuttable.connections(b"/wait"))
            cuttable.drop(cuttable.connections(b"/wait"))
            until(lambda: len(cuttable.connections(b"/wait")) == 2)
            (cell / "go").touch()

        end = Containers(open_client(timeout=20)).run(job_of(image, cell, script), break_once)
    assert end.process.code == 7
    assert not end.process.timed_out
    assert not end.lost
    assert own_containers(client) == []


def test_a_cell_that_ends_because_all_connections_broke_is_not_blamed_for_it(
    client: docker.DockerClient, image: str, cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CuttableSocket(Path("/var/run/docker.sock"), tmp_path / "cut.sock") as cuttable:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{cuttable.path}")

        def break_all(_: str) -> None:
            until(lambda: cuttable.connections(b"/wait"))
            cuttable.drop(cuttable.connections(b""))

        job = job_of(image, cell, "import signal; print('running', flush=True); signal.pause()")
        end = Containers(open_client(timeout=20)).run(job, break_all)
    assert "the connection to the engine broke" in end.lost
    assert not end.process.timed_out
    assert own_containers(client) == []


class CuttableSocket:
    """Stands before the engine's socket and can be cut: the engine is gone, as far as its client can tell."""

    def __init__(self, engine: Path, path: Path) -> None:
        self._engine, self.path = engine, path
        self._sockets: list[socket.socket] = []
        self._passed: list[tuple[bytes, socket.socket]] = []  # what came through, with the side it came from
        self._listening = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> "CuttableSocket":
        self._listening.bind(str(self.path))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        self.path.unlink(missing_ok=True)
        for one in [self._listening, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def connections(self, words: bytes) -> list[socket.socket]:
        """Those with these words in a request that came through."""
        return [side for data, side in self._passed if words in data.split(b"\r\n")[0]]

    @staticmethod
    def drop(connections: list[socket.socket]) -> None:
        for one in connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self._engine))
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._passed.append((data, source))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
