"""A user's fork of toto-ts: a checkout, a wheel or a commit becomes one wheel, and what is in it is its identity."""

import subprocess
from pathlib import Path

import pytest

from toto_compat.contract.request import Environment
from toto_compat.environments.fork import fork_wheel
from toto_compat.environments.locks import Lock, asked_of, locked_fork
from toto_compat.environments.requirements import requirements_of
from toto_compat.environments.virtualenv import venv_folder
from toto_compat.environments.wheelhouse import shelve_fork, wheel_path
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.toto_source import TotoSource, absolute, toto_source

BACKEND = '''
import pathlib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """A wheel by the book, without a package index."""
    name = "NAME-0.2.0-py3-none-any.whl"
    info = "NAME-0.2.0.dist-info"
    files = {
        "toto/__init__.py": pathlib.Path("toto/__init__.py").read_text(),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: NAME\\nVersion: 0.2.0\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: tests\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), text)
    return name
'''


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fork that is built by itself: no backend has to be fetched for it."""
    return make_checkout(tmp_path / "fork")


def make_checkout(folder: Path, name: str = "toto_ts") -> Path:
    (folder / "toto").mkdir(parents=True)
    (folder / "toto" / "__init__.py").write_text("FORKED = 1\n")
    (folder / "backend.py").write_text(BACKEND.replace("NAME", name))
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(build + f'[project]\nname = "{name}"\nversion = "0.2.0"\n')
    return folder


def environment_of(toto: str | Path) -> Environment:
    return Environment(torch="2.13.0", build="cpu", toto_ts=str(toto))


def commit(folder: Path) -> str:
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "fork"],
    ):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_release_has_no_wheel_of_its_own() -> None:
    assert fork_wheel(Environment(torch="2.13.0", build="cpu"), print) is None
    assert requirements_of(environment_of("0.2.0")).without_dependencies == ("toto-ts==0.2.0",)


def test_a_checkout_becomes_a_wheel_once_and_stays_as_it_was(checkout: Path, tmp_path: Path) -> None:
    before = sorted(path.relative_to(checkout) for path in checkout.rglob("*"))
    said: list[str] = []
    wheel = fork_wheel(environment_of(checkout), said.append)
    assert wheel is not None and wheel.name == "toto_ts-0.2.0-py3-none-any.whl"
    assert fork_wheel(environment_of(checkout), said.append) == wheel
    assert len(said) == 1
    assert sorted(path.relative_to(checkout) for path in checkout.rglob("*")) == before


def test_a_change_of_a_checkout_is_another_environment(checkout: Path) -> None:
    environment = environment_of(checkout)
    before = (venv_folder("e", environment), asked_of(environment), fork_wheel(environment, print))
    (checkout / "__pycache__").mkdir()
    (checkout / "__pycache__" / "x.pyc").write_bytes(b"1")
    (checkout / ".git").mkdir()
    assert (venv_folder("e", environment), asked_of(environment), fork_wheel(environment, print)) == before
    (checkout / "toto" / "__init__.py").write_text("FORKED = 2\n")
    after = (venv_folder("e", environment), asked_of(environment), fork_wheel(environment, print))
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_where_a_checkout_lies_does_not_matter(checkout: Path, tmp_path: Path) -> None:
    other = make_checkout(tmp_path / "elsewhere" / "fork")
    assert requirements_of(environment_of(checkout)) == requirements_of(environment_of(other))


def test_a_wheel_and_a_commit_are_taken_as_they_are(checkout: Path, tmp_path: Path) -> None:
    wheel = fork_wheel(environment_of(checkout), print)
    assert wheel is not None
    given = tmp_path / wheel.name
    given.write_bytes(wheel.read_bytes())
    taken = fork_wheel(environment_of(given), print)
    assert taken is not None and taken.read_bytes() == wheel.read_bytes()
    revision = commit(checkout)
    (checkout / "toto" / "__init__.py").write_text("FORKED = 3  # not committed\n")
    from_git = fork_wheel(environment_of(f"git+file://{checkout}@{revision}"), print)
    assert from_git is not None and from_git.read_bytes() == wheel.read_bytes()
    assert revision in requirements_of(environment_of(f"git+file://{checkout}@{revision}")).without_dependencies[0]


def test_a_lock_has_the_wheel_by_its_hash_and_no_other(checkout: Path) -> None:
    environment = environment_of(checkout)
    wheel = fork_wheel(environment, print)
    assert wheel is not None
    package = locked_fork(wheel)
    lock = Lock("torch-2.13.0-cpu-fork", "3.11", asked_of(environment), (package,))
    shelve_fork(lock, environment, print)
    assert wheel_path(package).read_bytes() == wheel.read_bytes()
    (checkout / "toto" / "__init__.py").write_text("FORKED = 2\n")
    with pytest.raises(EnvironmentBuildError, match="is not the wheel that was locked"):
        shelve_fork(lock, environment, print)


def test_what_is_no_fork_of_toto_ts_is_told(tmp_path: Path) -> None:
    other = make_checkout(tmp_path / "other", name="prophet")
    with pytest.raises(EnvironmentBuildError, match=r"is no toto-ts: it gives prophet-0\.2\.0"):
        fork_wheel(environment_of(other), print)
    (other / "pyproject.toml").write_text("[build-system]\n")
    with pytest.raises(EnvironmentBuildError, match="no wheel can be made of it"):
        fork_wheel(environment_of(other), print)


def test_a_repository_or_commit_that_is_not_there_is_told(checkout: Path, tmp_path: Path) -> None:
    commit(checkout)
    for address in (f"git+file://{tmp_path}/none@{'0' * 40}", f"git+file://{checkout}@{'0' * 40}"):
        with pytest.raises(EnvironmentBuildError, match="the repository or the commit cannot be fetched"):
            fork_wheel(environment_of(address), print)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("git+https://host/fork", "no whole commit"),
        ("git+https://host/fork@main", "no whole commit"),
        ("git+https://host/fork@0123abc", "no whole commit"),
        ("git+ext::sh -c true@" + "0" * 40, "no whole commit"),
        ("forks/none", "no wheel and no checkout"),
        ("none.whl", "no wheel and no checkout"),
    ],
)
def test_what_names_no_fork_is_a_mistake(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        toto_source(text)


def test_a_password_in_an_address_is_not_shown() -> None:
    fork = toto_source(f"git+https://me:secret@host/fork@{'0' * 40}")
    assert fork == TotoSource("git", "https://me:secret@host/fork", "0" * 40)
    assert fork is not None and fork.shown == "https://host/fork"


def test_paths_are_relative_to_the_matrix_file(tmp_path: Path) -> None:
    assert absolute("forks/toto", tmp_path) == str(tmp_path.resolve() / "forks/toto")
    assert absolute("0.2.0", tmp_path) == "0.2.0"
    assert absolute("git+https://host/x@1", tmp_path) == "git+https://host/x@1"
