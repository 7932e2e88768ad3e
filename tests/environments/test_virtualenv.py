"""Virtualenvs are built by the real pip from a tiny local wheelhouse: whole or not there, and what was asked for."""

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from toto_compat.contract.request import Environment
from toto_compat.environments import virtualenv
from toto_compat.environments.requirements import requirements_of
from toto_compat.environments.virtualenv import Virtualenv, _check_versions, build_venv, read_built, venv_folder
from toto_compat.errors import EnvironmentBuildError

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
ENVIRONMENT = Environment(torch="2.13.0", build="cpu", python=PYTHON, pins={"einops": "0.8.1", "numpy": "2.1.3"})
NAME = "torch-2.13.0-cpu"
TORCH = "class _T:\n    def numpy(self): return self\ndef zeros(n): return _T()\n__version__ = '{version}'\n"


def add_wheel(folder: Path, name: str, version: str, files: dict[str, str] | None = None, requires: str = "") -> None:
    """A wheel is a zip file with three lines of metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in (files or {}).items():
            wheel.writestr(path, text)
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def add_torch(folder: Path, version: str, cuda: str | None = None) -> None:
    files = {"torch/__init__.py": "from torch import version\n" + TORCH.format(version=version)}
    add_wheel(folder, "torch", version, files | {"torch/version.py": f"cuda = {cuda!r}\n"})


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of stand-ins, and pip told to look nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    add_torch(folder, "2.13.0+cpu")
    toto = {f"toto/{path}.py": "" for path in ("__init__", "model/__init__", "model/toto", "inference/__init__")}
    add_wheel(folder, "toto-ts", "0.2.0", toto | {"toto/inference/forecaster.py": ""}, requires="torch==2.7.0")
    for requirement in requirements_of(ENVIRONMENT).others:
        name, _, version = requirement.replace("<", "==").replace(">=", "==").partition("==")
        module = {"numpy/__init__.py": ""} if name == "numpy" else {}
        add_wheel(folder, name, version.strip("=") or "1.0", module)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    return folder


def left_in(tmp_path: Path) -> list[str]:
    """What lies in the folder of virtualenvs besides logs and locks."""
    found = (tmp_path / "cache" / "venvs").iterdir()
    return sorted(path.name for path in found if path.suffix not in (".log", ".lock"))


def test_a_virtualenv_is_built_once_found_again_and_built_anew_if_somebody_changed_it(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")  # else no index is asked, and none is said not to answer
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "an-empty-index").as_uri())
    environment = ENVIRONMENT.model_copy(update={"index": "http://127.0.0.1:9/whl/cpu"})
    folder = venv_folder(NAME, environment)
    (folder.parent / f".building-{folder.name}-of-a-killed-builder" / "bin").mkdir(parents=True)
    said: list[str] = []
    first = build_venv(NAME, environment, said.append)
    assert f"{NAME}: http://127.0.0.1:9/whl/cpu does not answer, taking your own pip index" in said
    assert "torch 2.13.0+cpu ready" in said[-1]
    assert left_in(tmp_path) == [folder.name]
    assert "einops==0.8.1" in (folder / "lock.txt").read_text()
    script = (folder / "bin" / "pip").read_text()
    assert f"{folder}/bin/python" in script
    assert ".building-" not in script

    said.clear()
    assert build_venv(NAME, environment, said.append) == first
    assert said == []

    add_wheel(wheelhouse, "einops", "0.9.9")
    subprocess.run([first.python, "-m", "pip", "install", "-q", "einops==0.9.9"], check=True)
    second = build_venv(NAME, environment, said.append)
    assert "changed or is damaged" in said[0]
    assert second.lock == first.lock


def test_what_another_machine_builds_in_a_shared_folder_is_left_alone_and_what_it_has_built_is_taken(
    wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of some shared file systems holds on one machine alone."""
    folder = venv_folder(NAME, ENVIRONMENT)
    of_another = folder.with_name(f".building-{folder.name}-00000000.00000000-abc")
    of_another.mkdir(parents=True)
    install, built = virtualenv._install, list[Virtualenv]()

    def another_is_quicker(*asked: Any, **given: Any) -> Any:
        monkeypatch.setattr(virtualenv, "_install", install)
        built.append(build_venv(NAME, ENVIRONMENT, print))
        (built[0].folder / "mark").touch()
        return install(*asked, **given)

    monkeypatch.setattr(virtualenv, "_install", another_is_quicker)
    monkeypatch.setattr(virtualenv, "build_lock", lambda *_: nullcontext())
    monkeypatch.setattr(virtualenv, "made_on_another_machine", lambda _: True)
    assert build_venv(NAME, ENVIRONMENT, print) == built[0]
    assert (folder / "mark").exists()
    assert of_another.is_dir()


def test_a_fork_of_toto_ts_is_installed_in_the_place_of_a_release(wheelhouse: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    fork.mkdir()
    toto = {
        f"toto/{path}.py": "" for path in ("model/__init__", "model/toto", "inference/__init__", "inference/forecaster")
    }
    add_wheel(fork, "toto-ts", "0.2.0+mine", toto | {"toto/__init__.py": "FORKED = True\n"}, requires="torch==2.7.0")
    [wheel] = fork.glob("*.whl")
    environment = ENVIRONMENT.model_copy(update={"toto_ts": str(wheel)})
    built = build_venv(NAME, environment, print)
    done = subprocess.run([built.python, "-c", "import toto; print(toto.FORKED)"], capture_output=True, check=True)
    assert done.stdout.strip() == b"True"
    assert built.folder != venv_folder(NAME, ENVIRONMENT)


def test_another_specification_is_another_folder(tmp_path: Path) -> None:
    changes: tuple[dict[str, object], ...] = (
        {"pins": {}},
        {"index": "https://example.org"},
        {"build": "cu128"},
        {"xformers": "0.0.30"},
    )
    others = [ENVIRONMENT.model_copy(update=change) for change in changes]
    folders = {venv_folder(NAME, environment, tmp_path) for environment in (ENVIRONMENT, *others)}
    assert len(folders) == len(others) + 1
    # where the container comes from changes nothing in a virtualenv
    image = ENVIRONMENT.model_copy(update={"base_image": "debian"})
    assert venv_folder(NAME, image, tmp_path) == venv_folder(NAME, ENVIRONMENT, tmp_path)


def test_torch_that_does_not_install_leaves_nothing_but_the_log(wheelhouse: Path, tmp_path: Path) -> None:
    for wheel in wheelhouse.glob("torch-*"):
        wheel.unlink()
    with pytest.raises(EnvironmentBuildError, match=r"No matching distribution found for torch==2\.13\.0") as caught:
        build_venv(NAME, ENVIRONMENT, lambda _: None)
    log = next((tmp_path / "cache" / "venvs").glob("*.log"))
    assert str(log) in caught.value.hint
    assert "No matching distribution" in log.read_text()
    assert left_in(tmp_path) == []


def test_a_pin_that_wants_another_torch_is_refused(wheelhouse: Path, tmp_path: Path) -> None:
    add_torch(wheelhouse, "2.7.0")
    add_wheel(wheelhouse, "einops", "0.8.1", requires="torch==2.7.0")
    with pytest.raises(EnvironmentBuildError, match="installing what toto-ts needs failed"):
        build_venv(NAME, ENVIRONMENT, lambda _: None)
    assert left_in(tmp_path) == []


def installed(**changes: str | None) -> dict[str, object]:
    versions = {"einops": "0.8.1", "numpy": "2.1.3", "toto_ts": "0.2.0"} | changes
    return {"torch": changes.get("torch") or "2.13.0+cu128", "cuda": changes.get("cuda", "12.8"), "versions": versions}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"torch": "2.7.0"}, "asked for torch 2.13.0, but 2.7.0 is installed"),
        ({"cuda": "13.0"}, "asked for the cu128 build of torch 2.13.0, the index gave one for CUDA 13.0"),
        ({"cuda": None}, "a CPU build"),
        ({"einops": "0.7.0"}, "asked for einops 0.8.1, but 0.7.0 is installed"),
    ],
)
def test_anything_but_what_was_asked_for_is_refused(found: dict[str, str | None], says: str) -> None:
    wanted = ENVIRONMENT.model_copy(update={"build": "cu128"})
    _check_versions(NAME, wanted, installed(), Path("log"))
    with pytest.raises(EnvironmentBuildError, match=says):
        _check_versions(NAME, wanted, installed(**found), Path("log"))


def test_toto_that_does_not_import_is_an_error_of_the_environment(wheelhouse: Path, tmp_path: Path) -> None:
    add_wheel(wheelhouse, "toto-ts", "0.2.0", {"toto/__init__.py": "raise ImportError('no such op')"})
    with pytest.raises(EnvironmentBuildError, match="no such op"):
        build_venv(NAME, ENVIRONMENT, lambda _: None)
    assert left_in(tmp_path) == []


def test_the_second_of_two_builders_waits_and_says_so(wheelhouse: Path) -> None:
    waiting = threading.Event()
    said: dict[str, list[str]] = {"first": [], "second": []}
    built = []

    def say_second(line: str) -> None:
        said["second"].append(line)
        waiting.set()

    second = threading.Thread(target=lambda: built.append(build_venv(NAME, ENVIRONMENT, say_second)))

    def say_first(line: str) -> None:
        said["first"].append(line)
        if "new virtualenv" in line:
            second.start()
            assert waiting.wait(60)

    built.append(build_venv(NAME, ENVIRONMENT, say_first))
    second.join(60)
    assert built[0] == built[1]
    assert said["second"] == [f"{NAME}: another run is building it, waiting for that"]


def test_a_folder_without_its_marker_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert read_built(tmp_path) is None


def test_a_full_disk_is_found_before_anything_is_downloaded(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentBuildError, match="needs about 2 GB") as caught:
        build_venv(NAME, ENVIRONMENT, lambda _: None)
    assert "toto-compat prune" in caught.value.hint
    assert left_in(tmp_path) == []


def test_a_missing_compiler_is_found_before_anything_is_built(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentBuildError, match="no C\\+\\+ compiler") as caught:
        build_venv(NAME, ENVIRONMENT, lambda _: None)
    assert "apt-get install g++" in caught.value.hint
    assert not (tmp_path / "cache" / "venvs").exists()
