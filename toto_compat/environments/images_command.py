"""`toto-compat images`: what was built here, building it ahead of a run, and removing what nobody needs any more."""

import time
from pathlib import Path

import click
import docker
import docker.errors
from docker.models.images import Image
from tabulate import tabulate

from toto_compat.contract.request import Environment
from toto_compat.environments.base_image import own_tags, reason_of
from toto_compat.environments.build_lock import build_lock
from toto_compat.environments.engine import LABEL, connect, labelled_images
from toto_compat.environments.image import builder_lock, drop_stages, ensure_image, plan_image
from toto_compat.environments.leftovers import remove_leftovers
from toto_compat.environments.locks import named_environments
from toto_compat.errors import EngineError, EnvironmentBuildError
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option


@click.group("images", invoke_without_command=True)
@click.pass_context
def images_command(context: click.Context) -> None:
    """List, build or remove the container images of the environments. Without a subcommand they are listed."""
    if context.invoked_subcommand is None:
        context.invoke(list_images)


@images_command.command("list", short_help="List the images that were made here.")
@matrix_option
def list_images(matrix_file: Path | None = None) -> None:
    """List every image that was made here, with its size, and if it is what matrix.yaml asks for now."""
    matrix = load_matrix(find_matrix_file(matrix_file))
    with connect() as client:
        current = current_tags(client, matrix.environments)
        rows = []
        for image in own_images(client):
            tag = own_tags(image)[0]
            state = "current" if tag in current else "base" if image.labels.get(LABEL) == "base" else "not needed"
            torch = image.labels.get(f"{LABEL}.torch", "")
            rows.append([tag, torch, f"{image.attrs['Size'] / 1e9:.2f} GB", image.attrs["Created"][:10], state])
    click.echo(tabulate(rows, headers=["image", "torch", "size", "built", ""]) if rows else "no images were made yet")


@images_command.command("build")
@click.argument("environments", nargs=-1, required=True)
@click.option("--rebuild", is_flag=True, help="Build also what is there already, from the first step on.")
@click.option(
    "--online", is_flag=True, help="Let pip in the build download the wheels, instead of fetching them first."
)
@matrix_option
def build_images(environments: tuple[str, ...], rebuild: bool, online: bool, matrix_file: Path | None) -> None:
    """Build the images of ENVIRONMENTS from their locks."""
    matrix = load_matrix(find_matrix_file(matrix_file))
    with connect() as client:
        for name, environment in named_environments(matrix, environments).items():
            started = time.monotonic()
            plan, image = ensure_image(client, name, environment, click.echo, rebuild=rebuild, online=online)
            click.echo(f"{plan.tag}  {image.attrs['Size'] / 1e9:.2f} GB  {time.monotonic() - started:.1f} s")


@images_command.command("prune")
@click.option("--all", "everything", is_flag=True, help="Also the images that matrix.yaml needs, and the offline base.")
@matrix_option
def prune_images(everything: bool, matrix_file: Path | None) -> None:
    """Remove images that no environment of matrix.yaml needs any more. Only what toto-compat made."""
    matrix = load_matrix(find_matrix_file(matrix_file))
    with connect() as client:
        for left in remove_leftovers(client):
            click.echo(f"removed {left}")
        # not beside a build: with an image go the layers under it, which a build may have found in its cache
        with build_lock(builder_lock(), "images", click.echo):
            freed = _remove_images(
                client, set() if everything else current_tags(client, matrix.environments), everything
            )
            drop_stages(client, "stage-torch", "stage-toto", "stage")
    click.echo(f"images of {freed / 1e9:.2f} GB removed (layers they share with others stay)")


def _remove_images(client: docker.DockerClient, keep: set[str], everything: bool) -> int:
    """Remove images and return how many bytes went; the base stays unless everything is to go."""
    freed = 0
    for image in own_images(client):
        if not everything and (image.labels.get(LABEL) == "base" or keep.intersection(image.tags)):
            continue
        for tag in own_tags(image):
            try:
                client.images.remove(tag)
            except docker.errors.APIError as error:
                click.echo(f"kept {tag}: {reason_of(error)}", err=True)
            else:
                freed += image.attrs["Size"]
                click.echo(f"removed {tag}, {image.attrs['Size'] / 1e9:.2f} GB")
    return freed


def own_images(client: docker.DockerClient) -> list[Image]:
    """List images with our label and a name of ours, newest first; untagged ones are stages of a build."""
    try:
        images = labelled_images(client, LABEL)
    except docker.errors.APIError as error:
        raise EngineError(f"the engine does not list its images: {reason_of(error)}") from error
    named = [image for image in images if own_tags(image)]
    return sorted(named, key=lambda image: str(image.attrs["Created"]), reverse=True)


def current_tags(client: docker.DockerClient, environments: dict[str, Environment]) -> set[str]:
    """Name the tags that matrix.yaml and the locks stand for now; an environment without a lock needs none."""
    tags = set()
    for name, environment in environments.items():
        try:
            plan = plan_image(client, name, environment)
        except EnvironmentBuildError:
            continue
        if plan is not None:
            tags.add(plan.tag)
    return tags
