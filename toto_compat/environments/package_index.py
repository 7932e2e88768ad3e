"""The files of a project on the user's package indexes: PEP 503 and 691 pages, folders of wheels, as pip is set to use.

pip itself lists versions and no more; whether a file was withdrawn, which Python it asks for and whether its metadata
lies beside it stands on the index's own page.
"""

import base64
import html.parser
import http.client
import json
import netrc
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import urllib.response
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from toto_compat.errors import EnvironmentBuildError

_PATIENCE_SECONDS = 30.0  # for the next bytes
_MOST_SECONDS = 300.0  # for all of an answer
_LARGEST_PAGE = 128 * 1024**2  # the page of nightly builds has some megabytes
_ACCEPTED = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_JSON = "application/vnd.pypi.simple.v1+json"
HINT = "check the network and `pip config list`; `pip index versions torch -v` shows what pip tries"


@dataclass(frozen=True)
class IndexSettings:
    """Says where pip looks, and what it needs to be let in."""

    indexes: tuple[str, ...]  # the first is the main one
    folders: tuple[str, ...] = ()  # pip's find-links: folders, or pages with links
    certificates: str = ""
    trusted_hosts: tuple[str, ...] = ()
    proxy: str = ""

    def __post_init__(self) -> None:
        for address in (*self.indexes, *self.folders):
            try:
                urlsplit(address)
            except ValueError as error:
                shown = address.rpartition("@")[2]  # without a password
                raise EnvironmentBuildError(f"pip is set to ask {shown!r}, no address: {error}", hint=HINT) from error


@dataclass(frozen=True)
class WheelFile:
    """One wheel as an index lists it."""

    file: str
    url: str
    version: Version
    sha256: str = ""
    requires_python: str = ""
    yanked: str | None = None  # why it was withdrawn, empty where nobody said; None: it was not
    has_metadata: bool = False  # <url>.metadata is served: PEP 658

    @property
    def project(self) -> str:
        """The project's name, as indexes compare names."""
        return parse_wheel_filename(self.file)[0]

    @property
    def pythons(self) -> tuple[str, ...]:
        """Return the CPython releases that it is for, such as 3.12; empty means any."""
        tags = parse_wheel_filename(self.file)[3]
        found = {match for tag in tags if (match := re.fullmatch(r"cp(\d)(\d+)", tag.interpreter))}
        # a free-threaded build (cp313t) is another interpreter
        plain = [match for match in found if not any(tag.abi.endswith("t") for tag in tags)]
        return tuple(sorted({f"{match[1]}.{match[2]}" for match in plain}, key=Version))

    @property
    def is_for_linux(self) -> bool:
        """Tell if pip takes it on Linux and x86_64, in an ordinary interpreter."""
        tags = parse_wheel_filename(self.file)[3]
        return any(
            (tag.platform == "any" or (tag.platform.endswith("x86_64") and "linux" in tag.platform))
            and not tag.abi.endswith("t")
            and "musllinux" not in tag.platform
            for tag in tags
        )


# --- pip's settings ---------------------------------------------------------------------------------------------------


def index_settings(python: str = sys.executable) -> IndexSettings:
    """Ask pip what it is set to use: its files and variables hold, and where they are silent its own default."""
    settings = _pip_settings(_pip(python, "config", "list"))
    main = settings.get("index-url") or _default_index(_pip(python, "install", "--help"))
    no_index = settings.get("no-index", "").lower() in ("1", "true", "yes", "on")
    return IndexSettings(
        indexes=() if no_index else (main, *settings.get("extra-index-url", "").split()),
        folders=tuple(settings.get("find-links", "").split()),
        certificates=settings.get("cert", ""),
        trusted_hosts=tuple(settings.get("trusted-host", "").split()),
        proxy=settings.get("proxy", ""),
    )


def _pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentBuildError(f"cannot start {python}: {error}", hint=HINT) from error
    if answer.returncode != 0:
        if "No module named pip" in answer.stderr:
            raise EnvironmentBuildError(
                f"{python} has no pip, which is what knows your package index",
                hint="add it with: python -m ensurepip",
            )
        said = (answer.stderr.strip().splitlines() or ["(pip said nothing)"])[-1]
        raise EnvironmentBuildError(f"pip does not tell its settings: {said}", hint=HINT)
    return answer.stdout


def _pip_settings(listed: str) -> dict[str, str]:
    """Read `pip config list`: variables come before the sections of commands, these before the general one."""
    strength = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if not equals or section not in strength:
            continue
        text = value.strip().strip("'\"").replace("\\n", " ")
        if key not in found or found[key][0] <= strength[section]:
            found[key] = (strength[section], text)
    return {key: text for key, (_, text) in found.items()}


def _default_index(help_text: str) -> str:
    """Find pip's own index in its help: it is named nowhere else that is not private to pip."""
    words = re.search(r"--index-url\b.*?\(default\s+(\S+?)\)", help_text, re.DOTALL)
    if words is None:
        raise EnvironmentBuildError(
            "pip names no package index", hint="set one: pip config set global.index-url https://..."
        )
    return words[1]


# --- pages ------------------------------------------------------------------------------------------------------------


def list_wheels(
    settings: IndexSettings, project: str, *, called: str = "your package index", hint: str = HINT
) -> tuple[list[WheelFile], list[str]]:
    """List a project's wheels for Linux on all indexes, and warnings: an extra index that does not answer.

    The main index is the one whose silence would make releases disappear: it has to answer.
    """
    found: dict[str, WheelFile] = {}
    warnings: list[str] = []
    name = canonicalize_name(project)
    for position, index in enumerate(settings.indexes):
        page = f"{index.rstrip('/')}/{project}/"
        try:
            listed = _files_of(page, settings)
        except IndexSilentError as error:
            if position == 0:
                raise EnvironmentBuildError(f"{called} does not answer: {error.message}", hint=hint) from error
            warnings.append(f"an extra index does not answer and is left out: {error.message}")
            continue
        for one in listed:
            found.setdefault(one.file, one)
    for folder in settings.folders:
        try:
            for one in _files_in(folder, project, settings):
                found.setdefault(one.file, one)
        except IndexSilentError as error:
            warnings.append(f"a page of find-links does not answer and is left out: {error.message}")
    # a page may hold files of other projects, and a release of those is none of this one
    return [one for one in found.values() if one.project == name and one.is_for_linux], warnings


class IndexSilentError(EnvironmentBuildError):
    """An index that gave no answer, or none that is a page of an index."""


def _files_of(page: str, settings: IndexSettings) -> list[WheelFile]:
    parts = urlsplit(page)
    if parts.scheme == "file":
        path = Path(unquote(parts.path)) / "index.html"
        return _html_files(path.read_text(encoding="utf-8", errors="replace"), page) if path.is_file() else []
    try:
        with open_url(page, settings, accept=_ACCEPTED) as answer:
            body, kind, final = read_answer(answer), answer.headers.get_content_type(), answer.geturl()
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            return []  # an index that does not have the project
        raise IndexSilentError(f"{redacted(page)}: HTTP {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise IndexSilentError(f"{redacted(page)}: {getattr(error, 'reason', error)}") from error
    try:
        if kind == _JSON:
            return _json_files(json.loads(body), final)
        return _html_files(body.decode("utf-8", errors="replace"), final)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IndexSilentError(f"{redacted(page)}: not a page of a package index ({error})") from error


def _files_in(folder: str, project: str, settings: IndexSettings) -> list[WheelFile]:
    """Read pip's find-links: a folder of wheels, or a page of links to wheels of any project."""
    if folder.startswith(("http://", "https://")):
        try:
            with open_url(folder, settings) as answer:
                return _html_files(read_answer(answer).decode("utf-8", errors="replace"), answer.geturl())
        except (OSError, ValueError) as error:
            raise IndexSilentError(f"{redacted(folder)}: {getattr(error, 'reason', error)}") from error
    path = Path(unquote(urlsplit(folder).path) if folder.startswith("file://") else folder)
    files = sorted(path.glob(f"{project}-*.whl")) if path.is_dir() else []
    return [one for file in files if (one := _wheel(file.name, file.absolute().as_uri()))]


def _wheel(file: str, url: str, **facts: object) -> WheelFile | None:
    try:
        version = parse_wheel_filename(file)[1]
    except (InvalidWheelFilename, ValueError):
        return None  # a source archive, or a name that pip could not install either
    return WheelFile(file, url, version, **facts)  # type: ignore[arg-type]


def _json_files(page: Any, base: str) -> list[WheelFile]:
    files = page["files"]
    if not isinstance(files, list):
        raise TypeError("`files` is no list")
    listed = []
    for one in files:
        yanked = one.get("yanked")
        metadata = one.get("core-metadata", one.get("dist-info-metadata", False))
        wheel = _wheel(
            one["filename"],
            urljoin(base, one["url"]),
            sha256=_digest(str(one.get("hashes", {}).get("sha256", ""))),
            requires_python=one.get("requires-python") or "",
            yanked=None if not yanked else yanked if isinstance(yanked, str) else "",
            has_metadata=bool(metadata),
        )
        if wheel:
            listed.append(wheel)
    return listed


def _digest(text: str) -> str:
    """A sha256, or nothing: it names files of the cache and goes into locks, and an index may send anything."""
    return text.lower() if re.fullmatch(r"[0-9a-fA-F]{64}", text) else ""


def _html_files(text: str, base: str) -> list[WheelFile]:
    reader = _Anchors(base)
    reader.feed(text)
    listed = []
    for href, attributes in reader.anchors:
        url, fragment = urldefrag(urljoin(reader.base, href))
        digest = re.search(r"sha256=(\w+)", fragment)
        metadata = attributes.get("data-core-metadata", attributes.get("data-dist-info-metadata", "false"))
        wheel = _wheel(
            unquote(urlsplit(url).path.rpartition("/")[2]),
            url,
            sha256=_digest(digest[1]) if digest else "",
            requires_python=attributes.get("data-requires-python") or "",
            yanked=(attributes["data-yanked"] or "") if "data-yanked" in attributes else None,
            has_metadata=metadata != "false",
        )
        if wheel:
            listed.append(wheel)
    return listed


class _Anchors(html.parser.HTMLParser):
    """Collects the links of a page and the address that they are relative to."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.anchors: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        href = attributes.get("href")
        if tag == "a" and href:
            self.anchors.append((href, attributes))
        elif tag == "base" and href:
            self.base = urljoin(self.base, href)


# --- requests ---------------------------------------------------------------------------------------------------------


def open_url(
    url: str,
    settings: IndexSettings,
    *,
    accept: str = "*/*",
    ranged: str = "",
    head: bool = False,
    patience: float = _PATIENCE_SECONDS,
) -> urllib.response.addinfourl:
    """Ask as pip would: with its certificates, its proxy, and the name and password that stand in the address."""
    address, authorization = _without_password(url, settings)
    if urlsplit(address).scheme not in ("http", "https"):
        raise ValueError(f"not an address that can be asked: {address}")
    headers = {"Accept": accept, **({"Range": ranged} if ranged else {})}
    request = urllib.request.Request(address, headers=headers, method="HEAD" if head else "GET")  # noqa: S310
    for name, value in authorization.items():
        request.add_unredirected_header(name, value)  # it is for this host, not for one that it points to
    try:
        answer: urllib.response.addinfourl = _opener(settings, urlsplit(address).hostname or "").open(
            request, timeout=patience
        )
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error or type(error).__name__}") from error
    return answer


def read_answer(
    answer: urllib.response.addinfourl,
    *,
    most_bytes: int = _LARGEST_PAGE,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Read an answer to its end; OSError where it is cut off, never ends, or comes so slowly that nobody would wait.

    The socket's own patience starts again with every byte."""
    content, until = bytearray(), clock() + _MOST_SECONDS
    try:
        while piece := answer.read1(1 << 16):
            content += piece
            if len(content) > most_bytes:
                raise OSError(f"the answer is longer than {most_bytes:,} bytes")
            if clock() > until:
                raise TimeoutError(f"the answer did not end within {_MOST_SECONDS:.0f} s")
    except http.client.HTTPException as error:
        raise OSError(f"the answer is cut off: {error}") from error
    length = answer.headers.get("Content-Length") if answer.headers else None
    if length and length.isdigit() and len(content) < int(length):
        raise OSError(f"the answer is cut off after {len(content)} of {length} bytes")
    return bytes(content)


def _opener(settings: IndexSettings, host: str) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=settings.certificates or None)
    if any(host == trusted.partition(":")[0] for trusted in settings.trusted_hosts):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if settings.proxy:
        handlers.append(urllib.request.ProxyHandler({"http": settings.proxy, "https": settings.proxy}))
    return urllib.request.build_opener(*handlers)


def _without_password(url: str, settings: IndexSettings) -> tuple[str, dict[str, str]]:
    """Split off the name and password of an address: its own, those of an index on that host, or .netrc's."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    same_host = [urlsplit(one) for one in settings.indexes if urlsplit(one).netloc.rpartition("@")[2] == host]
    named = next((one for one in (parts, *same_host) if one.username is not None), None)
    user, password = (named.username, named.password) if named else _from_netrc(parts.hostname or "")
    if user is None:
        return url, {}
    token = base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}


def _from_netrc(host: str) -> tuple[str | None, str | None]:
    try:
        entry = netrc.netrc().authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None, None
    return (entry[0], entry[2]) if entry else (None, None)


def redacted(url: str) -> str:
    """Take the password out of an address that goes into messages and logs."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"****@{host}" if "@" in parts.netloc else host))
