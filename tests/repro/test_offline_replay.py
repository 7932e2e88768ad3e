"""A bundle with its wheels is built where no package index can be reached: from these wheels and from nothing else."""

import subprocess
from pathlib import Path

import pytest

from tests.environments.small_project import locked, tiny_wheel
from tests.repro.test_bundling import RED, with_matrix
from tests.verdict.sample_cells import production_incident
from tests.verdict.stored_runs import store_run
from toto_compat.contract.request import Environment
from toto_compat.environments import indexes, locks
from toto_compat.environments.locks import Lock, asked_of, format_lock, lock_path, ordered
from toto_compat.environments.requirements import requirements_of
from toto_compat.environments.virtualenv import build_venv
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.archive import unpack, write_bundle
from toto_compat.repro.replay import replayed

NAME = RED.partition("/")[0]
NOWHERE = "http://127.0.0.1:9/simple"  # the port of `discard`: nothing listens there
# What a new virtualenv is asked: of torch a tensor, of toto-ts two modules.
TORCH = """\
class version:
    cuda = None


class zeros:
    def __init__(self, size):
        self.size = size

    def numpy(self):
        return self


__version__ = "2.13.0+cpu"
"""
TOTO = {f"toto/{name}.py": "" for name in ("__init__", "model/__init__", "model/toto", "inference/__init__")}
TOTO["toto/inference/forecaster.py"] = ""


def small_wheels(environment: Environment, folder: Path) -> list[Path]:
    """Make every package that the environment names, with next to nothing in it."""
    wanted = requirements_of(environment)
    made = [tiny_wheel(folder, "torch", f"{environment.torch}+cpu", TORCH)]
    for requirement in (*wanted.others, *wanted.without_dependencies):
        name, pinned, version = requirement.partition("==")
        bare = name.partition("<")[0].partition(">")[0]
        more = TOTO if bare == "toto-ts" else {}
        made.append(tiny_wheel(folder, bare, version if pinned else "1.99", "nothing = None\n", more))
    # pydantic is wanted from 2.7 on
    return [*made, tiny_wheel(folder, "pydantic", "2.99")]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle that `--with-wheels` made of a red cell, its wheels fetched from a folder: there is no other index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "makers cache"))
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)
    result = production_incident()
    environment = result.request.environment
    wheels = {path.name: path for path in small_wheels(environment, tmp_path / "index")}
    wheels.pop("pydantic-1.99-py3-none-any.whl", None)
    monkeypatch.setattr(locks, "DOCKER_FOLDER", tmp_path / "docker")
    packages = [locked(path, "torch" if name.startswith("torch-") else "toto") for name, path in wheels.items()]
    lock = Lock(NAME, environment.python, asked_of(environment), ordered(packages))
    lock_path(NAME).parent.mkdir(parents=True)
    lock_path(NAME).write_text(format_lock(lock), encoding="utf-8")
    store_run(tmp_path / "results", "run", [result])
    with monkeypatch.context() as where_an_index_is:
        where_an_index_is.setenv("PIP_NO_INDEX", "1")
        where_an_index_is.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
        made = with_matrix("run", RED, "--with-wheels", "--no-trace", "-o", "b.zip")
    assert made.exit_code == 0, (made.output, made.exception)
    (tmp_path / "index").rename(tmp_path / "gone")
    # another machine, whose project has no lock of that environment, and whose cache lies in a folder with a space
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "their cache"))
    monkeypatch.setattr(locks, "DOCKER_FOLDER", tmp_path / "none")
    return tmp_path / "b.zip"


def test_it_is_built_from_the_wheels_of_the_bundle_and_no_index_is_asked(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = unpack(bundle, tmp_path / "out")
    wheels = {name for name in manifest.files if name.startswith("wheels/")}
    assert "wheels/torch-2.13.0+cpu-py3-none-any.whl" in wheels
    with replayed(bundle) as to_run:
        assert to_run.matrix_file is not None
        assert f"{len(wheels)} wheels come with it: no package index is asked" in capsys.readouterr().err
        environment = load_matrix(to_run.matrix_file).environments[NAME]
        with_index = environment.model_copy(update={"index": NOWHERE})
        monkeypatch.setattr("urllib.request.urlopen", lambda *_args, **_options: pytest.fail("it was asked"))
        assert indexes.index_options(with_index) == []
        built = build_venv(NAME, environment, lambda _line: None)
    listed = subprocess.run([built.python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    assert "torch==2.13.0+cpu" in listed
    assert len(listed.split()) == len(wheels)


def test_a_wheel_that_is_missing_is_told_and_not_asked_for_elsewhere(bundle: Path, tmp_path: Path) -> None:
    manifest = unpack(bundle, tmp_path / "out")
    files = {name: (tmp_path / "out" / name).read_bytes() for name in manifest.files if "/einops" not in name}
    target = tmp_path / "without.zip"
    write_bundle(target, manifest.model_dump(exclude={"files", "schema_version"}), files)
    with replayed(target) as to_run:
        assert to_run.matrix_file is not None
        environment = load_matrix(to_run.matrix_file).environments[NAME]
        with pytest.raises(EnvironmentBuildError, match="No matching distribution found for einops"):
            build_venv(NAME, environment, lambda _line: None)
