"""The quiet lock, seen through a second process's eyes: flock belongs to the open file, so two locks in one will do."""

import fcntl
import os
from pathlib import Path

import pytest

from toto_compat.cell.quiet import QuietLock


def can_take(path: Path, how: int) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quiet"


def turnstile(path: Path) -> Path:
    return path.with_name("quiet.turnstile")


def test_workers_share_the_lock_and_keep_timing_out(path: Path) -> None:
    with QuietLock(str(path)).working(), QuietLock(str(path)).working():
        assert can_take(path, fcntl.LOCK_SH)
        assert not can_take(path, fcntl.LOCK_EX)
    assert can_take(path, fcntl.LOCK_EX)


def test_timing_has_the_lock_for_itself_and_goes_back_to_sharing(path: Path) -> None:
    lock = QuietLock(str(path))
    with lock.working():
        with lock.timing():
            assert not can_take(path, fcntl.LOCK_SH)
            assert not can_take(turnstile(path), fcntl.LOCK_SH)
        assert can_take(path, fcntl.LOCK_SH)
        assert not can_take(path, fcntl.LOCK_EX)
        assert can_take(turnstile(path), fcntl.LOCK_EX)


def test_the_shared_lock_is_released_before_the_exclusive_one_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    names: dict[int, str] = {}
    real = fcntl.flock

    def recorded(descriptor: int, how: int) -> None:
        calls.append((names.setdefault(descriptor, Path(f"/proc/self/fd/{descriptor}").resolve().name), how))
        real(descriptor, how)

    lock = QuietLock(str(path))
    with lock.working():
        monkeypatch.setattr(fcntl, "flock", recorded)
        with lock.timing():
            pass
    assert calls[:3] == [
        ("quiet", fcntl.LOCK_UN),
        ("quiet.turnstile", fcntl.LOCK_EX),
        ("quiet", fcntl.LOCK_EX),
    ]


def test_a_worker_gives_way_only_when_a_timing_loop_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = QuietLock(str(path))
    with lock.working():
        lock.give_way()
        assert not can_take(path, fcntl.LOCK_EX)

        waiting = os.open(turnstile(path), os.O_RDWR)
        fcntl.flock(waiting, fcntl.LOCK_EX)
        seen: list[bool] = []

        def share_after_the_timing_loop() -> None:
            seen.append(can_take(path, fcntl.LOCK_EX))
            fcntl.flock(waiting, fcntl.LOCK_UN)
            QuietLock._share(lock)

        monkeypatch.setattr(lock, "_share", share_after_the_timing_loop)
        lock.give_way()
        os.close(waiting)
        assert seen == [True]
        assert not can_take(path, fcntl.LOCK_EX)


def test_without_a_path_nothing_is_locked() -> None:
    lock = QuietLock(None)
    with lock.working(), lock.timing():
        lock.give_way()
