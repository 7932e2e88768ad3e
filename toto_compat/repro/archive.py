"""A bundle as a file: one zip with a manifest that names every member and its hash; the same content, the same file.

Reading trusts nothing in it: names, kinds, sizes and hashes are checked before a byte is written, and what is written
is counted again.
"""

import errno
import hashlib
import json
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError

from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import BundleError
from toto_compat.evidence.files import DAMAGED_ZIP
from toto_compat.repro.new_file import new_file

MANIFEST = "manifest.json"
WHEELS = "wheels/"
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # of the format: a member's time says nothing
_NAME = re.compile(r"[A-Za-z0-9_+,=@%()\[\] -][A-Za-z0-9._+,=@%()\[\] -]{0,150}")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bound what a bundle may hold; a bomb is refused by what it says of itself, or stopped where it lies."""

    members: int = 4_000
    member_bytes: int = 64 << 20
    total_bytes: int = 512 << 20  # without wheels
    wheel_bytes: int = 4 << 30  # one of them
    wheels_bytes: int = 24 << 30
    ratio: int = 200  # of what is unpacked to what is packed, from a megabyte on
    manifest_bytes: int = 2 << 20


LIMITS = Limits()


class Member(StrictModel):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Manifest(StrictModel):
    """manifest.json: what the bundle is of, and every other member."""

    schema_version: int = Field(alias="schema", ge=1, le=1)
    made_by: str  # version of this package
    cell: str
    torch: str = ""
    lock: str = ""  # identity of the environment that it ran in
    image: str = ""  # digest, where that was a container
    command: tuple[str, ...] = ()
    shows: str = ""  # what replaying it should say
    notes: tuple[str, ...] = ()  # what is not in it, and why
    files: dict[str, Member]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_bundle(
    target: Path, about: Mapping[str, Any], files: Mapping[str, bytes], wheels: Mapping[str, Path] | None = None
) -> Manifest:
    """Write a bundle, which must not exist, whole or not at all. `wheels` are copied from their files, by name."""
    wheels = {f"{WHEELS}{name}": path for name, path in (wheels or {}).items()}
    listed = {
        name: Member(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content)) for name, content in files.items()
    }
    listed |= {name: _member_of(path) for name, path in wheels.items()}
    manifest = Manifest.model_validate({"schema": 1, **about, "files": dict(sorted(listed.items()))})
    for name in listed:
        if problem := wrong_name(name):
            raise BundleError(f"{name!r} cannot be put into a bundle: {problem}")
    with new_file(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        archive.writestr(_entry(MANIFEST), manifest.model_dump_json(by_alias=True, indent=1) + "\n")
        for name in sorted(files):
            archive.writestr(_entry(name, _compression(files[name])), files[name])
        for name in sorted(wheels):
            _copy_in(archive, name, wheels[name])
    return manifest


def _entry(name: str, compression: int = zipfile.ZIP_DEFLATED) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _FIRST_DAY)
    entry.compress_type = compression
    entry.create_system = 3  # Unix, whatever wrote it
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry


def _compression(content: bytes) -> int:
    """Pack a member, but for one that would grow like a bomb: a log may be one line, ten thousand times."""
    grows = len(content) > _CHUNK and len(content) > LIMITS.ratio * len(zlib.compress(content))
    return zipfile.ZIP_STORED if grows else zipfile.ZIP_DEFLATED


def _copy_in(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    entry = _entry(name, zipfile.ZIP_STORED)  # a wheel is packed already
    entry.file_size = path.stat().st_size
    with path.open("rb") as file, archive.open(entry, "w") as inside:
        while chunk := file.read(_CHUNK):
            inside.write(chunk)


def _member_of(path: Path) -> Member:
    with path.open("rb") as file:
        return Member(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=path.stat().st_size)


# --- reading ----------------------------------------------------------------------------------------------------------


def is_bundle(path: Path) -> bool:
    """Tell whether a file is to be read as a bundle and not as an incident: by its name or its first bytes."""
    if path.name.endswith((".zip", ".tar", ".tar.gz", ".tgz")):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def wrong_name(name: str) -> str:
    """Say why a member may not be called so; empty where it may."""
    if not name or name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        return "an absolute path"
    if "\\" in name or any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "a backslash or a control character"
    parts = name.split("/")
    if ".." in parts:
        return "a path that leads out of the folder it is unpacked in"
    if name.endswith("/"):
        return "a folder: a bundle holds files alone"
    if any(not _NAME.fullmatch(part) for part in parts) or len(name) > 400:
        return "a name that not every system takes"
    return ""


def unpack(path: Path, folder: Path, limits: Limits = LIMITS) -> Manifest:
    """Check a bundle and unpack it into an empty folder; after a BundleError what lies in the folder is of no use."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _checked_entries(archive, path, limits)
            manifest = _read_manifest(archive, entries, path, limits)
            _compare_listing(manifest, entries, path)
            for name, entry in entries.items():
                if name != MANIFEST:
                    _unpack_one(archive, entry, folder / PurePosixPath(name), manifest.files[name], path)
            return manifest
    except FileNotFoundError:
        raise BundleError(f"{path}: there is no such file", hint="check the path") from None
    except IsADirectoryError:
        raise BundleError(f"{path}: a folder, not a file", hint=_OURS) from None
    except DAMAGED_ZIP as error:
        raise BundleError(f"{path}: no bundle, or a damaged one: {error}", hint=_OURS) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # an offset in it leads to before its beginning
            raise BundleError(f"{path}: no bundle, or a damaged one: an offset is wrong", hint=_OURS) from error
        hint = "free space?" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check permissions and the disk"
        raise BundleError(f"{path}: cannot be unpacked: {error.strerror or error}", hint=hint) from error


def _checked_entries(archive: zipfile.ZipFile, path: Path, limits: Limits) -> dict[str, zipfile.ZipInfo]:
    """Look at every entry before any is unpacked."""
    listing = archive.infolist()
    if len(listing) > limits.members:
        raise BundleError(f"{path}: {len(listing)} members, more than {limits.members}", hint=_BOMB)
    entries: dict[str, zipfile.ZipInfo] = {}
    names: set[str] = set()
    for entry in listing:
        # as it stands in the archive: zipfile cuts at a zero byte and turns separators around
        name = entry.orig_filename
        shown = ascii(name[:100])
        if problem := wrong_name(name):
            raise BundleError(f"{path}: member {shown} is {problem}", hint=_UNSAFE)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise BundleError(f"{path}: member {shown} is {_kind_of(kind)}, not a file", hint=_UNSAFE)
        if name.casefold() in names:
            raise BundleError(f"{path}: member {shown} is there twice", hint=_UNSAFE)
        names.add(name.casefold())
        if entry.flag_bits & 0x1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BundleError(f"{path}: member {shown} is encrypted or packed in another way", hint=_UNSAFE)
        _check_size(entry, path, limits)
        entries[name] = entry
    for prefix in {str(parent) for name in entries for parent in PurePosixPath(name).parents}:
        if prefix in entries:
            raise BundleError(f"{path}: {prefix[:100]!a} is a file and a folder", hint=_UNSAFE)
    _check_totals(entries, path, limits)
    return entries


def _check_size(entry: zipfile.ZipInfo, path: Path, limits: Limits) -> None:
    largest = limits.wheel_bytes if entry.orig_filename.startswith(WHEELS) else limits.member_bytes
    shown = ascii(entry.orig_filename[:100])
    if entry.file_size > largest:
        raise BundleError(
            f"{path}: member {shown} would take {entry.file_size / 1e6:.0f} MB, more than {largest / 1e6:.0f}",
            hint=_BOMB,
        )
    if entry.file_size > _CHUNK and entry.file_size > limits.ratio * max(1, entry.compress_size):
        raise BundleError(
            f"{path}: member {shown} would grow {entry.file_size // max(1, entry.compress_size)}-fold", hint=_BOMB
        )


def _check_totals(entries: Mapping[str, zipfile.ZipInfo], path: Path, limits: Limits) -> None:
    wheels = sum(entry.file_size for name, entry in entries.items() if name.startswith(WHEELS))
    others = sum(entry.file_size for entry in entries.values()) - wheels
    if others > limits.total_bytes or wheels > limits.wheels_bytes:
        raise BundleError(f"{path}: {(others + wheels) / 1e6:.0f} MB in all would be unpacked", hint=_BOMB)


_OURS = "a bundle is the .zip that `toto-compat repro` writes"
_UNSAFE = "no bundle of toto-compat has such a member; do not unpack it by other means"
_BOMB = "no bundle of toto-compat is like that; do not unpack it by other means"


def _kind_of(kind: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a folder",
    }
    return kinds.get(kind, "something unknown")


def _read_manifest(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], path: Path, limits: Limits
) -> Manifest:
    if MANIFEST not in entries:
        raise BundleError(f"{path}: no {MANIFEST} in it", hint=_OURS)
    with archive.open(entries[MANIFEST]) as member:
        content = member.read(limits.manifest_bytes + 1)
    if len(content) > limits.manifest_bytes:
        raise BundleError(f"{path}: its {MANIFEST} is too large", hint=_BOMB)
    try:
        data = json.loads(content)
        if isinstance(data, dict) and data.get("schema") not in (None, 1):
            raise BundleError(
                f"{path}: a bundle of format {data['schema']!r}, and this version reads 1", hint="update toto-compat"
            )
        return Manifest.model_validate(data)
    except (ValueError, RecursionError, ValidationError) as error:
        raise BundleError(f"{path}: its {MANIFEST} cannot be read: {str(error)[:200]}", hint=_ASK_AGAIN) from error


_ASK_AGAIN = "it was changed or damaged: ask for the bundle again"


def _compare_listing(manifest: Manifest, entries: Mapping[str, zipfile.ZipInfo], path: Path) -> None:
    there, listed = set(entries) - {MANIFEST}, set(manifest.files)
    if missing := sorted(listed - there):
        raise BundleError(f"{path}: {missing[0]!a} is in its manifest and not in it", hint=_ASK_AGAIN)
    if added := sorted(there - listed):
        raise BundleError(f"{path}: {added[0]!a} is in it and not in its manifest", hint=_ASK_AGAIN)


def _unpack_one(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, member: Member, path: Path) -> None:
    """Write one member, counting what really comes out: a size in the listing may be a lie."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, written = hashlib.sha256(), 0
    with archive.open(entry) as inside, target.open("xb") as file:
        while chunk := inside.read(_CHUNK):
            written += len(chunk)
            if written > entry.file_size:
                break
            digest.update(chunk)
            file.write(chunk)
    if written != member.bytes or digest.hexdigest() != member.sha256:
        raise BundleError(
            f"{path}: {entry.orig_filename[:100]!a} is not what the manifest says: sha256"
            f" {digest.hexdigest()[:12]}..., {written} bytes",
            hint=_ASK_AGAIN,
        )
