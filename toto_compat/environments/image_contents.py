"""What an image has beside the wheels of its lock, read from the image itself: Debian's packages and the interpreter.

Nothing of the image is run: the files are taken out of a container that never starts.
"""

import io
import tarfile
from email.parser import Parser

import docker
import docker.errors
from docker.models.containers import Container
from docker.models.images import Image

from toto_compat.environments.base_image import BaseImage
from toto_compat.environments.engine import LABEL
from toto_compat.environments.leftovers import RUNNER_LABEL, remove_container, runner_label
from toto_compat.environments.sbom import ImageContents, SystemPackage
from toto_compat.errors import EnvironmentBuildError

_PACKAGES, _DISTRIBUTION = "/var/lib/dpkg/status", "/usr/lib/os-release"
_LARGEST_FILE = 100_000_000


def read_contents(client: docker.DockerClient, image: Image, *, base: BaseImage, python: str) -> ImageContents:
    """Read what is in an image with this base and this minor version of Python."""
    container = client.containers.create(
        str(image.id), ["true"], network_mode="none", labels={LABEL: "bill", RUNNER_LABEL: runner_label()}
    )
    try:
        packages = installed_packages(_file(container, _PACKAGES))
        distribution = distribution_of(_file(container, _DISTRIBUTION))
    finally:
        remove_container(container)
    variables = dict(one.partition("=")[::2] for one in image.attrs["Config"].get("Env") or [])
    return ImageContents(
        image=str(image.id),
        base_digest="" if base.is_stand_in else base.identity,
        stand_in=f"{base.reference} {base.identity}" if base.is_stand_in else "",
        distribution=distribution,
        packages=packages,
        python=python_version(python, packages, variables.get("PYTHON_VERSION", "")),
    )


def installed_packages(status: bytes) -> tuple[SystemPackage, ...]:
    """List what dpkg's own list says is installed."""
    found = []
    for paragraph in status.decode(errors="replace").split("\n\n"):
        fields = Parser().parsestr(paragraph.strip(), headersonly=True)
        if str(fields["Status"]).endswith(" installed") and fields["Package"] and fields["Version"]:
            found.append(SystemPackage(fields["Package"], fields["Version"], fields["Architecture"] or "all"))
    return tuple(sorted(found, key=lambda one: (one.name, one.architecture)))


def distribution_of(release: bytes) -> str:
    """Name the distribution and its version, as os-release has them."""
    lines = release.decode(errors="replace").splitlines()
    told = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    return "-".join(filter(None, (told.get("ID", ""), told.get("VERSION_ID", ""))))


def python_version(minor: str, packages: tuple[SystemPackage, ...], told: str) -> str:
    """Say which interpreter runs the environment: that of Debian's packages, or what the base image says of its own."""
    if told.startswith(f"{minor}."):
        return told  # of the official images, whose own lies before Debian's
    of_debian = next((one.version for one in packages if one.name == f"python{minor}"), minor)
    return of_debian.partition("-")[0]


def _file(container: Container, path: str) -> bytes:
    """Take a file out; nothing where there is none, as in an image that is not Debian's."""
    try:
        pieces, facts = container.get_archive(path)
    except docker.errors.NotFound:
        return b""
    if facts is not None and facts["size"] > _LARGEST_FILE:
        raise EnvironmentBuildError(f"{path}: {facts['size'] / 1e6:.0f} MB, which no list of packages has")
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        member = archive.next()
        content = archive.extractfile(member) if member is not None and member.isfile() else None
        return content.read() if content is not None else b""
