"""Images are named by what is in them, built offline from locks, and a failed build leaves nothing."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker.models.images import Image

from tests.environments.small_project import (
    SMALL,
    SMALL_ENVIRONMENT,
    SmallProject,
    make_small_project,
)
from toto_compat.environments import image as image_module
from toto_compat.environments.base_image import BaseImage, own_tags, resolve_base
from toto_compat.environments.build_lock import build_lock
from toto_compat.environments.engine import EngineFacts, local_image
from toto_compat.environments.image import ImagePlan, blame_build, builder_lock, ensure_image
from toto_compat.environments.images_command import current_tags, own_images
from toto_compat.environments.locks import Lock, LockedPackage
from toto_compat.environments.sbom import image_bill
from toto_compat.environments.wheelhouse import wheel_path
from toto_compat.errors import EngineError, EnvironmentBuildError, StorageError

LIST_FILES = (
    "import hashlib, pathlib\n"
    "for path in sorted(p for root in ('/opt/venv', '/opt/torch') for p in pathlib.Path(root).rglob('*')):\n"
    "    if path.is_file() and path.suffix != '.pyc':\n"
    "        print(path, hashlib.sha256(path.read_bytes()).hexdigest())\n"
)
# pip is not in the image's environment; it runs out of the wheel that Debian's python carries
FREEZE = "PYTHONPATH=$(ls /usr/share/python-wheels/pip-*.whl) /opt/venv/bin/python -m pip freeze --all --exclude pip"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: docker.DockerClient) -> Iterator[SmallProject]:
    """A small project whose image no other test has, removed afterwards."""
    small = make_small_project(tmp_path, monkeypatch, note=str(tmp_path))
    yield small
    with build_lock(builder_lock(), SMALL, lambda _: None):  # its layers may be what another test builds on right now
        for image in images_of(client, small):
            client.images.remove(str(image.id), force=True)


def images_of(client: docker.DockerClient, project: SmallProject) -> list[Image]:
    """Of this project alone: other test workers have small images, too."""
    return [image for image in own_images(client) if image.labels.get("toto-compat.lock") == project.lock.identity]


def quiet(_: str) -> None:
    return


def run_in(client: docker.DockerClient, image: str, *command: str) -> str:
    shown = client.containers.run(image, list(command), network_mode="none", remove=True, labels=["toto-compat"])
    return bytes(shown).decode()


# --- with an engine ---------------------------------------------------------------------------------------------------


@pytest.mark.docker
def test_an_image_that_is_there_is_not_built_again(client: docker.DockerClient, project: SmallProject) -> None:
    said: list[str] = []
    _, first = ensure_image(client, SMALL, SMALL_ENVIRONMENT, said.append)
    assert any("built in" in line for line in said)
    said.clear()
    _, second = ensure_image(client, SMALL, SMALL_ENVIRONMENT, said.append)
    assert second.id == first.id
    assert not any("build" in line for line in said)


@pytest.mark.docker
def test_a_build_writes_down_what_is_in_the_image(client: docker.DockerClient, project: SmallProject) -> None:
    _, image = ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    bill = json.loads(image_bill(project.lock).read_bytes())
    told = {(one["name"], one["version"]) for one in bill["components"] if one.get("purl", "").startswith("pkg:deb/")}
    listed = run_in(client, str(image.id), "dpkg-query", "-W", "-f", "${Package} ${Version}\\n")
    assert told == {tuple(line.split(" ")) for line in listed.splitlines()}
    [python] = [
        one["version"] for one in bill["components"] if one["name"] == "python" and one["type"] == "application"
    ]
    assert run_in(client, str(image.id), "/opt/venv/bin/python", "--version").split()[1] == python
    assert {"name": "toto-compat:image", "value": str(image.id)} in bill["metadata"]["component"]["properties"]


@pytest.mark.docker
def test_built_twice_from_the_lock_the_files_are_the_same(client: docker.DockerClient, project: SmallProject) -> None:
    _, first = ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    files = run_in(client, str(first.id), "/opt/venv/bin/python", "-c", LIST_FILES)
    frozen = run_in(client, str(first.id), "sh", "-c", FREEZE)
    _, second = ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet, rebuild=True)
    assert second.id != first.id
    assert run_in(client, str(second.id), "/opt/venv/bin/python", "-c", LIST_FILES) == files
    assert run_in(client, str(second.id), "sh", "-c", FREEZE) == frozen
    assert frozen.split() == ["torch==9.9.9", "toto-ts==0.2.0"]  # the lock and nothing else
    assert "/opt/torch/lib/python3.11/site-packages/torch.py" in files


@pytest.mark.docker
def test_the_image_runs_as_nobody_in_particular_and_carries_its_labels(
    client: docker.DockerClient,
    project: SmallProject,
) -> None:
    plan, image = ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    assert image.attrs["Config"]["User"] == "10001:10001"
    assert image.labels["toto-compat"] == "environment"
    assert image.labels["toto-compat.identity"] == plan.identity
    assert plan.tag in image.tags


@pytest.mark.docker
def test_nothing_of_pips_settings_or_wheels_is_in_the_image(client: docker.DockerClient, project: SmallProject) -> None:
    _, image = ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    look = "ls /build /etc/pip.conf /opt/venv/pip.conf 2>/dev/null; find /opt /srv /tmp /var/tmp -name '*.whl'; true"
    assert run_in(client, str(image.id), "sh", "-c", look) == ""
    assert not any("PIP_" in variable for variable in image.attrs["Config"]["Env"])


@pytest.mark.docker
def test_a_missing_base_without_registry_is_told_with_the_script_that_makes_one(client: docker.DockerClient) -> None:
    with pytest.raises(EnvironmentBuildError, match="is not on the engine and no registry answers") as caught:
        resolve_base(client, "registry.invalid/nothing:here", "3.99", quiet)
    assert "docker/offline-base.sh" in caught.value.hint


@pytest.mark.docker
def test_the_offline_base_stands_in_and_says_so(client: docker.DockerClient) -> None:
    said: list[str] = []
    base = resolve_base(client, "registry.invalid/nothing:here", "3.11", said.append)
    assert base.reference.startswith("toto-compat-base:")
    assert "using the offline base" in said[-1]


@pytest.mark.docker
def test_a_wheel_whose_hash_does_not_match_stops_the_build(
    client: docker.DockerClient,
    project: SmallProject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = project.lock.packages[1]
    wheel_path(package).write_bytes(wheel_path(package).read_bytes() + b"\0")
    # as if it had been replaced after the check on this side: pip in the build checks again
    monkeypatch.setattr(image_module, "verify_wheels", lambda _: None)
    with pytest.raises(EnvironmentBuildError, match="does not match the hash in its lock"):
        ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    assert images_of(client, project) == []


@pytest.mark.docker
def test_a_wheel_that_vanishes_while_it_is_sent_is_no_lost_engine(
    client: docker.DockerClient,
    project: SmallProject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_module, "fetch_wheels", lambda *_: None)
    monkeypatch.setattr(image_module, "verify_wheels", lambda _: None)
    wheel_path(project.lock.packages[1]).unlink()
    with pytest.raises(EnvironmentBuildError, match="cannot be read: No such file") as caught:
        ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    assert "toto-compat fetch" in caught.value.hint
    assert images_of(client, project) == []


@pytest.mark.docker
def test_an_online_build_broken_off_leaves_no_stage_with_pips_settings(
    client: docker.DockerClient,
    project: SmallProject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = resolve_base(client, "registry.invalid/nothing:here", "3.11", quiet)
    monkeypatch.setattr(image_module, "resolve_base", lambda *_: base)
    # a label of its own: the stages of the machine's real images are not this test's to remove
    label = "toto-compat-broken-off"
    dockerfile = project.folder / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("LABEL toto-compat=", f"LABEL {label}="))
    monkeypatch.setattr(image_module, "LABEL", label)
    monkeypatch.setattr(image_module, "_COLOUR", CtrlC("COPY toto"))
    with pytest.raises(KeyboardInterrupt):
        ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet, online=True)
    assert client.api.images(filters={"label": label}, all=True) == []


class CtrlC:
    """Presses it when the build says certain words."""

    def __init__(self, words: str) -> None:
        self._words = words

    def sub(self, _: str, text: str) -> str:
        if self._words in text:
            raise KeyboardInterrupt
        return text


@pytest.mark.docker
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("RUN echo something is wrong here && exit 3", "something is wrong here"),
        ("RUN head -c 9 /dev/zero >/dev/full", "the engine's disk is full"),
        ("FROM", "the engine refuses to build"),
    ],
    ids=["failing step", "full disk", "syntax"],
)
def test_a_build_that_fails_says_why_and_leaves_nothing(
    client: docker.DockerClient,
    project: SmallProject,
    step: str,
    message: str,
) -> None:
    dockerfile = project.folder / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + f"\n{step}\n")
    with pytest.raises(EnvironmentBuildError, match=message):
        ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    assert images_of(client, project) == []


@pytest.mark.docker
def test_a_base_without_the_python_asked_for_is_blamed(
    client: docker.DockerClient,
    project: SmallProject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = resolve_base(client, "registry.invalid/nothing:here", "3.11", quiet)
    lock = Lock(SMALL, "3.99", project.lock.asked, project.lock.packages)
    monkeypatch.setattr(image_module, "read_lock", lambda *_: lock)
    monkeypatch.setattr(image_module, "resolve_base", lambda *_: base)
    with pytest.raises(EnvironmentBuildError, match=r"has no complete python3\.99"):
        ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)


# --- without one ------------------------------------------------------------------------------------------------------


def plan_of(*, dockerfile: bytes = b"FROM x", version: str = "1.0", base: str = "sha256:1") -> ImagePlan:
    package = LockedPackage("torch", version, version.replace(".", "").ljust(64, "0"), "torch.whl")
    lock = Lock(SMALL, "3.11", (), (package,))
    return ImagePlan(SMALL, lock, BaseImage("asked", "reference", base, complete=True), dockerfile)


@pytest.mark.parametrize(
    "other",
    [plan_of(dockerfile=b"FROM y"), plan_of(version="1.1"), plan_of(base="sha256:2")],
    ids=["file", "lock", "base"],
)
def test_dockerfile_lock_and_base_are_the_images_identity(other: ImagePlan) -> None:
    assert plan_of().tag == plan_of().tag
    assert other.tag != plan_of().tag


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (requests.exceptions.ConnectionError("reset"), EngineError),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (EnvironmentBuildError("a step failed"), EnvironmentBuildError),
    ],
    ids=["Ctrl-C", "engine", "this machine's disk", "step"],
)
def test_stages_with_pips_settings_go_however_an_online_build_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: BaseException, told: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise broken

    dropped: list[str] = []
    monkeypatch.setattr(image_module, "engine_facts", lambda _: EngineFacts("1", 1, (), (), "", None))
    monkeypatch.setattr(image_module, "_stream_build", fail)
    monkeypatch.setattr(image_module, "drop_stages", lambda _, *values, **__: dropped.extend(values))
    client: Any = None
    with pytest.raises(told):
        image_module._build(client, plan_of(), SMALL_ENVIRONMENT, quiet, tmp_path / "log", rebuild=False, online=True)
    assert {"stage-toto", "stage-torch"} <= set(dropped)


def test_a_full_disk_in_a_build_is_told_as_one() -> None:
    error = blame_build(plan_of(), ["write /opt/x: no space left on device"], Path("log"))
    assert "disk is full" in error.message
    assert "toto-compat images prune" in error.hint


@pytest.mark.docker
def test_local_image_of_a_name_nobody_has_is_none(client: docker.DockerClient) -> None:
    assert local_image(client, "toto-compat/nobody-has-this:1") is None


@pytest.mark.docker
@pytest.mark.parametrize("name", ["Not A Name", ""])
def test_a_name_that_is_none_is_blamed_on_its_environment(client: docker.DockerClient, name: str) -> None:
    with pytest.raises(EnvironmentBuildError, match="refuses the image name") as caught:
        local_image(client, name)
    assert "base_image" in caught.value.hint


@pytest.mark.docker
def test_an_environment_with_a_bad_image_name_does_not_hide_the_others(
    client: docker.DockerClient, project: SmallProject
) -> None:
    bad = SMALL_ENVIRONMENT.model_copy(update={"base_image": "Not A Name"})
    with pytest.raises(EnvironmentBuildError, match="refuses the image name"):
        ensure_image(client, SMALL, bad, quiet)
    assert current_tags(client, {SMALL: bad}) == set()
    (tag,) = current_tags(client, {SMALL: SMALL_ENVIRONMENT})
    assert tag.startswith(f"toto-compat/{SMALL}:")


@pytest.mark.docker
def test_an_image_that_somebody_built_on_ours_is_not_ours(client: docker.DockerClient, project: SmallProject) -> None:
    plan, image = ensure_image(client, SMALL, SMALL_ENVIRONMENT, quiet)
    image.tag("somebody/elses-name", "1")
    container = client.containers.create(str(image.id), ["true"])
    try:
        built_on_it = container.commit("somebody/built-on-it", "1")
    finally:
        container.remove()
    try:
        assert built_on_it.labels["toto-compat"] == "environment"
        assert [one.id for one in images_of(client, project)] == [image.id]
        assert own_tags(client.images.get(str(image.id))) == [plan.tag]
    finally:
        client.images.remove("somebody/built-on-it:1")
        client.images.remove("somebody/elses-name:1")
