"""Running a command in a hardened container: followed to its end, and nothing of it stays behind."""

import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.models.containers import Container
from docker.types import Mount

from toto_compat.environments.engine import engine_lost, is_lost
from toto_compat.environments.leftovers import remove_container
from toto_compat.errors import EngineError, EnvironmentBuildError
from toto_compat.runtimes.cell_log import LAST_LINES, LONGEST_LOG, LONGEST_PIECE, copy_to_log
from toto_compat.runtimes.cell_process import ProcessEnd
from toto_compat.runtimes.container_end import ContainerEnd
from toto_compat.runtimes.container_files import copy_out, prepared_files
from toto_compat.runtimes.container_options import PYTHON, SUPERVISOR, ContainerJob, container_options
from toto_compat.runtimes.gpu_refusals import advice_on_refusal
from toto_compat.runtimes.seam import OnLine

_UNLIMITED = 2**62  # the supervisor's own memory limit: in a container the kernel's limit decides
_KILL_PATIENCE_SECONDS = 20.0
_BROKEN_PAUSE_SECONDS = 1.0
_LOG_ATTEMPTS = 10


class Containers:
    """The containers that run now, so that all of them can be stopped from another thread."""

    def __init__(self, client: docker.DockerClient) -> None:
        self.client = client
        self._guard = threading.Lock()
        self._running: dict[str, Container] = {}
        self._stopping = False

    def run(self, job: ContainerJob, on_line: OnLine) -> ContainerEnd:
        """Run to the end, the timeout or stop(); the container is gone afterwards, the log is in the folder."""
        try:
            with prepared_files(self.client, job) as mounts:
                return self._run(job, mounts, on_line)
        except docker.errors.APIError as error:
            raise blame_refusal(error, job) from error
        except requests.exceptions.RequestException as error:
            if not is_lost(error):
                raise EngineError(f"the engine does not answer: {error}", hint="look at the engine's log") from error
            return ContainerEnd(ProcessEnd(code=-1), lost=engine_lost(error).message)

    def _run(self, job: ContainerJob, mounts: Sequence[Mount], on_line: OnLine) -> ContainerEnd:
        container = self._create(job, mounts)
        stdin: socket.SocketIO | None = None
        try:
            with self._guard:
                if self._stopping:
                    return ContainerEnd(ProcessEnd(code=128 + signal.SIGINT, stopped=True))
                self._running[str(container.id)] = container
            # The supervisor inside ends everything when this connection closes: with it the container ends at once if
            # the runner is killed, whatever kills it.
            stdin = self.client.api.attach_socket(str(container.id), params={"stdin": 1, "stream": 1})
            container.start()
            with self._guard:
                stopping = self._stopping
            if stopping:
                _kill(container)  # stop() came before there was anything to kill
            return self._follow(container, job, on_line)
        finally:
            if stdin is not None:
                stdin.close()
            with self._guard:
                self._running.pop(str(container.id), None)
            remove_container(container)

    def _create(self, job: ContainerJob, mounts: Sequence[Mount]) -> Container:
        options = container_options(job, mounts)
        create, host = _split_options(options)
        # through the low-level API: only there stdin can be closed by the engine when the connection ends
        config = self.client.api.create_host_config(**host)
        command = [PYTHON, "-I", "-S", SUPERVISOR, str(_UNLIMITED), *job.command]
        made = self.client.api.create_container(
            command=command, stdin_open=True, detach=False, host_config=config, **create
        )
        return self.client.containers.get(made["Id"])

    def _follow(self, container: Container, job: ContainerJob, on_line: OnLine) -> ContainerEnd:
        last: deque[str] = deque(maxlen=LAST_LINES)
        reader = threading.Thread(target=_copy_lines, args=(container, job.log_file, last, on_line), daemon=True)
        reader.start()
        timeout = _Timeout(container, job.timeout)
        try:
            broken = self._wait(container, timeout)
        except docker.errors.NotFound:
            raise  # somebody removed it
        except requests.exceptions.RequestException as error:
            return ContainerEnd(ProcessEnd(code=-1, last_lines=tuple(last)), lost=engine_lost(error).message)
        finally:
            timeout.cancel()
        reader.join(_KILL_PATIENCE_SECONDS)
        container.reload()
        state = container.attrs["State"]
        with self._guard:
            stopping = self._stopping
        if job.copy:
            copy_out(container, job)
        code = int(state.get("ExitCode") or 0)
        stopped = stopping and code != 0 and not timeout.passed
        ended_by_supervisor = code == 128 + signal.SIGTERM and not stopped and not timeout.passed
        out_of_memory = bool(state.get("OOMKilled"))
        return ContainerEnd(
            ProcessEnd(
                code=code,
                timed_out=timeout.passed,
                stopped=stopped,
                over_memory=out_of_memory,
                last_lines=tuple(line for line in last if not line.startswith("::")),
            ),
            out_of_memory=out_of_memory,
            lost="the connection to the engine broke, which ended the cell" if broken and ended_by_supervisor else "",
        )

    def _wait(self, container: Container, timeout: "_Timeout") -> bool:
        """Wait for the end, and tell if the connection broke on the way: that is no end, the engine is asked again."""
        broken = False
        deadline = time.monotonic() + timeout.seconds + _KILL_PATIENCE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                container.wait(timeout=left)  # returns at once if it has ended
                break
            except requests.exceptions.RequestException as error:
                if isinstance(error, docker.errors.NotFound) or not _answers(self.client):
                    raise
            broken = broken or not timeout.passed
            time.sleep(_BROKEN_PAUSE_SECONDS)
        return broken

    def stop(self) -> None:
        """End every running container and let no other start."""
        with self._guard:
            self._stopping = True
            running = list(self._running.values())
        for container in running:
            _kill(container)


class _Timeout:
    """Kills a container when its time is over. With a clock of its own: over ssh the SDK's requests never time out."""

    def __init__(self, container: Container, seconds: float) -> None:
        self.seconds = seconds
        self.passed = False
        self._container = container
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self.passed = True
        _kill(self._container)

    def cancel(self) -> None:
        self._timer.cancel()


def _split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part the options: the SDK wants some of them on the container and the rest on its host configuration."""
    create_names = ("image", "user", "working_dir", "environment", "labels", "name")
    create = {name: value for name, value in options.items() if name in create_names}
    host = {name: value for name, value in options.items() if name not in create_names and value is not None}
    return create, host


def blame_refusal(error: docker.errors.APIError, job: ContainerJob) -> EnvironmentBuildError:
    """Say why the engine, which answers, refuses a container, and which option to relax. The next may be accepted."""
    text = str(error.explanation or error)
    hint = "`toto-compat doctor` shows what the engine can do"
    if job.gpu is not None and (advice := advice_on_refusal(text)):
        hint = advice
    elif "cpus" in text.lower() or "cpuset" in text.lower():
        hint = f"the engine has fewer than {job.limits.cpus} processors: lower limits.cpus in matrix.yaml"
    elif "memory" in text.lower():
        hint = f"the engine refuses a limit of {job.limits.memory}: change limits.memory in matrix.yaml"
    elif "pids" in text.lower():
        hint = "the engine cannot limit processes: its kernel lacks the pids control group"
    elif "bind source path does not exist" in text:
        hint = "the engine does not see this machine's files: set TOTO_COMPAT_DOCKER_FILES=copy"
    # runc wraps what NVIDIA's hook said in several layers, the reason comes last
    told = text.strip() if len(text) < 400 else f"{text[:120]} ... {text.strip()[-260:]}"
    return EnvironmentBuildError(f"the engine refuses a container of {job.image}: {told}", hint=hint)


def _copy_lines(container: Container, log: Path, last: deque[str], on_line: OnLine) -> None:
    """Copy the container's output, live: to the log, to the display, into the last lines. Ends with the container."""
    try:
        copy_to_log(_lines(container), log, last, on_line)
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        last.append(f"the output ends here: {error}")
    except OSError as error:
        last.append(f"{log}: {error.strerror or error}")


def _lines(container: Container) -> Iterator[str]:
    rest = b""
    for chunk in _output(container):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_PIECE:
            whole.append(rest)
            rest = b""
        for line in whole:
            yield line.decode("utf-8", errors="replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", errors="replace")


def _output(container: Container) -> Iterator[bytes]:
    """Give what a container prints until it has ended. A stream that breaks off is asked for again, from there on."""
    received = broken = 0
    ended = False
    while True:
        known = received
        try:
            for chunk in container.logs(stream=True, follow=not ended, stdout=True, stderr=True):
                new = chunk[known:]
                known = max(0, known - len(chunk))
                received += len(new)
                if new:
                    yield new
            if ended or received > LONGEST_LOG:
                return
            if not _runs(container):
                ended = True  # a stream that broke off looks like one that ended: what came behind it is asked for
                continue
        except docker.errors.NotFound:
            return  # somebody removed it, and its output with it
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError):
            if broken == _LOG_ATTEMPTS:
                raise
        broken += 1
        if broken > _LOG_ATTEMPTS:
            return
        time.sleep(_BROKEN_PAUSE_SECONDS)


def _runs(container: Container) -> bool:
    container.reload()
    return bool(container.status == "running")


def _answers(client: docker.DockerClient) -> bool:
    try:
        return bool(client.ping())
    except (docker.errors.APIError, requests.exceptions.RequestException, OSError):
        return False


def _kill(container: Container) -> None:
    try:
        container.kill()
    except (docker.errors.APIError, requests.exceptions.RequestException):
        return  # it ended by itself, or the engine is gone
