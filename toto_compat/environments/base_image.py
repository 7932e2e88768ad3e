"""The image an environment is built on: pinned by digest, found on the engine, pulled, or made without a registry."""

from dataclasses import dataclass

import docker
import docker.errors
import requests
from docker.models.images import Image
from docker.utils import parse_repository_tag

from toto_compat.environments.build_lock import OnLine
from toto_compat.environments.engine import LABEL, labelled_images, local_image, registry_digest
from toto_compat.environments.locks import read_base_digests, record_base_digest
from toto_compat.environments.pythons import find_python
from toto_compat.errors import EnvironmentBuildError

OFFLINE_BASE = "toto-compat-base"
REPOSITORY = "toto-compat"  # of the environments' own images


@dataclass(frozen=True)
class BaseImage:
    """The image an environment is built on, found on the engine."""

    asked: str  # as matrix.yaml names it
    reference: str  # what FROM gets
    identity: str  # registry digest, or the image's id where no registry knows it
    complete: bool  # has python, headers and compiler: no network is needed to prepare it

    @property
    def is_stand_in(self) -> bool:
        """Tell if it is not the image asked for but one made of Debian packages, for want of a registry."""
        return self.reference.startswith(f"{OFFLINE_BASE}:") and self.reference != self.asked


def find_base(client: docker.DockerClient, asked: str, python: str) -> BaseImage | None:
    """Find the base if it is on the engine already: by its pinned digest, by its tag, or the offline base."""
    digest = read_base_digests().get(asked)
    reference = _by_digest(asked, digest) if digest else asked
    image = local_image(client, reference)
    if image is not None:
        return BaseImage(asked, reference, digest or _identity(image), complete=_is_complete(image, python))
    for offline in labelled_images(client, f"{LABEL}=base", name=OFFLINE_BASE):
        if offline.labels.get(f"{LABEL}.python") == python and own_tags(offline):
            return BaseImage(asked, own_tags(offline)[0], str(offline.id), complete=True)
    return None


def resolve_base(client: docker.DockerClient, asked: str, python: str, say: OnLine) -> BaseImage:
    """Find the base or pull it; the first machine that reaches a registry writes its digest down."""
    base = find_base(client, asked, python)
    if base is not None and not base.is_stand_in:
        return base
    digest = read_base_digests().get(asked) or registry_digest(client, asked)
    if digest is not None:
        reference = _by_digest(asked, digest)
        say(f"pulling {asked} ({digest[:19]})")
        try:
            client.images.pull(reference)
        except (docker.errors.APIError, requests.exceptions.RequestException) as error:
            say(f"{asked} cannot be pulled: {reason_of(error)}")
        else:
            if asked not in read_base_digests():
                record_base_digest(asked, digest)
                say(f"{asked} is pinned now: commit docker/locks/base-images.yaml")
            image = client.images.get(reference)
            return BaseImage(asked, reference, digest, complete=_is_complete(image, python))
    if base is not None:
        say(f"{asked} is not here and no registry answers: using the offline base {base.reference}")
        return base
    raise EnvironmentBuildError(
        f"the base image {asked} is not on the engine and no registry answers",
        hint="`docker/offline-base.sh [SUITE]` makes a base image from Debian packages, where the suite has"
        f" Python {python} (bookworm 3.11, trixie 3.13); `docker/offline-base.sh --python {_own_python(python)}` adds"
        " the one of this machine. Or `docker load` the image from a machine that has it",
    )


def own_tags(image: Image) -> list[str]:
    """List the names that were given here: an image that somebody built on one of ours inherits its label."""
    return [tag for tag in image.tags if tag.startswith((f"{REPOSITORY}/", f"{OFFLINE_BASE}:"))]


def reason_of(error: Exception) -> str:
    text = getattr(error, "explanation", None) or str(error)
    return str(text).splitlines()[0][:200]


def _by_digest(image: str, digest: str) -> str:
    repository, _ = parse_repository_tag(image.partition("@")[0])
    return f"{repository}@{digest}"


def _own_python(minor: str) -> str:
    try:
        return find_python(minor).executable
    except EnvironmentBuildError:
        return f"python{minor}"


def _identity(image: Image) -> str:
    digests = [digest.partition("@")[2] for digest in image.attrs.get("RepoDigests") or []]
    return digests[0] if digests else str(image.id)


def _is_complete(image: Image, python: str) -> bool:
    return bool(image.labels.get(LABEL) == "base" and image.labels.get(f"{LABEL}.python") == python)
