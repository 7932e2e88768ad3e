"""docker/offline-base.sh with a Python that Debian does not have."""

import subprocess
from pathlib import Path

import docker
import pytest

from tests.environments.small_project import REPOSITORY
from toto_compat.environments.base_image import find_base, resolve_base
from toto_compat.environments.pythons import find_python
from toto_compat.errors import EnvironmentBuildError

NOWHERE = "registry.invalid/nothing:here"


def offline_base(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(REPOSITORY / "docker/offline-base.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--python",), "--python needs an interpreter"), (("--pyton", "python3.12"), "unknown option --pyton")],
)
def test_a_mistyped_call_is_told_before_anything_is_made(arguments: tuple[str, ...], message: str) -> None:
    done = offline_base(*arguments)
    assert (done.returncode, message in done.stderr) == (2, True)


@pytest.mark.docker
def test_an_interpreter_that_does_not_run_is_named(client: docker.DockerClient, tmp_path: Path) -> None:
    done = offline_base("--python", str(tmp_path / "python3.12"))
    assert done.returncode == 1
    assert f"error: {tmp_path}/python3.12 does not run" in done.stderr


@pytest.mark.docker
def test_the_cuda_environments_get_a_base_with_the_python_of_this_machine(client: docker.DockerClient) -> None:
    try:
        python = find_python("3.12").executable
    except EnvironmentBuildError as error:
        pytest.skip(f"{error.message}: {error.hint}")
    if find_base(client, NOWHERE, "3.12") is None:
        with pytest.raises(EnvironmentBuildError) as caught:
            resolve_base(client, NOWHERE, "3.12", print)
        assert f"docker/offline-base.sh --python {python}" in caught.value.hint
    done = offline_base("--python", python)
    assert done.returncode == 0, done.stderr
    base = find_base(client, NOWHERE, "3.12")
    assert base is not None
    assert (base.complete, base.reference.endswith("-python3.12")) == (True, True)
    assert offline_base("--python", python).stdout == f"{base.reference} is there already\n"
