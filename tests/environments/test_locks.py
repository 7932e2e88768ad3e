"""Locks pin everything, say what they were made for, and notice when that changed."""

import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.environments.small_project import REPOSITORY, locked, tiny_wheel
from toto_compat.contract.request import Environment
from toto_compat.environments.locks import (
    Lock,
    LockedPackage,
    asked_of,
    format_lock,
    lock_command,
    lock_path,
    parse_lock,
    read_base_digests,
    read_lock,
    record_base_digest,
    size_of,
    stale_because,
)
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.load import load_matrix

MATRIX = load_matrix(REPOSITORY / "matrix.yaml")
ENVIRONMENT = Environment(torch="2.13.0", build="cpu", pins={"einops": "0.7.0"})


def small_lock(environment: Environment = ENVIRONMENT) -> Lock:
    packages = (
        LockedPackage("einops", "0.7.0", "a" * 64, "einops-0.7.0-py3-none-any.whl", 44_000, "toto"),
        LockedPackage("torch", "2.13.0+cpu", "b" * 64, "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", 0, "torch"),
    )
    return Lock("torch-2.13.0-cpu", "3.11", asked_of(environment), packages)


def write(folder: Path, lock: Lock) -> Path:
    path = lock_path(lock.environment_name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_lock(lock))
    return path


@pytest.mark.parametrize("name", MATRIX.environments)
def test_every_environment_of_the_matrix_has_a_lock_that_is_not_stale(name: str) -> None:
    lock = read_lock(name, MATRIX.environments[name])
    assert lock.version_of("torch").partition("+")[0] == MATRIX.environments[name].torch
    assert lock.version_of("toto-ts") == MATRIX.environments[name].toto_ts


@pytest.mark.parametrize("name", MATRIX.environments)
def test_a_cuda_lock_brings_cuda_and_a_cpu_lock_does_not(name: str) -> None:
    packages = read_lock(name, MATRIX.environments[name]).packages
    brings_cuda = any(package.name.startswith("nvidia-") for package in packages)
    assert brings_cuda == (MATRIX.environments[name].build != "cpu")


@pytest.mark.parametrize("name", MATRIX.environments)
def test_a_committed_lock_names_no_index_and_no_machine(name: str) -> None:
    text = lock_path(name).read_text()
    assert "://" not in text
    assert "/" not in "".join(line for line in text.splitlines() if not line.startswith("#"))


def test_what_toto_needs_is_locked_alike_for_releases_with_the_same_pins() -> None:
    twins = ("torch-2.11.0-cu130", "torch-2.15.0-cu132")
    first, second = (read_lock(name, MATRIX.environments[name]).layer("toto") for name in twins)
    assert [package.requirement for package in first] == [package.requirement for package in second]


def test_a_lock_survives_being_written_and_read() -> None:
    lock = small_lock()
    assert parse_lock(format_lock(lock), Path("torch-2.13.0-cpu.txt")) == lock


def test_a_changed_pin_makes_the_lock_stale_and_says_which(tmp_path: Path) -> None:
    write(tmp_path, small_lock())
    moved = ENVIRONMENT.model_copy(update={"pins": {"einops": "0.8.1"}})
    with pytest.raises(
        EnvironmentBuildError, match=r"stale: matrix.yaml asks for einops==0.8.1; no longer for einops==0.7.0"
    ):
        read_lock("torch-2.13.0-cpu", moved, tmp_path)


def test_another_python_makes_the_lock_stale() -> None:
    moved = ENVIRONMENT.model_copy(update={"python": "3.13"})
    assert stale_because(small_lock(), moved) == ["matrix.yaml asks for python 3.13", "no longer for python 3.11"]


def test_a_missing_lock_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="has no lock") as caught:
        read_lock("torch-2.13.0-cpu", ENVIRONMENT, tmp_path)
    assert "nox -s lock -- torch-2.13.0-cpu" in caught.value.hint


@pytest.mark.parametrize("edit", ["einops==0.7.0", "einops==0.7.0 --hash=sha256:abc  # e.whl", "-r other.txt"])
def test_a_line_edited_by_hand_is_refused_with_its_number(tmp_path: Path, edit: str) -> None:
    path = write(tmp_path, small_lock())
    path.write_text(path.read_text() + edit + "\n")
    with pytest.raises(EnvironmentBuildError, match=rf"{path.name}:\d+: not a line of a lock"):
        read_lock("torch-2.13.0-cpu", ENVIRONMENT, tmp_path)


def test_a_lock_copied_from_another_environment_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, small_lock())
    path.rename(path.with_name("torch-2.14.0-cpu.txt"))
    with pytest.raises(EnvironmentBuildError, match="of another environment"):
        read_lock("torch-2.14.0-cpu", ENVIRONMENT, tmp_path)


def test_identity_follows_the_packages_and_nothing_else(tmp_path: Path) -> None:
    lock = small_lock()
    same_packages = Lock("torch-2.13.0-cpu", "3.11", ("something else",), lock.packages)
    other = Lock(
        "torch-2.13.0-cpu",
        "3.11",
        lock.asked,
        (lock.packages[0], locked(tiny_wheel(tmp_path, "torch", "1.0"), "torch")),
    )
    assert same_packages.identity == lock.identity
    assert other.identity != lock.identity


def test_torch_is_pinned_to_the_letter() -> None:
    # ==2.13.0 would also accept 2.13.0+cpu
    assert small_lock().packages[1].requirement.startswith("torch===2.13.0+cpu --hash=")


def test_no_environment_stands_on_an_image_that_asks_for_a_driver_of_its_own() -> None:
    """NVIDIA's images refuse drivers that the wheels, which bring CUDA, run on."""
    environments = MATRIX.environments.values()
    assert {one.base_image for one in environments} == {f"python:{one.python}-slim" for one in environments}


def test_a_base_digest_once_resolved_is_kept(tmp_path: Path) -> None:
    record_base_digest("python:3.11-slim", "sha256:" + "1" * 64, tmp_path)
    record_base_digest("nvidia/cuda:13.0.3-base-ubuntu24.04", "sha256:" + "2" * 64, tmp_path)
    assert read_base_digests(tmp_path)["python:3.11-slim"] == "sha256:" + "1" * 64


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- python:3.11-slim\n", "not images with their digests"),
        ("python:3.11-slim\n", "not images with their digests"),
        ('"python:3.11-slim": latest\n', "python:3.11-slim: 'latest' is no digest"),
        ('"python:3.11-slim": [1]\n', "is no digest"),
        ('"python:3.11-slim: x\n', "not valid YAML"),
    ],
)
def test_a_file_of_digests_that_was_edited_by_hand_is_an_error_that_names_it(
    text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "base-images.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(EnvironmentBuildError, match=r"base-images\.yaml") as caught:
        read_base_digests(tmp_path)
    assert told in caught.value.message
    assert "restore the committed file" in caught.value.hint


def test_a_digest_that_is_still_open_is_none(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "base-images.yaml").write_text('"python:3.11-slim":\n', encoding="utf-8")
    assert read_base_digests(tmp_path) == {}


def test_a_size_that_an_index_does_not_tell_is_none() -> None:
    """A server that speaks no HTTP raises what is no OSError."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert size_of(f"http://127.0.0.1:{server.getsockname()[1]}/torch-2.13.0-py3-none-any.whl") == 0


def test_check_names_the_environments_whose_locks_are_stale(tmp_path: Path) -> None:
    text = (REPOSITORY / "matrix.yaml").read_text().replace('toto_ts: "0.2.0"', 'toto_ts: "0.1.4"')
    changed = tmp_path / "matrix.yaml"
    changed.write_text(text.replace('einops: "0.8.1"', 'einops: "0.8.0"'))
    run = CliRunner().invoke(lock_command, ["--check", "--matrix", str(changed)])
    assert isinstance(run.exception, EnvironmentBuildError)
    assert "torch-2.9.0-cu128.txt is stale: matrix.yaml asks for einops==0.8.0" in str(run.exception)
    assert "torch-2.13.0-cpu" not in str(run.exception)
