"""Asks a container registry what a tag stands for, by a plain request: no engine is needed and nothing is pulled."""

import hashlib
import http.client
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
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
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
    if (
        not _HOST.fullmatch(host)
        or not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository)
        or not re.fullmatch(r"[\w.-]{0,128}", tag)
    ):
        raise EnvironmentBuildError(
            f"{image!r} is no name of an image",
            hint="correct the environment's `base_image` in matrix.yaml; an image is named like python:3.12-slim",
        )
    return ImageName(host, repository, tag or "latest")


def ask_registry(image: str) -> str:
    """Return the digest that a tag stands for now.

    NoRegistryError if nobody answers, or not as a registry does; an image that the registry does not have is an
    EnvironmentBuildError.
    """
    name = parse_image_name(image)
    try:
        headers, _ = _manifest(name, "HEAD")
        digest = headers.get("Docker-Content-Digest") or ""
        if digest and headers.get("Content-Type"):
            _check_kind(name, headers)
        if not digest:  # it need not say: the digest is the hash of the manifest
            headers, body = _manifest(name, "GET")
            _check_kind(name, headers)
            _check_manifest(name, body)
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise EnvironmentBuildError(
                f"{name.host} has no image {name.repository}:{name.tag}",
                hint="correct the environment's `base_image` in matrix.yaml; old tags are deleted now and then",
            ) from error
        # a registry says the same of what it does not have and of what it does not show everybody
        hidden = f": it has no {name.repository}, or wants a login for it" if error.code in (401, 403) else ""
        raise NoRegistryError(f"{name.host} answers {error.code} {error.reason}{hidden}") from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise NoRegistryError(f"{name.host}: {getattr(error, 'reason', None) or error or 'no answer'}") from error
    if not DIGEST.fullmatch(digest):
        raise NoRegistryError(f"{name.host} answers with {digest[:80]!r}, which is no digest")
    return digest


def _check_kind(name: ImageName, headers: Message) -> None:
    """Refuse what is no manifest, such as the page of a proxy that wants a login: its hash would be pinned."""
    if headers.get_content_type() not in _MANIFESTS:
        raise NoRegistryError(f"{name.host} answers with {headers.get_content_type()}, which is no manifest")


def _check_manifest(name: ImageName, body: bytes) -> None:
    manifest = json.loads(body)
    if not isinstance(manifest, dict) or manifest.get("schemaVersion") != 2:
        raise NoRegistryError(f"{name.host} answers with something that is no manifest of schema 2")


def _manifest(name: ImageName, method: str, *, token: str = "") -> tuple[Message, bytes]:
    request = urllib.request.Request(name.url, method=method, headers={"Accept": ", ".join(_MANIFESTS)})  # noqa: S310
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        return _answer(request)
    except urllib.error.HTTPError as error:
        challenges = error.headers.get_all("WWW-Authenticate") or [""]
        if error.code != 401 or token:
            raise
    bearer = next((one for one in challenges if one.lower().startswith("bearer ")), challenges[0])
    return _manifest(name, method, token=_anonymous_token(name, bearer))


def _anonymous_token(name: ImageName, challenge: str) -> str:
    """Get the token that a registry sends everybody for, where its own challenge says."""
    scheme, _, parameters = challenge.partition(" ")
    told = dict(re.findall(r'(\w+)="([^"]*)"', parameters))
    realm = urllib.parse.urlsplit(told.get("realm", ""))
    if scheme.lower() != "bearer" or realm.scheme not in ("https", "http"):
        raise NoRegistryError(f"{name.host} wants a login ({challenge or 'it does not say which'})")
    query = {"scope": f"repository:{name.repository}:pull", **{key: told[key] for key in told if key != "realm"}}
    asked = "&".join(part for part in (realm.query, urllib.parse.urlencode(query)) if part)
    try:
        _, body = _answer(urllib.request.Request(realm._replace(query=asked).geturl()))  # noqa: S310
    except urllib.error.HTTPError as error:
        raise NoRegistryError(f"{name.host} sends to {realm.netloc} for a token, which answers {error.code}") from error
    answer = json.loads(body)
    token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
    if not token or not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise NoRegistryError(f"{name.host} gives no token without a login")
    return token


def _answer(request: urllib.request.Request) -> tuple[Message, bytes]:
    """Ask, and follow where that leads; but not from TLS to where anybody on the way can answer."""
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310 - http or https, see above
        if request.type == "https" and not answer.geturl().startswith("https:"):
            raise ValueError(f"it sends from https to {answer.geturl().partition(':')[0]}")
        body = answer.read(_LONGEST_ANSWER + 1)
        if len(body) > _LONGEST_ANSWER:
            raise ValueError(f"its answer is longer than {_LONGEST_ANSWER // 10**6} MB")
        return answer.headers, body


def _is_loopback(host: str) -> bool:
    name = re.sub(r":[0-9]+$", "", host) if not host.endswith("]") else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
