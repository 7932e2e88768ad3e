"""Sources out of a wheel behind a real HTTP server: only what is wanted crosses the wire."""

import errno
import http.server
import io
import re
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.environments.package_index import IndexSettings
from toto_compat.environments.wheel_sources import sources
from toto_compat.errors import EnvironmentBuildError

COMPRESSIONS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_broken_wheel_is_an_error_that_says_so(data: st.DataObject) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", data.draw(st.sampled_from(COMPRESSIONS))) as wheel:
        wheel.writestr("torch/a.py", "one = 1\ntwo = 2\n" * 4)
    broken = bytearray(content.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "torch-1.whl")
        path.write_bytes(broken)
        try:
            list(sources(path.as_uri(), lambda _: True))
        except EnvironmentBuildError as error:
            assert "not a wheel, it cannot be read" in error.message
        except OSError as error:  # as for a file that cannot be read at all: those who call tell both
            assert error.errno == errno.EINVAL or str(error) == "Invalid data stream"  # of bzip2


def test_a_wheel_packed_with_lzma_and_broken_is_an_error_too(tmp_path: Path) -> None:
    path = tmp_path / "torch-1.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as wheel:
        wheel.writestr("torch/a.py", "one = 1\ntwo = 2\n" * 4)
    first = 30 + len("torch/a.py") + 4  # behind the local header and the length of the filter's properties
    content = path.read_bytes()
    path.write_bytes(content[:first] + b"\xff" * 8 + content[first + 8 :])
    with pytest.raises(EnvironmentBuildError, match="not a wheel, it cannot be read"):
        list(sources(path.as_uri(), lambda _: True))


def test_a_file_that_would_fill_the_memory_is_not_unpacked(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        wheel.writestr("torch/a.py", b"x")
    # the size stands behind the name's local header, and again in the listing at the end, which is believed
    raw = bytearray(content.getvalue())
    entry = raw.index(b"PK\x01\x02")
    raw[entry + 24 : entry + 28] = (2**31).to_bytes(4, "little")
    (tmp_path / "torch-1.whl").write_bytes(raw)
    with pytest.raises(EnvironmentBuildError, match=r"would be 2\.1 GB"):
        list(sources((tmp_path / "torch-1.whl").as_uri(), lambda _: True))


class NoRanges(http.server.SimpleHTTPRequestHandler):
    """A server that answers every request with the whole file."""

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def test_an_index_without_ranges_is_told_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch-1.whl").write_bytes(b"x" * 5000)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoRanges) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://me:secret@127.0.0.1:{server.server_address[1]}/torch-1.whl"
        with pytest.raises(EnvironmentBuildError, match="serves no ranges") as told:
            list(sources(url, lambda _: True, IndexSettings((url,))))
        server.shutdown()
    assert "secret" not in str(told.value)
