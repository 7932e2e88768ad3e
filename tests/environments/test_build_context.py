"""What a build gets: the lock, and either the wheels or the way to an index."""

import configparser
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.environments.small_project import SMALL, SMALL_ENVIRONMENT
from toto_compat.environments.build_context import build_context, tar_stream
from toto_compat.environments.locks import Lock, LockedPackage

LOCK = Lock(SMALL, "3.11", (), (LockedPackage("torch", "1.0", "1" * 64, "torch.whl"),))


def test_the_context_is_a_tar_archive_of_any_size(tmp_path: Path) -> None:
    large = tmp_path / "large.whl"
    large.write_bytes(os.urandom(3 * 2**20 + 17))
    stream = b"".join(tar_stream(iter([("Dockerfile", b"FROM x"), ("toto/wheels/large.whl", large)])))
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        names = archive.getnames()
        content = archive.extractfile("toto/wheels/large.whl")
        assert content is not None
        assert content.read() == large.read_bytes()
    assert names == ["Dockerfile", "toto/wheels/large.whl"]


def test_an_online_build_gets_the_environments_own_index_where_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nextra-index-url = https://other.example/simple\n")
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with answering_index() as index:
        environment = SMALL_ENVIRONMENT.model_copy(update={"index": index})
        context = dict(build_context(b"FROM x", LOCK, environment, online=True))
    sent = configparser.ConfigParser(interpolation=None)
    sent.read_string(bytes(context["pip/pip.conf"]).decode())
    assert sent["global"]["extra-index-url"] == f"https://other.example/simple {index}"
    context = dict(build_context(b"FROM x", LOCK, environment, online=True))
    assert index not in bytes(context["pip/pip.conf"]).decode()


@contextmanager
def answering_index() -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        finally:
            server.shutdown()
            thread.join()
