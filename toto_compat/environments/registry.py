"""Asks a container registry what a tag stands for, by a plain request: no engine is needed and nothing is pulled."""

import hashlib
import ipaddress
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message

from toto_compat.errors import EnvironmentBuildError

_DOCKER_HUB = "registry-1.docker.io"  # what 'python:3.12-slim' and 'docker.io/...' stand for
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ANSWER_SECONDS = 15.0
_LONGEST_ANSWER = 10_000_000
# An index of all platforms before the manifest of one: the digest of the index is what a pull by name gets.
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


class NoRegistryError(Exception):
    """No registry answers, or none that lets us in; `str()` says why. Another machine may do better."""


@dataclass(frozen=True)
class ImageName:
    """An image as a registry knows it: host[:port], repository, tag."""

    host: str
    repository: str
    tag: str

    @property
    def url(self) -> str:
        """Address its manifest; a registry on this very machine needs no TLS, as engines have it."""
        scheme = "http" if _is_loopback(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.repository}/manifests/{urllib.parse.quote(self.tag)}"


def parse_image_name(image: str) -> ImageName:
    """Read a name as engines do: the part before the first slash is a host if it looks like one."""
    first, slash, rest = image.partition("/")
    has_host = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    host, path = (first, rest) if has_host else (_DOCKER_HUB, image)
    repository, _, tag = path.partition(":")
    if host in ("docker.io", "index.docker.io"):
        host = _DOCKER_HUB
    if host == _DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository) or not re.fullmatch(r"[\w.-]{0,128}", tag):
        raise EnvironmentBuildError(
            f"{image!r} is no name of an image",
            hint="correct the environment's `base_image` in matrix.yaml; an image is named like python:3.12-slim",
        )
    return ImageName(host, repository, tag or "latest")


def ask_registry(image: str) -> str:
    """Return the digest that a tag stands for now.

    NoRegistryError if nobody answers; an image that the registry does not have is an EnvironmentBuildError.
    """
    name = parse_image_name(image)
    try:
        headers, body = _manifest(name, "HEAD", token="")
        digest = headers.get("Docker-Content-Digest") or ""
        if not digest:  # it need not say: the digest is the hash of the manifest
            headers, body = _manifest(name, "GET", token="")
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise EnvironmentBuildError(
                f"{name.host} has no image {name.repository}:{name.tag}",
                hint="correct the environment's `base_image` in matrix.yaml; old tags are deleted now and then",
            ) from error
        raise NoRegistryError(f"{name.host} answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise NoRegistryError(f"{name.host}: {getattr(error, 'reason', None) or error}") from error
    if not _DIGEST.fullmatch(digest):
        raise NoRegistryError(f"{name.host} answers with {digest[:80]!r}, which is no digest")
    return digest


def _manifest(name: ImageName, method: str, *, token: str) -> tuple[Message, bytes]:
    request = urllib.request.Request(name.url, method=method, headers={"Accept": ", ".join(_MANIFESTS)})  # noqa: S310
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        return _answer(request)
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate") or ""
        if error.code != 401 or token:
            raise
        return _manifest(name, method, token=_anonymous_token(name, challenge))


def _anonymous_token(name: ImageName, challenge: str) -> str:
    """Get the token that a registry sends everybody for, where its own challenge says."""
    scheme, _, parameters = challenge.partition(" ")
    told = dict(re.findall(r'(\w+)="([^"]*)"', parameters))
    if scheme.lower() != "bearer" or urllib.parse.urlsplit(told.get("realm", "")).scheme not in ("https", "http"):
        raise NoRegistryError(f"{name.host} wants a login ({challenge or 'it does not say which'})")
    query = {"scope": f"repository:{name.repository}:pull", **{key: told[key] for key in told if key != "realm"}}
    _, body = _answer(urllib.request.Request(f"{told['realm']}?{urllib.parse.urlencode(query)}"))  # noqa: S310
    answer = json.loads(body)
    token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise NoRegistryError(f"{name.host} gives no token without a login")
    return token


def _answer(request: urllib.request.Request) -> tuple[Message, bytes]:
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310 - http or https, see above
        return answer.headers, answer.read(_LONGEST_ANSWER)


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] or host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
