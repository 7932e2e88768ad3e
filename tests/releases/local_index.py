"""A package index on loopback: PEP 503 and PEP 691 pages, core metadata, wheels by ranges; small wheels made here."""

import hashlib
import http.server
import json
import random
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from urllib.parse import quote, unquote


def wheel(name: str, version: str, *, needs: tuple[str, ...] = (), files: dict[str, bytes] | None = None) -> bytes:
    """The bytes of a wheel that pip can read."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.10"]
    metadata = "\n".join([*lines, *(f"Requires-Dist: {one}" for one in needs)]) + "\n"
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, held in (files or {}).items():
            archive.writestr(path, held)
        archive.writestr(f"{folder}/METADATA", metadata)
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    return content.getvalue()


def filler(length: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(length).randbytes(length)  # noqa: S311 - no secret


def torch_wheel(version: str, cuda: str = "13.4", *, triton: str = 'triton==3.9.0; python_version < "3.15"') -> bytes:
    """A torch with the parts that are looked at, and two megabytes that nobody should fetch."""
    needs: tuple[str, ...] = ("numpy>=1", 'networkx; extra == "more"')
    if cuda:
        needs += (f"nvidia-cuda-runtime=={cuda}.7; platform_system == 'Linux'", triton)
    said = f"'{cuda}'" if cuda else "None"
    files = {
        "torch/lib/libtorch_cuda.so": filler(2_000_000),
        "torch/lib/libtorch_python.so": b"\0sm_\0\0sm_75 sm_90 sm_120 compute_120\0" + filler(3000),
        "torch/version.py": f"__version__ = '{version}'\ncuda: Optional[str] = {said}\n".encode(),
    }
    return wheel("torch", version, needs=needs, files=files)


@dataclass
class Published:
    """One file of the index."""

    content: bytes
    yanked: str | None = None
    metadata: bool = False
    metadata_served: bool = True
    hashed: bool = True


@dataclass
class LocalIndex:
    """What is published, by channel ('simple', 'nightly', 'test') and file; and what was asked of it."""

    as_json: bool = True
    files: dict[str, dict[str, Published]] = field(default_factory=dict)
    url: str = ""
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    status: int = 200
    metadata_text: bytes | None = None  # what is served as core metadata in the place of the wheel's own

    def publish(self, file: str, content: bytes, *, channel: str = "simple", **facts: object) -> None:
        self.files.setdefault(channel, {})[file] = Published(content, **facts)  # type: ignore[arg-type]

    def torch(
        self,
        version: str,
        *,
        python: str = "cp311",
        cuda: str = "13.4",
        channel: str = "simple",
        triton: str = 'triton==3.9.0; python_version < "3.15"',
        **facts: object,
    ) -> None:
        content = torch_wheel(version, cuda, triton=triton)
        file = f"torch-{version}-{python}-{python}-manylinux_2_28_x86_64.whl"
        self.publish(file, content, channel=channel, **facts)

    @property
    def simple(self) -> str:
        return f"{self.url}/simple"

    def page(self, channel: str, project: str) -> tuple[bytes, str] | None:
        own = {
            file: one
            for file, one in self.files.get(channel, {}).items()
            if file.partition("-")[0].replace("_", "-").lower() == project
        }
        if not own:
            return None
        if self.as_json:
            return json.dumps(
                {
                    "meta": {"api-version": "1.1"},
                    "name": project,
                    "files": [
                        {
                            "filename": file,
                            "url": f"/files/{channel}/{quote(file)}",
                            "hashes": {"sha256": digest(one.content)} if one.hashed else {},
                            "requires-python": ">=3.10",
                            "yanked": one.yanked or True if one.yanked is not None else False,
                            "core-metadata": one.metadata,
                        }
                        for file, one in own.items()
                    ],
                }
            ).encode(), "application/vnd.pypi.simple.v1+json"
        anchors = [self._anchor(channel, file, one) for file, one in own.items()]
        return f"<!DOCTYPE html><html><body>{''.join(anchors)}</body></html>".encode(), "text/html"

    def _anchor(self, channel: str, file: str, one: Published) -> str:
        fragment = f"#sha256={digest(one.content)}" if one.hashed else ""
        yanked = "" if one.yanked is None else f' data-yanked="{escape(one.yanked)}"'
        metadata = ' data-core-metadata="true"' if one.metadata else ""
        href = f"../../files/{channel}/{quote(file)}{fragment}"
        return f'<a href="{href}" data-requires-python="&gt;=3.10"{yanked}{metadata}>{file}</a>\n'


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def served(index: LocalIndex) -> Iterator[LocalIndex]:
    """Serve the index on loopback while the block runs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            index.asked.append(self.path)
            index.headers.append(dict(self.headers))
            found = self.found()
            if index.status != 200 or found is None:
                self.send_response(index.status if index.status != 200 else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, kind = found
            ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            self.send_response(206 if ranged else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Accept-Ranges", "bytes")
            if ranged:
                self.send_header("Content-Range", f"bytes {ranged[1]}-{ranged[2]}/{len(content)}")
                content = content[int(ranged[1]) : int(ranged[2]) + 1]
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                index.sent += len(content)
                self.wfile.write(content)

        def found(self) -> tuple[bytes, str] | None:
            parts = unquote(self.path).strip("/").split("/")
            if parts[0] == "files":
                channel, file = parts[-2], parts[-1]
                one = index.files.get(channel, {}).get(file.removesuffix(".metadata"))
                if one is None or (file.endswith(".metadata") and not (one.metadata and one.metadata_served)):
                    return None
                return (
                    (index.metadata_text or metadata_of(one.content), "text/plain")
                    if file.endswith(".metadata")
                    else (one.content, "application/zip")
                )
            # /whl/nightly/torch/ and /whl/nightly/cu134/torch/ hold the same here
            return index.page("simple" if parts[0] == "simple" else parts[1], parts[-1])

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield index
        server.shutdown()


def metadata_of(content: bytes) -> bytes:
    with zipfile.ZipFile(BytesIO(content)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("METADATA")))
