"""A digest is asked of a real registry on this machine's loopback, with and without the tokens that registries want."""

import base64
import hashlib
import http.server
import io
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from toto_compat.environments import locks
from toto_compat.environments.locks import lock_command, read_base_digests
from toto_compat.environments.registry import ImageName, NoRegistryError, ask_registry, parse_image_name
from toto_compat.errors import EnvironmentBuildError

REPOSITORY = Path(__file__).parents[2]
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
needs_registry = pytest.mark.skipif(
    shutil.which("docker-registry") is None, reason="no docker-registry: `apt-get install docker-registry`"
)


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("python:3.12-slim", ImageName("registry-1.docker.io", "library/python", "3.12-slim")),
        ("nvidia/cuda:13.2.1-base", ImageName("registry-1.docker.io", "nvidia/cuda", "13.2.1-base")),
        ("docker.io/library/python", ImageName("registry-1.docker.io", "library/python", "latest")),
        ("ghcr.io/some/thing:1", ImageName("ghcr.io", "some/thing", "1")),
        ("localhost:5000/python:3", ImageName("localhost:5000", "python", "3")),
    ],
)
def test_a_name_is_read_as_engines_read_it(image: str, name: ImageName) -> None:
    assert parse_image_name(image) == name


@pytest.mark.parametrize(
    ("image", "url"),
    [
        ("python:3.12-slim", "https://registry-1.docker.io/v2/library/python/manifests/3.12-slim"),
        ("127.0.0.1:5000/a:1", "http://127.0.0.1:5000/v2/a/manifests/1"),
        ("localhost/a:1", "http://localhost/v2/a/manifests/1"),
        ("[::1]:5000/a:1", "http://[::1]:5000/v2/a/manifests/1"),
        ("10.0.0.5:5000/a:1", "https://10.0.0.5:5000/v2/a/manifests/1"),
    ],
)
def test_only_this_machine_is_asked_without_tls(image: str, url: str) -> None:
    assert parse_image_name(image).url == url


@pytest.mark.parametrize(
    "image", ["", "Python:3", "python:3 12", "python:../../x", "a//:x y", "a.b:port/python:3", "u:p@a.b/python:3"]
)
def test_what_is_no_name_of_an_image_is_an_error_that_names_the_key(image: str) -> None:
    with pytest.raises(EnvironmentBuildError, match="is no name of an image") as caught:
        ask_registry(image)
    assert "base_image" in caught.value.hint


# --- a real registry --------------------------------------------------------------------------------------------------


class TokenServer:
    """Hands out what Docker's own token server does: a JSON Web Token, signed with the key that the registry trusts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[dict[str, str]]()
        key, self.certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tokens", "-days", "2"]
        subprocess.run([*command, "-keyout", key, "-out", self.certificate], check=True, capture_output=True)
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query)))
                body = json.dumps({"access_token": server.token("pull")}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.realm = f"http://127.0.0.1:{self.http.server_port}/token"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def token(self, *actions: str) -> str:
        der = "".join(self.certificate.read_text().splitlines()[1:-1])
        now = int(time.time())
        claims = {
            "iss": "tests",
            "aud": "registry",
            "sub": "",
            "exp": now + 600,
            "nbf": now - 60,
            "iat": now - 60,
            "jti": "1",
            "access": [{"type": "repository", "name": "some/python", "actions": actions}],
        }
        parts = [_part({"typ": "JWT", "alg": "RS256", "x5c": [der]}), _part(claims)]
        sign = ["openssl", "dgst", "-sha256", "-sign", str(self.folder / "key.pem")]
        signature = subprocess.run(sign, input=b".".join(parts), check=True, capture_output=True).stdout
        return b".".join([*parts, _base64(signature)]).decode()


def _part(content: dict[str, Any]) -> bytes:
    return _base64(json.dumps(content).encode())


def _base64(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")


class Registry:
    """Debian's docker-registry, with one image in it."""

    def __init__(self, folder: Path, tokens: TokenServer | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        config: dict[str, Any] = {
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
            "http": {"addr": self.host},
        }
        if tokens is not None:
            told = {"realm": tokens.realm, "service": "registry", "issuer": "tests"}
            config["auth"] = {"token": {**told, "rootcertbundle": str(tokens.certificate)}}
        (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
        command = ["docker-registry", "serve", str(folder / "config.yml")]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "listening on" in line:
                break
        else:
            raise AssertionError("the registry did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.token = tokens.token("pull", "push") if tokens else ""
        self.digest = self.push()

    def push(self) -> str:
        """Put an empty image there as engines do: its configuration, then the manifest under its tag."""
        config = b"{}"
        of_config = f"sha256:{hashlib.sha256(config).hexdigest()}"
        place = self.request("POST", "blobs/uploads/").headers["Location"]
        joint = "&" if "?" in place else "?"
        upload = f"{place}{joint}digest={urllib.parse.quote(of_config)}"
        self.request("PUT", upload, config, "application/octet-stream")
        described = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 2, "digest": of_config}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": described, "layers": []}
        content = json.dumps(manifest).encode()
        self.request("PUT", "manifests/3.12-slim", content, MANIFEST_TYPE)
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    def request(self, method: str, path: str, content: bytes = b"", kind: str = "") -> Any:
        url = path if path.startswith("http") else f"http://{self.host}/v2/some/python/{path}"
        request = urllib.request.Request(url, data=content, method=method, headers={"Content-Type": kind})  # noqa: S310
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        return urllib.request.urlopen(request, timeout=20)  # noqa: S310


@pytest.fixture(scope="module", params=["open", "with tokens"])
def registry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("registry")
    tokens = TokenServer(folder) if request.param == "with tokens" else None
    started = Registry(folder, tokens)
    yield started
    started.process.kill()
    started.process.wait()
    if tokens is not None:
        tokens.http.shutdown()
        assert all(one["scope"] == "repository:some/python:pull" for one in tokens.asked)
        assert tokens.asked[0]["service"] == "registry"


@needs_registry
def test_a_registry_tells_the_digest_of_a_tag(registry: Registry) -> None:
    assert ask_registry(f"{registry.host}/some/python:3.12-slim") == registry.digest


@needs_registry
def test_a_tag_that_the_registry_does_not_have_is_an_error_of_the_matrix(registry: Registry) -> None:
    with pytest.raises(EnvironmentBuildError, match=r"has no image some/python:3\.99") as caught:
        ask_registry(f"{registry.host}/some/python:3.99")
    assert "base_image" in caught.value.hint


@needs_registry
def test_lock_pins_base_images_without_an_engine_or_a_python(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "DOCKER_FOLDER", tmp_path / "docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (tmp_path / "docker/locks").mkdir(parents=True)
    image = f"{registry.host}/some/python:3.12-slim"
    text = (REPOSITORY / "matrix.yaml").read_text().replace("python:3.12-slim", image)
    (tmp_path / "matrix.yaml").write_text(text)
    asked = ["--bases", "torch-2.15.0-cu132", "--matrix", str(tmp_path / "matrix.yaml")]
    done = CliRunner().invoke(lock_command, asked, catch_exceptions=False)
    assert f"base image {image} is {registry.digest}" in done.output
    assert read_base_digests() == {image: registry.digest}
    again = CliRunner().invoke(lock_command, asked, catch_exceptions=False)
    assert again.output == "", "what is pinned is not asked for again"


def test_where_no_registry_answers_the_digest_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DOCKER_FOLDER", tmp_path)
    (tmp_path / "matrix.yaml").write_text(
        (REPOSITORY / "matrix.yaml").read_text().replace("python:3.12-slim", "127.0.0.1:9/python:3.12-slim")
    )
    asked = ["--bases", "torch-2.15.0-cu132", "--matrix", str(tmp_path / "matrix.yaml")]
    done = CliRunner().invoke(lock_command, asked, catch_exceptions=False)
    assert (
        "no registry answers here (127.0.0.1:9: [Errno 111] Connection refused), its digest stays open" in done.output
    )
    assert read_base_digests() == {}


# --- what is no registry ----------------------------------------------------------------------------------------------

INDEX = "application/vnd.oci.image.index.v1+json"
DIGEST = "sha256:" + "ab" * 32
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def answering(answers: Callable[[str, str], Answer]) -> Iterator[str]:
    """A server on the loopback that answers a method and a path as it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answers(self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def told_by(answers: Callable[[str, str], Answer]) -> str:
    """Why a server that answers so is no registry."""
    with answering(answers) as host, pytest.raises(NoRegistryError) as caught:
        ask_registry(f"{host}/python:3")
    return str(caught.value)


@pytest.mark.parametrize(
    ("status", "headers", "body", "told"),
    [
        (401, {"WWW-Authenticate": 'Basic realm="private"'}, b"", "wants a login"),
        (401, {}, b"", "wants a login"),
        (401, {"WWW-Authenticate": 'Bearer realm="file:///etc/passwd"'}, b"", "wants a login"),
        (403, {}, b"", "answers 403 Forbidden: it has no python, or wants a login for it"),
        (500, {}, b"", "answers 500"),
        (200, {"Docker-Content-Digest": "sha256:short"}, b"", "no digest"),
        (200, {"Docker-Content-Digest": DIGEST, "Content-Type": "text/html"}, b"", "text/html, which is no manifest"),
        (200, {"Content-Type": "text/html"}, b"<html>Please log in</html>", "text/html, which is no manifest"),
        (200, {}, b"hello", "text/plain, which is no manifest"),
        (200, {"Content-Type": INDEX}, b"<html>", "Expecting value"),
        (200, {"Content-Type": INDEX}, b'{"schemaVersion": 1}', "no manifest of schema 2"),
        (200, {"Content-Type": INDEX}, b"[" * 200_000, "recursion"),
        (200, {"Content-Type": INDEX, "Content-Length": "999"}, b'{"schemaVersion": 2,', "Expecting"),
        (200, {"Content-Type": INDEX}, b" " * 10_000_001, "longer than 10 MB"),
        (302, {"Location": "ftp://127.0.0.1:9/x"}, b"", "refused"),
        (302, {"Location": "file:///etc/passwd"}, b"", "302"),
    ],
)
def test_a_registry_that_says_something_else_is_none(
    *, status: int, headers: dict[str, str], body: bytes, told: str
) -> None:
    """And nothing of what it says is pinned."""
    assert told in told_by(lambda _method, _path: (status, headers, body))


def test_what_speaks_no_http_is_no_registry() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as caller:
                caller.recv(65536)
                caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(NoRegistryError, match="SSH-2"):
            ask_registry(f"127.0.0.1:{server.getsockname()[1]}/python:3")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b"", "for a token, which answers 404"),
        (200, b'{"token": "", "access_token": ""}', "gives no token"),
        (200, b'{"token": 7}', "gives no token"),
        (200, b'{"token": "a\\r\\nHost: x"}', "gives no token"),
        (200, b"[]", "gives no token"),
        (200, b"<html>", "Expecting value"),
        (200, b'{"token": "one that is not enough"}', "answers 401"),
    ],
    ids=["no such page", "empty", "a number", "a second header", "a list", "a page", "not enough"],
)
def test_a_token_that_is_none_ends_it_and_says_nothing_of_the_image(*, status: int, body: bytes, told: str) -> None:
    def answers(_method: str, path: str) -> Answer:
        if path.startswith("/token"):
            return status, {}, body
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{hosts[0]}/token",service="s"'}, b""

    hosts: list[str] = []
    with answering(answers) as host:
        hosts.append(host)
        with pytest.raises(NoRegistryError, match=told):
            ask_registry(f"{host}/python:3")


def test_a_registry_that_moved_and_one_that_gives_no_header_are_understood() -> None:
    """The realm has a query of its own, the challenge is the second of two, and the digest is the manifest's hash."""
    manifest = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
    asked: list[str] = []

    def answers(_method: str, path: str) -> Answer:
        asked.append(path)
        if path.startswith("/token"):
            return 200, {}, b'{"token": "t"}'
        if path.startswith("/v2/"):
            return 307, {"Location": "/moved"}, b""
        return 200, {"Content-Type": f"{INDEX}; charset=utf-8"}, manifest

    with answering(answers) as host:
        found = ask_registry(f"{host}/python:3")
    assert found == f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    assert "/moved" in asked


def test_no_answer_is_taken_from_where_anybody_on_the_way_could_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry behind TLS that sends on to one that is not."""

    class Elsewhere(io.BytesIO):
        headers = Message()

        def geturl(self) -> str:
            return "http://elsewhere/v2/library/python/manifests/3"

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Elsewhere())
    with pytest.raises(NoRegistryError, match="it sends from https to http"):
        ask_registry("ghcr.io/some/python:3")
