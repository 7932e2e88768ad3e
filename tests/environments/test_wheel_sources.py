"""Sources out of a wheel behind a real HTTP server: only what is wanted crosses the wire."""

import http.server
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from toto_compat.environments.wheel_sources import sources


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A server of files that knows ranges, and counts what it sends."""

    sent = 0

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        start, end = map(int, re.findall(r"\d+", self.headers["Range"]))
        piece = content[start : end + 1]
        type(self).sent += len(piece)
        self.send_response(206)
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with zipfile.ZipFile(tmp_path / "torch-1.whl", "w") as wheel:
        wheel.writestr("torch/a.py", "one = 1\n" * 50, zipfile.ZIP_DEFLATED)
        wheel.writestr("torch/lib/big.so", bytes(range(256)) * 40_000)
        wheel.writestr("torch/b.py", "two = 2\n")
        wheel.writestr("torch/c.py", "3\n")
    monkeypatch.chdir(tmp_path)
    Ranges.sent = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/torch-1.whl"
        server.shutdown()


def test_only_the_wanted_files_and_the_listing_are_fetched(served: str, tmp_path: Path) -> None:
    remote = dict(sources(served, lambda name: name.endswith(".py")))
    local = dict(sources((tmp_path / "torch-1.whl").as_uri(), lambda name: name.endswith(".py")))
    assert remote == local == {"torch/a.py": b"one = 1\n" * 50, "torch/b.py": b"two = 2\n", "torch/c.py": b"3\n"}
    assert Ranges.sent < 300_000 < (tmp_path / "torch-1.whl").stat().st_size
