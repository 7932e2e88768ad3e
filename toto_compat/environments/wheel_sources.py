"""Python sources out of a wheel on the user's index, read by ranges: megabytes of a wheel that has gigabytes."""

import errno
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from toto_compat.environments.package_index import IndexSettings, open_url, read_answer, redacted
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import DAMAGED_ZIP

_PLAIN = IndexSettings(indexes=())
# Between two files that are wanted: reading on costs less than asking again.
_GAP = 1 << 20
_LARGEST_FILE = 512 * 1024**2  # of those that are read: libtorch_python.so has some tens of megabytes


class RangedFile(io.RawIOBase):
    """A file behind a URL that is read in pieces. What was read ahead is kept until something else is."""

    def __init__(self, url: str, settings: IndexSettings = _PLAIN) -> None:
        self._url, self._settings = url, settings
        self._at = 0
        self._kept: tuple[int, bytes] = (0, b"")
        with open_url(url, settings, head=True, patience=60) as answer:
            self.size = int(answer.headers["Content-Length"] or 0)

    def ahead(self, start: int, end: int) -> None:
        """Fetch these bytes in one request; reads within them then cost nothing."""
        with open_url(self._url, self._settings, ranged=f"bytes={start}-{end - 1}", patience=300) as answer:
            if answer.status != 206:
                raise EnvironmentBuildError(
                    f"{redacted(self._url)}: the index serves no ranges", hint="use another index"
                )
            self._kept = (start, read_answer(answer, most_bytes=end - start))

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        wanted = min(len(buffer), self.size - self._at)
        if wanted <= 0:
            return 0
        start, held = self._kept
        if not start <= self._at <= self._at + wanted <= start + len(held):
            self.ahead(self._at, min(self.size, self._at + max(wanted, 1 << 16)))
            start, held = self._kept
        buffer[:wanted] = held[self._at - start : self._at - start + wanted]
        self._at += wanted
        return wanted

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:  # what zipfile tries on a file too short to be a wheel
            raise OSError(errno.EINVAL, "before the beginning of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def wheel_url(package: str, version: str, python: str = "3.11") -> str:
    """Ask pip, with the user's own index settings, where the wheel of a release is; nothing is downloaded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--no-input"]
        command += ["-q", "--report", str(report), "--python-version", python, "--only-binary=:all:"]
        command += ["--target", folder, f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise EnvironmentBuildError(f"pip finds no wheel of {package} {version}: {done.stderr.strip()[-300:]}")
        return str(json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]["url"])


def sources(url: str, wanted: Callable[[str], bool], settings: IndexSettings = _PLAIN) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel whose names are wanted, neighbours fetched together; a broken wheel is an error."""
    try:
        yield from _sources(url, wanted, settings)
    except DAMAGED_ZIP as error:
        raise EnvironmentBuildError(
            f"{redacted(url)}: not a wheel, it cannot be read ({error or type(error).__name__})",
            hint="the index serves a broken file",
        ) from error


def _sources(url: str, wanted: Callable[[str], bool], settings: IndexSettings) -> Iterator[tuple[str, bytes]]:
    parts = urlsplit(url)
    if parts.scheme == "file":
        with zipfile.ZipFile(unquote(parts.path)) as wheel:
            for one in wheel.infolist():
                if wanted(one.filename):
                    yield one.filename, _content(wheel, one)
        return
    remote = RangedFile(url, settings)
    # unbuffered: what was fetched ahead is the buffer
    with zipfile.ZipFile(remote) as wheel:
        chosen = sorted((one for one in wheel.infolist() if wanted(one.filename)), key=lambda one: one.header_offset)
        # a local header may be longer than the central one says
        ends = {one.filename: one.header_offset + one.compress_size + 1024 for one in chosen}
        for group in _neighbours(chosen, ends):
            remote.ahead(group[0].header_offset, min(remote.size, ends[group[-1].filename]))
            for one in group:
                yield one.filename, _content(wheel, one)


def _content(wheel: zipfile.ZipFile, one: zipfile.ZipInfo) -> bytes:
    if one.file_size > _LARGEST_FILE:
        raise zipfile.BadZipFile(f"{one.filename} would be {one.file_size / 10**9:.1f} GB")
    return wheel.read(one)


def _neighbours(chosen: list[zipfile.ZipInfo], ends: dict[str, int]) -> Iterator[list[zipfile.ZipInfo]]:
    group: list[zipfile.ZipInfo] = []
    for one in chosen:
        if group and one.header_offset - ends[group[-1].filename] > _GAP:
            yield group
            group = []
        group.append(one)
    if group:
        yield group
