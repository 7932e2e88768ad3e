"""`toto-compat images` builds, lists and removes images, and touches nothing that was not made here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from click.testing import CliRunner
from docker.models.images import Image

from tests.environments.small_project import SMALL, SMALL_ENVIRONMENT, SmallProject, make_small_project
from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.environments import images_command
from toto_compat.environments.build_lock import build_lock
from toto_compat.environments.image import builder_lock
from toto_compat.environments.images_command import own_images
from toto_compat.errors import SelectionError

pytestmark = pytest.mark.docker


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: docker.DockerClient) -> Iterator[SmallProject]:
    """A matrix with the small environment. The command sees its images alone: others belong to other tests."""
    small = make_small_project(tmp_path, monkeypatch, note=str(tmp_path))
    write_matrix(tmp_path, with_small=True)
    monkeypatch.chdir(tmp_path)

    def images_of_this_test(_: docker.DockerClient) -> list[Image]:
        return [image for image in own_images(client) if image.labels.get("toto-compat.lock") == small.lock.identity]

    monkeypatch.setattr(images_command, "own_images", images_of_this_test)
    monkeypatch.setattr(images_command, "drop_stages", lambda *_: True)
    yield small
    with build_lock(builder_lock(), SMALL, lambda _: None):  # its layers may be what another test builds on right now
        for image in images_of_this_test(client):
            client.images.remove(str(image.id), force=True)


def write_matrix(folder: Path, *, with_small: bool) -> None:
    wanted = SMALL_ENVIRONMENT
    line = (
        f'  {SMALL}: {{torch: "{wanted.torch}", build: {wanted.build}, python: "{wanted.python}",'
        f" base_image: {wanted.base_image}}}\n"
    )
    before, after = MATRIX_TEXT.split("caches:\n")
    (folder / "matrix.yaml").write_text(f"{before}{line if with_small else ''}caches:\n{after}", encoding="utf-8")


def images(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["images", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_what_was_built_is_listed_and_goes_once_no_environment_needs_it(
    project: SmallProject, client: docker.DockerClient
) -> None:
    assert images() == "no images were made yet\n"
    assert f"toto-compat/{SMALL}:" in images("build", SMALL)
    listed = images("list").splitlines()[-1]
    tag, torch, *_, state = listed.split()
    assert (tag.partition(":")[0], torch, state) == (f"toto-compat/{SMALL}", "9.9.9", "current")

    assert "images of 0.00 GB removed" in images("prune")
    assert tag in images()

    write_matrix(project.folder, with_small=False)
    assert images().rstrip().endswith("not needed")
    container = client.containers.create(tag, ["true"])
    try:
        assert f"kept {tag}:" in images("prune")  # in use, and the engine says so
    finally:
        container.remove()
    assert f"removed {tag}" in images("prune")
    assert images() == "no images were made yet\n"


def test_an_environment_that_is_not_in_the_matrix_is_named(project: SmallProject) -> None:
    with pytest.raises(SelectionError, match=r"'torch-1\.0-cpu'"):
        images("build", "torch-1.0-cpu")


def test_an_image_that_is_removed_while_they_are_listed_is_left_out(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "sha256:" + 64 * "0"
    listed = client.api.images

    def with_one_that_is_gone(**options: Any) -> list[dict[str, Any]]:
        return [{"Id": gone}, *listed(**options)]

    monkeypatch.setattr(client.api, "images", with_one_that_is_gone)
    assert gone not in [image.id for image in own_images(client)]
