"""The process between the runner and a cell, started by path as the runner starts it."""

import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from toto_compat.runtimes import supervise
from toto_compat.runtimes.cell_process import CGROUP_VARIABLE, check_control_group

ROOT = Path(__file__).parents[2]
MB = 1 << 20
PLENTY = 1 << 50
_LONGEST_SECONDS = 120.0  # of a cell that ends by itself, on a machine that has much else to do
BY_PATH = [sys.executable, "-I", "-S", supervise.__file__]
# the same with hardly a moment for the cell to end by itself
IMPATIENT = [
    sys.executable,
    "-c",
    "import sys; from toto_compat.runtimes import supervise; supervise._GRACE_SECONDS = 0.01;"
    "sys.exit(supervise.main(sys.argv[1:]))",
]

# one write: two processes of a tree share the pipe
SAYS_ITS_PID = "os.write(1, b'%d\\n' % os.getpid())"
WAITING = f"import os, signal; {SAYS_ITS_PID}; signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITING}"
# forked twice, with a session of its own in between: no child of the cell and not in its process group
LEAVES_AN_ORPHAN = f"""
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SAYS_ITS_PID}
        signal.pause()
    os._exit(0)
os.wait()
"""
# a child that has certainly ended and that nobody has collected
ZOMBIE = "pid = os.fork() or os._exit(0)\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
COUNT = "print(len(supervise.descendants(os.getpid())))\n"


class Watched:
    """A process of somebody else's, held by a handle that no later process can take over."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def ends(self) -> bool:
        ready, _, _ = select.select([self._handle], [], [], 20)
        return bool(ready)

    def remove(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._handle)


class Supervised:
    """A supervisor with its cell, and the processes that the cell names on its stdout."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin and process.stdout and process.stderr
        self.process, self.stdin, self.stdout, self.stderr = process, process.stdin, process.stdout, process.stderr
        self.watched: list[Watched] = []

    def watch_next(self) -> Watched:
        self.watched.append(Watched(int(self.stdout.readline())))
        return self.watched[-1]

    def code(self) -> int:
        return self.process.wait(_LONGEST_SECONDS)


@contextmanager
def supervised(cell: str, *, memory: int | str = PLENTY, supervisor: list[str] = BY_PATH) -> Iterator[Supervised]:
    process = subprocess.Popen(
        [*supervisor, str(memory), sys.executable, "-c", cell],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Supervised(process)
    try:
        yield running
    finally:
        for watched in running.watched:
            watched.remove()
        running.stdin.close()
        process.wait(_LONGEST_SECONDS)
        running.stdout.close()
        running.stderr.close()


def printed_by(script: str) -> list[str]:
    """What a process of its own prints, in which the supervisor's functions see only its own children."""
    program = f"import os, sys\nfrom toto_compat.runtimes import supervise\n{script}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


# --- the end of a cell ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 77])
def test_the_exit_code_of_a_cell_is_passed_on(code: int) -> None:
    with supervised(f"raise SystemExit({code})") as running:
        assert running.code() == code


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_cell_that_died_of_a_signal_has_the_exit_code_that_a_shell_gives(number: signal.Signals) -> None:
    with supervised(f"import os; os.kill(os.getpid(), {number:d})") as running:
        assert running.code() == 128 + number


def test_a_cell_has_no_part_in_the_stdin_that_keeps_it_alive() -> None:
    with supervised("import os; os._exit(5 if os.path.samestat(os.fstat(0), os.stat(os.devnull)) else 6)") as running:
        assert running.code() == 5


def test_what_a_cell_prints_goes_straight_through() -> None:
    with supervised("import sys; print('to stdout'); print('to stderr', file=sys.stderr)") as running:
        running.code()
        assert running.stdout.read() == "to stdout\n"
        assert running.stderr.read() == "to stderr\n"


# --- a closed stdin ---------------------------------------------------------------------------------------------------


def test_a_closed_stdin_ends_the_cell_and_its_children() -> None:
    cell = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITING!r}])\n{WAITING}"
    with supervised(cell) as running:
        processes = [running.watch_next(), running.watch_next()]
        running.stdin.close()
        assert running.code() == 128 + signal.SIGTERM
        assert [process.ends() for process in processes] == [True, True]


def test_a_cell_is_asked_to_end_before_it_is_killed() -> None:
    asked = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('wrote it down')))"
    with supervised(f"{asked}\n{WAITING}") as running:
        running.watch_next()
        running.stdin.close()
        running.code()
        assert running.stdout.read() == "wrote it down\n"


def test_a_cell_that_does_not_listen_is_killed() -> None:
    with supervised(DEAF, supervisor=IMPATIENT) as running:
        cell = running.watch_next()
        running.stdin.close()
        assert running.code() == 128 + signal.SIGTERM
        assert cell.ends()


# --- orphans ----------------------------------------------------------------------------------------------------------


def test_an_orphan_in_a_session_of_its_own_does_not_outlive_a_cell_that_ended_well() -> None:
    with supervised(f"{LEAVES_AN_ORPHAN}\nraise SystemExit(3)") as running:
        orphan = running.watch_next()
        assert running.code() == 3
        assert orphan.ends()


def test_an_orphan_in_a_session_of_its_own_does_not_outlive_a_cell_that_was_ended() -> None:
    with supervised(f"{LEAVES_AN_ORPHAN}\n{WAITING}") as running:
        processes = [running.watch_next(), running.watch_next()]
        running.stdin.close()
        running.code()
        assert [process.ends() for process in processes] == [True, True]


def test_a_process_that_has_ended_looks_alive_until_it_is_reaped() -> None:
    assert printed_by(f"{ZOMBIE}{ZOMBIE}{COUNT}supervise.reap()\n{COUNT}") == ["2", "0"]


def test_reaping_does_not_wait_for_what_still_runs() -> None:
    child = "import signal\npid = os.fork()\nif pid == 0:\n    signal.alarm(20); signal.pause()\n"
    after = "supervise.reap(); print(supervise.descendants(os.getpid()) == [pid]); os.kill(pid, 9)"
    assert printed_by(child + after) == ["True"]


def test_killing_a_tree_leaves_no_zombies() -> None:
    assert printed_by(f"{ZOMBIE}supervise.kill_tree()\n{COUNT}") == ["0"]


def test_what_was_forked_while_the_tree_was_listed_is_killed_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = iter([[11, 12], [13], []])
    killed = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 11:
            raise ProcessLookupError

    with monkeypatch.context() as patch:
        patch.setattr(supervise, "descendants", lambda _: next(rounds))
        patch.setattr(supervise, "reap", lambda: None)
        patch.setattr(os, "kill", kill)
        supervise.kill_tree()
    assert killed == [(pid, signal.SIGKILL) for pid in (11, 12, 13)]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_processes_that_are_over_the_limit_only_together_are_ended_and_both_numbers_told() -> None:
    """Each takes 40 MB after it said its pid; the limit is 70 MB."""
    eat = f"import os, signal; {SAYS_ITS_PID}; eaten = b'x' * (40 << 20); signal.pause()"
    cell = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {eat!r}], start_new_session=True)\n{eat}"
    with supervised(cell, memory=70 * MB) as running:
        processes = [running.watch_next(), running.watch_next()]
        assert running.code() == 128 + signal.SIGKILL
        assert [process.ends() for process in processes] == [True, True]
        *line, used, limit = running.stderr.read().split()
    assert " ".join(line) == supervise.OUT_OF_MEMORY_LINE
    assert int(used) > int(limit) == 70 * MB


@contextmanager
def waiting_child(before: str = "") -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", f"{before}\nprint('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"up\n"
        yield child.pid
    finally:
        child.communicate(b"\n", timeout=30)


def test_libraries_and_other_mapped_files_are_no_memory_of_a_cell() -> None:
    with waiting_child() as pid:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
        assert kilobytes["RssFile"] > 0
        assert supervise.private_memory([pid]) == (kilobytes["VmRSS"] - kilobytes["RssFile"]) * 1024


def test_shared_memory_counts() -> None:
    before = supervise.private_memory([os.getpid()])
    with mmap.mmap(-1, 64 * MB) as shared:
        shared.write(b"x" * (64 * MB))
        assert supervise.private_memory([os.getpid()]) - before > 48 * MB


def test_a_process_that_is_gone_takes_no_memory_and_hides_no_others() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with waiting_child() as pid:
        assert supervise.private_memory([gone.pid, pid]) == supervise.private_memory([pid]) > 0


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_grandchildren_belong_to_the_tree_and_the_root_does_not() -> None:
    script = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {WAITING!r}]); child.wait()"
    with supervised(script) as running:
        grandchild = running.watch_next().pid
        child, last = supervise.descendants(running.process.pid)
        assert last == grandchild
        assert supervise.descendants(child) == [grandchild]


def test_a_process_whose_name_looks_like_fields_of_the_table_is_found() -> None:
    name = "open('/proc/self/comm', 'w').write('a) S 1 (b')"
    with waiting_child(name) as pid:
        assert Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == "a) S 1 (b\n"
        assert pid in supervise.descendants(os.getpid())


# --- a control group --------------------------------------------------------------------------------------------------

GROUPS = {1: (Path("/sys/fs/cgroup/memory"),), 2: (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))}


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group of the test's own with memory in it, as a user gives one."""
    file = {1: "memory.limit_in_bytes", 2: "cgroup.subtree_control"}[request.param]
    root = next((folder for folder in GROUPS[request.param] if (folder / file).exists()), None)
    if root is None:
        pytest.skip(f"no memory controller of version {request.param} is mounted here")
    made = root / f"toto-test-{os.getpid()}"
    try:
        made.mkdir()
        if request.param == 2:
            (made / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group can be made in {root}: {error.strerror}")
    yield made
    made.rmdir()  # fails if the supervisor left a group in it


def test_a_cell_in_a_control_group_is_held_to_its_memory_by_the_kernel(group: Path) -> None:
    """It takes memory without a pause: what is looked at every two seconds would be too late."""
    eat = "held = []\nwhile True: held.append(bytearray(1 << 20))"
    with supervised(eat, memory=f"{64 * MB}@{group}") as running:
        assert running.code() == 128 + signal.SIGKILL
        assert supervise.OUT_OF_MEMORY_LINE in running.stderr.read()


def test_a_control_group_that_can_be_used_is_found_so_and_left_as_it_was(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CGROUP_VARIABLE, str(group))
    check_control_group()
    assert [path.name for path in group.iterdir() if path.is_dir()] == []


def test_a_cell_that_keeps_to_its_memory_never_notices_its_group(group: Path) -> None:
    with supervised("raise SystemExit(7)", memory=f"{256 * MB}@{group}") as running:
        assert running.code() == 7
        assert running.stderr.read() == ""


def test_a_child_killed_at_a_limit_of_the_supervisors_own_group_is_told(group: Path) -> None:
    """As on a bare host where a session, a service or a job has a limit: the cell may go on without that child."""
    limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
    inside = group / "session"
    inside.mkdir()
    (inside / limit.name).write_text(str(96 * MB))
    eat = "eaten = bytearray(256 << 20); eaten[::4096] = bytes(len(eaten) // 4096)"
    cell = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {eat!r}]).returncode == -9)"
    enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(inside)]
    try:
        with supervised(cell, supervisor=[*enter, *BY_PATH]) as running:
            assert running.code() == 1
            assert supervise.KILLED_LINE in running.stderr.read()
        with supervised("raise SystemExit(3)", supervisor=[*enter, *BY_PATH]) as running:
            assert running.code() == 3
            assert running.stderr.read() == ""  # what was killed before it began is none of its own
    finally:
        inside.rmdir()


@pytest.mark.parametrize(
    ("told", "file"),
    [
        ("0::/user.slice/session-1.scope", "user.slice/session-1.scope/memory.events"),
        ("0::/", "memory.events"),
        ("0::/outside/of/this/container", "memory.events"),
        ("9:name=systemd:/x\n4:memory:/slurm/job_7\n0::/", "memory/slurm/job_7/memory.oom_control"),
        ("4:cpu,memory:/outside", "memory/memory.oom_control"),
    ],
)
def test_the_kernels_count_is_read_where_this_process_is(tmp_path: Path, told: str, file: str) -> None:
    proc, events = tmp_path / "cgroup", tmp_path / "mounted" / file
    proc.write_text(f"{told}\n")
    assert supervise.kills_around(proc, tmp_path / "mounted") == 0
    events.parent.mkdir(parents=True)
    events.write_text("oom 5\noom_kill_disable 0\nunder_oom 0\noom_kill 3\noom_group_kill 1\n")
    assert supervise.kills_around(proc, tmp_path / "mounted") == 3
    assert supervise.kills_around(tmp_path / "none", tmp_path / "mounted") == 0


def test_an_ordinary_folder_is_no_control_group_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    with supervised("raise SystemExit(7)", memory=f"{256 * MB}@{tmp_path}") as running:
        assert running.code() == 7
        assert "no control group can be made there" in running.stderr.read()
    assert list(tmp_path.iterdir()) == []


def test_a_cell_whose_group_cannot_be_entered_runs_without(tmp_path: Path) -> None:
    cannot = "supervise._order = lambda file, _: (_ for _ in ()).throw(OSError(13, 'Permission denied')) if file.name"
    script = (
        "import sys; from toto_compat.runtimes import supervise; write = supervise._order\n"
        f"{cannot} == 'cgroup.procs' else file.write_text(_)\nsys.exit(supervise.main(sys.argv[1:]))"
    )
    with supervised(
        "raise SystemExit(7)", memory=f"{256 * MB}@{tmp_path}", supervisor=[sys.executable, "-c", script]
    ) as running:
        assert running.code() == 7
        assert "cannot be entered" in running.stderr.read()


def test_what_a_killed_supervisor_left_is_removed_by_the_next(group: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (group / f"toto-cell-{gone.pid}").mkdir()
    with supervised("", memory=f"{256 * MB}@{group}") as running:
        assert running.code() == 0
    assert [path.name for path in group.iterdir() if path.is_dir()] == []


def test_a_group_that_is_none_is_told_and_the_cell_runs_without(tmp_path: Path) -> None:
    with supervised("raise SystemExit(7)", memory=f"{256 * MB}@{tmp_path / 'none'}") as running:
        assert running.code() == 7
        assert "no control group can be made there" in running.stderr.read()


def test_a_cell_ends_with_its_supervisor_even_if_that_is_killed() -> None:
    with supervised(WAITING) as running:
        cell = running.watch_next()
        running.process.kill()
        assert cell.ends()


def test_short_of_memory_the_kernel_is_told_to_take_a_cell_before_its_runner() -> None:
    with supervised("print(open('/proc/self/oom_score_adj').read())") as running:
        assert int(running.stdout.read()) > int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
