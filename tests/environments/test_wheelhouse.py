"""The wheelhouse takes only files that match their lock, and is filled with the user's own pip settings."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.environments.small_project import locked, shelve, tiny_wheel
from toto_compat.contract.request import Environment
from toto_compat.environments.locks import Lock, LockedPackage
from toto_compat.environments.wheelhouse import fetch_hint, fetch_wheels, missing_wheels, verify_wheels, wheel_path
from toto_compat.errors import EnvironmentBuildError, StorageError

ENVIRONMENT = Environment(torch="9.9.9", build="cpu")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as the only index that pip has."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def lock_of(*packages: LockedPackage) -> Lock:
    return Lock("small", "3.11", (), packages)


def test_fetch_fills_the_wheelhouse_with_exactly_the_locked_files(index: Path) -> None:
    lock = lock_of(locked(tiny_wheel(index, "torch", "9.9.9"), "torch"))
    fetch_wheels(lock, ENVIRONMENT, lambda _: None)
    verify_wheels(lock.packages)
    assert missing_wheels(lock) == []


def test_fetch_takes_no_cpu_build_for_a_plain_release(index: Path) -> None:
    plain = locked(tiny_wheel(index, "torch", "9.9.9"), "torch")
    tiny_wheel(index, "torch", "9.9.9+cpu", "other = True\n")
    lock = lock_of(plain)
    fetch_wheels(lock, ENVIRONMENT, lambda _: None)
    verify_wheels(lock.packages)


def test_a_second_fetch_asks_no_index(index: Path) -> None:
    wheel = tiny_wheel(index, "torch", "9.9.9")
    lock = lock_of(locked(wheel, "torch"))
    fetch_wheels(lock, ENVIRONMENT, lambda _: None)
    wheel.unlink()
    said: list[str] = []
    fetch_wheels(lock, ENVIRONMENT, said.append)
    assert said == []


def test_an_index_that_serves_another_file_is_refused_and_nothing_is_kept(index: Path) -> None:
    wheel = tiny_wheel(index, "torch", "9.9.9")
    lock = lock_of(locked(wheel, "torch"))
    tiny_wheel(index, "torch", "9.9.9", "replaced = True\n")
    with pytest.raises(EnvironmentBuildError, match="cannot be fetched") as caught:
        fetch_wheels(lock, ENVIRONMENT, lambda _: None)
    assert "another file than the one that was locked" in caught.value.hint
    assert missing_wheels(lock) == list(lock.packages)
    assert not list(wheel_path(lock.packages[0]).parent.parent.glob(".fetching-*"))


def test_a_file_the_index_lacks_is_named(index: Path) -> None:
    wheel = tiny_wheel(index, "torch", "9.9.9")
    lock = lock_of(locked(wheel, "torch"))
    wheel.unlink()
    with pytest.raises(EnvironmentBuildError, match=r"torch===9\.9\.9") as caught:
        fetch_wheels(lock, ENVIRONMENT, lambda _: None)
    assert "your package index lacks that file" in caught.value.hint


def test_a_damaged_wheel_is_removed_and_both_hashes_are_named(index: Path) -> None:
    wheel = tiny_wheel(index, "torch", "9.9.9")
    package = locked(wheel, "torch")
    shelve(wheel, package)
    wheel_path(package).write_bytes(b"damaged")
    with pytest.raises(EnvironmentBuildError, match=package.sha256):
        verify_wheels([package])
    assert not wheel_path(package).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_told_as_one_and_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let tests mount a tmpfs")
    try:
        monkeypatch.setenv("TOTO_COMPAT_CACHE", str(disk))
        wheel = tiny_wheel(index, "torch", "9.9.9", "x = '" + "y" * 300_000 + "'\n")
        lock = lock_of(locked(wheel, "torch"))
        with pytest.raises((EnvironmentBuildError, StorageError)) as caught:
            fetch_wheels(lock, ENVIRONMENT, lambda _: None)
        assert "TOTO_COMPAT_CACHE" in caught.value.hint
        assert not list(disk.rglob("*.whl"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "before locking anew"),
        ("ERROR: No matching distribution found for torch===2.99.0", "nox -s lock -- small"),
        ("ERROR: Could not reach it", "check the package index"),
    ],
)
def test_pips_complaint_becomes_advice(output: str, advice: str) -> None:
    assert advice in fetch_hint(output, "small")
