"""What a cell's container may do, how it ends, and that nothing of it stays: asked from inside real containers."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

from tests.runtimes.containers import (
    REPOSITORY,
    SMALL,
    SMALL_ENVIRONMENT,
    SMALL_LIMITS,
    identity,
    job_of,
    make_small_project,
)
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.cell_process import LOG_FILE
from toto_compat.runtimes.docker_image import ensure_image
from toto_compat.runtimes.docker_run import (
    CELL_FOLDER,
    FIXED_UID,
    SOURCE_FOLDER,
    ContainerEnd,
    ContainerJob,
    Containers,
    _pack,
    container_environment,
    gpu_request,
    invoking_identity,
    remove_leftovers,
    runner_label,
    runner_lives,
    unpack,
)
from toto_compat.runtimes.engine import open_client

ASK = """
import json, os, pathlib, socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
    return "worked"
def read(*paths):  # as control groups version 2 names it, then version 1
    there = [p for p in (pathlib.Path("/sys/fs/cgroup", path) for path in paths) if p.exists()]
    return there[0].read_text().strip() if there else None
def connect():
    with socket.socket() as s:
        s.settimeout(2); s.connect(("192.0.2.1", 80))
def run_from(folder):
    program = pathlib.Path(folder, "program"); program.write_text("#!/bin/sh\\nexit 0\\n"); program.chmod(0o755)
    import subprocess; subprocess.run([str(program)], check=True)
print("ANSWER", json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(),
    "capabilities": [status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
    "connect": attempt(connect),
    "write_root": attempt(lambda: pathlib.Path("/opt/x").write_text("x")),
    "write_etc": attempt(lambda: pathlib.Path("/etc/passwd").open("a")),
    "write_source": attempt(lambda: pathlib.Path("SOURCE/x").write_text("x")),
    "write_cell": attempt(lambda: pathlib.Path("CELL/x").write_text("x")),
    "run_from_tmp": attempt(lambda: run_from("/tmp")),
    "run_from_cell": attempt(lambda: run_from("CELL")),
    "memory": read("memory.max", "memory/memory.limit_in_bytes"),
    "swap": read("memory.swap.max"), "memory_and_swap": read("memory/memory.memsw.limit_in_bytes"),
    "pids": read("pids.max", "pids/pids.max"), "cpu": read("cpu.max", "cpu/cpu.cfs_quota_us"),
    "cpus": sorted(os.sched_getaffinity(0)),
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "tmp": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize,
    "home": attempt(lambda: pathlib.Path.home().joinpath("x").write_text("x")),
    "environment": dict(os.environ),
}))
""".replace("SOURCE", SOURCE_FOLDER).replace("CELL", CELL_FOLDER)

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def image(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The small environment's image, for all tests of this file."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        make_small_project(folder, patch, note=str(folder))
        _, built = ensure_image(client, SMALL, SMALL_ENVIRONMENT, lambda _: None)
    yield str(built.id)
    client.images.remove(str(built.id), force=True)


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    folder = tmp_path / "cell"
    folder.mkdir()
    return folder


def run(client: docker.DockerClient, job: ContainerJob) -> tuple[ContainerEnd, list[str]]:
    lines: list[str] = []
    return Containers(client).run(job, lines.append), lines


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something another process does; fails the test if it never comes."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.05)


def own_containers(client: docker.DockerClient) -> list[str]:
    """Of this process alone: other test workers have theirs."""
    listed = client.containers.list(all=True, filters={"label": "toto-compat.runner"}, ignore_removed=True)
    return [str(one.name) for one in listed if f":{os.getpid()}:" in one.labels["toto-compat.runner"]]


# --- what it may do ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inside(client: docker.DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a process in a cell's container finds."""
    folder = tmp_path_factory.mktemp("asked") / "cell"
    folder.mkdir()
    end, lines = run(client, job_of(image, folder, ASK, cpuset="0"))
    assert end.process.code == 0, lines
    answer = next(line for line in lines if line.startswith("ANSWER"))
    found: dict[str, object] = json.loads(answer.removeprefix("ANSWER "))
    return found


def test_there_is_no_way_out(inside: dict[str, object]) -> None:
    assert inside["interfaces"] == ["lo"]
    assert inside["connect"] == "OSError 101"  # network is unreachable


def test_no_root_and_no_capabilities(inside: dict[str, object]) -> None:
    assert inside["uid"] == (FIXED_UID if os.geteuid() == 0 else os.geteuid())
    assert set(inside["capabilities"]) == {"0" * 16}  # type: ignore[call-overload]
    assert inside["no_new_privileges"] == "1"


def test_only_the_cells_own_folder_and_tmp_are_writable(inside: dict[str, object]) -> None:
    assert str(inside["write_root"]).startswith("OSError 30")  # read-only file system
    assert inside["write_etc"] != "worked"
    assert str(inside["write_source"]).startswith("OSError 30")
    assert inside["write_cell"] == "worked"
    assert inside["home"] == "worked"


def test_what_inductor_compiles_can_be_run(inside: dict[str, object]) -> None:
    assert inside["run_from_tmp"] == "worked"
    assert inside["run_from_cell"] == "worked"


def test_the_limits_of_the_matrix_are_in_force(inside: dict[str, object]) -> None:
    assert inside["memory"] == str(192 * 2**20)
    # a kernel that does not account for swap says neither
    assert inside["swap"] in ("0", None)
    assert inside["memory_and_swap"] in (inside["memory"], None)
    assert inside["pids"] == "32"
    assert str(inside["cpu"]).split()[0] == "100000"  # microseconds of every 100,000
    assert inside["cpus"] == [0]
    assert inside["shm"] == 32 * 2**20
    assert inside["tmp"] == 64 * 2**20


def test_threads_follow_the_limits_and_no_gpu_is_seen(inside: dict[str, object]) -> None:
    environment = inside["environment"]
    assert isinstance(environment, dict)
    assert environment["OMP_NUM_THREADS"] == str(SMALL_LIMITS.threads)
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == str(SMALL_LIMITS.cpus)
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert not {name for name in environment if "PROXY" in name.upper() or name.startswith("PIP_")}


def test_one_gpu_is_asked_for_by_its_id() -> None:
    (request,) = gpu_request("1", cdi=False) or []
    assert request["DeviceIDs"] == ["1"]
    assert request["Capabilities"] == [["gpu"]]
    (by_name,) = gpu_request("1", cdi=True) or []
    assert (by_name["Driver"], by_name["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=1"])


def test_a_cuda_cell_keeps_the_gpu_the_engine_gives_it(cell: Path) -> None:
    environment = container_environment(job_of("image", cell, "", gpu="0"))
    assert "NVIDIA_VISIBLE_DEVICES" not in environment
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on other users' numbers needs root")
@pytest.mark.parametrize("uid", [FIXED_UID, 1000, 1234])
def test_files_belong_to_the_invoking_user_afterwards(
    client: docker.DockerClient, image: str, cell: Path, uid: int
) -> None:
    script = "import os, pathlib; pathlib.Path('sub').mkdir(); pathlib.Path('sub/made').write_text(str(os.getuid()))"
    end, lines = run(client, job_of(image, cell, script, identity=identity(uid)))
    assert end.process.code == 0, lines
    assert (cell / "sub" / "made").read_text() == str(uid)
    assert {path.stat().st_uid for path in (cell, *cell.rglob("*"))} == {0}


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on other users' numbers needs root")
@pytest.mark.parametrize("uid", [1000, 1234])
def test_a_user_who_is_not_root_runs_cells_as_himself(
    client: docker.DockerClient, image: str, tmp_path: Path, uid: int
) -> None:
    """The whole way as that user: his socket permission, his folder, his files."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    cell = tmp_path / "cell"
    cell.mkdir()
    script = "import os, pathlib; pathlib.Path('made').write_text(str(os.getuid()))"
    job = job_of(image, cell, script)
    for path in (cell, *cell.rglob("*")):
        os.chown(path, uid, uid)
    socket_group = Path("/var/run/docker.sock").stat().st_gid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([socket_group])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            assert invoking_identity().user == f"{uid}:{uid}"
            own = ContainerJob(**{**vars(job), "identity": invoking_identity()})
            code = Containers(open_client()).run(own, lambda _: None).process.code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (cell / "made").read_text() == str(uid)
    assert (cell / "made").stat().st_uid == uid


# --- how it ends ------------------------------------------------------------------------------------------------------


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
        "from toto_compat.runtimes.docker_run import Containers\nfrom toto_compat.runtimes.engine import open_client\n"
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


def test_only_dead_runners_of_this_machine_leave_leftovers() -> None:
    host, pid, start, namespace = runner_label().split(":", 3)
    assert runner_lives(runner_label())
    assert not runner_lives(f"{host}:{pid}:1:{namespace}")  # the number is used again by a younger process
    assert runner_lives("another-machine:1:1")
    assert runner_lives(f"{host}:{pid}:1:pid:[1]")  # in a container on this machine, whose numbers mean others here
    assert runner_lives(f"{host}:{pid}:{start}")  # as earlier releases wrote it
    assert not runner_lives(f"{host}:{pid}:1")
    assert runner_lives("no label of ours")


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


# --- files without shared disk ----------------------------------------------------------------------------------------


def test_where_binds_cannot_work_files_are_copied_in_and_out(
    client: docker.DockerClient, image: str, cell: Path, tmp_path: Path
) -> None:
    given = tmp_path / "given.csv"
    given.write_text("from outside")
    (cell / "work").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "module.py").write_text("name = 'staged'")
    script = (
        "import os, pathlib, module\n"
        "given = pathlib.Path('/toto-compat/inputs/0/given.csv')\n"
        "try:\n    given.write_text('x'); writable = True\nexcept OSError:\n    writable = False\n"
        "pathlib.Path('work/answer').write_text(f'{given.read_text()} {module.name} {writable} {os.getuid()}')\n"
    )
    job = job_of(image, cell, script, inputs={given: "/toto-compat/inputs/0/given.csv"}, copy=True)
    end, lines = run(client, job)
    assert end.process.code == 0, lines
    uid = invoking_identity().uid
    assert (cell / "work" / "answer").read_text() == f"from outside staged False {uid}"
    assert (cell / "work" / "answer").stat().st_uid == os.geteuid()
    volumes = client.volumes.list(filters={"label": "toto-compat.runner"})
    assert not [one for one in volumes if f":{os.getpid()}:" in one.attrs["Labels"]["toto-compat.runner"]]


def test_a_folder_the_engine_does_not_see_is_an_error_not_an_empty_folder(
    client: docker.DockerClient, image: str, cell: Path
) -> None:
    job = job_of(image, cell, "", inputs={cell / "not-there": "/toto-compat/inputs/0/x"})
    with pytest.raises(EnvironmentBuildError, match="bind source path does not exist") as caught:
        Containers(client).run(job, lambda _: None)
    assert "TOTO_COMPAT_DOCKER_FILES=copy" in caught.value.hint
    assert own_containers(client) == []


def test_what_is_copied_in_holds_files_in_the_place_of_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    packed = _pack(tmp_path / "snapshot", "inputs/0", (0, 0))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        content = archive.extractfile("inputs/0/model.safetensors")
        assert content is not None
        assert content.read() == b"weights"
        assert archive.getmember("inputs/0/model.safetensors").isreg()


def test_only_files_and_folders_are_copied_out(client: docker.DockerClient, image: str, cell: Path) -> None:
    script = (
        "import os, pathlib\nos.symlink('/etc/passwd', 'link')\nos.symlink('/', 'root')\nos.mkfifo('pipe')\n"
        "pathlib.Path('sub').mkdir()\npathlib.Path('sub/file').write_text('left')\n"
    )
    end, lines = run(client, job_of(image, cell, script, copy=True))
    assert end.process.code == 0, lines
    assert (cell / "sub" / "file").read_text() == "left"
    assert {path.name for path in cell.iterdir()} == {"script.py", "sub", LOG_FILE}


def test_a_damaged_archive_is_told_and_no_traceback(
    client: docker.DockerClient, image: str, cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Container, "get_archive", lambda *_: (iter([b"not a tar archive" * 100]), {}))
    with pytest.raises(EnvironmentBuildError, match="cannot be copied out"):
        run(client, job_of(image, cell, "", copy=True))
    assert own_containers(client) == []


def test_nothing_is_unpacked_beside_the_folder(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("cell/../../escaped"))
    buffer.seek(0)
    (tmp_path / "cell").mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(buffer, tmp_path / "cell")
    assert list(tmp_path.iterdir()) == [tmp_path / "cell"]
