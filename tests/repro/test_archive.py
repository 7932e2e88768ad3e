"""A bundle is the same file for the same content, and what is wrong with one is told before anything is unpacked."""

import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.errors import BundleError, ExitCode, StorageError
from toto_compat.repro.archive import MANIFEST, Limits, is_bundle, unpack, write_bundle, wrong_name

ABOUT = {"made_by": "1", "cell": "torch-2.13.0-cpu/list_index/default", "shows": "REPRODUCED"}
FILES = {"incident.yaml": b"schema: 1\n", "code/6_0_0/output.py": b"x = 1\n" * 400, "cell.log": b"\xff\x00"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    target = tmp_path / "one.bundle.zip"
    write_bundle(target, ABOUT, FILES)
    return target


def rewritten(bundle: Path, change: Callable[[dict[str, tuple[zipfile.ZipInfo, bytes]]], None]) -> Path:
    """The same archive with something else in it, as somebody with a zip program would make it."""
    with zipfile.ZipFile(bundle) as archive:
        members = {entry.filename: (entry, archive.read(entry)) for entry in archive.infolist()}
    change(members)
    other = bundle.with_name("other.bundle.zip")
    with zipfile.ZipFile(other, "w") as archive:
        for entry, content in members.values():
            archive.writestr(entry, content)
    return other


def refused(bundle: Path, tmp_path: Path, **limits: int) -> str:
    """The message; nothing may lie outside of the folder, and the folder holds nothing that was refused by its name."""
    folder = tmp_path / "inside" / "out"
    folder.mkdir(parents=True)
    before = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    with pytest.raises(BundleError) as error:
        unpack(bundle, folder, Limits(**limits))
    assert error.value.code is ExitCode.BUNDLE
    assert error.value.hint
    assert {path for path in tmp_path.rglob("*") if folder not in path.parents} == before
    return error.value.message


def test_what_went_in_comes_out(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = unpack(bundle, out)
    assert {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()} == FILES
    assert manifest.shows == "REPRODUCED"
    assert set(manifest.files) == set(FILES)
    assert is_bundle(bundle)


def test_the_same_content_makes_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    write_bundle(again, ABOUT, dict(reversed(FILES.items())))
    assert again.read_bytes() == bundle.read_bytes()


def test_a_file_that_exists_is_not_overwritten_and_nothing_is_left_beside_it(bundle: Path, tmp_path: Path) -> None:
    before = bundle.read_bytes()
    with pytest.raises(StorageError, match="not overwritten"):
        write_bundle(bundle, ABOUT, {"a": b""})
    assert bundle.read_bytes() == before
    assert list(tmp_path.iterdir()) == [bundle]


def test_a_wheel_is_put_in_from_its_file(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    write_bundle(tmp_path / "b.zip", ABOUT, FILES, {wheel.name: wheel})
    unpack(tmp_path / "b.zip", tmp_path / "out")
    assert (tmp_path / "out" / "wheels" / wheel.name).read_bytes() == b"wheel"


def test_a_changed_member_is_noticed(bundle: Path, tmp_path: Path) -> None:
    def change(members: dict[str, tuple[zipfile.ZipInfo, bytes]]) -> None:
        members["incident.yaml"] = (members["incident.yaml"][0], b"schema: 2\n")

    assert "'incident.yaml' is not what the manifest says" in refused(rewritten(bundle, change), tmp_path)


def test_a_flipped_bit_is_noticed(bundle: Path, tmp_path: Path) -> None:
    content = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as archive:
        entry = archive.getinfo("code/6_0_0/output.py")
    content[entry.header_offset + 30 + len(entry.filename) + 3] ^= 1
    bundle.write_bytes(content)
    assert refused(bundle, tmp_path)


@pytest.mark.parametrize("kept", [0, 10, 200, -1, -30])
def test_a_bundle_that_was_cut_off_is_noticed(bundle: Path, tmp_path: Path, kept: int) -> None:
    bundle.write_bytes(bundle.read_bytes()[:kept])
    assert "no bundle, or a damaged one" in refused(bundle, tmp_path)


@pytest.mark.parametrize("added", [True, False])
def test_a_member_too_many_or_too_few_is_noticed(bundle: Path, tmp_path: Path, added: bool) -> None:
    def change(members: dict[str, tuple[zipfile.ZipInfo, bytes]]) -> None:
        if added:
            members["more"] = (zipfile.ZipInfo("more"), b"")
        else:
            del members["cell.log"]

    told = refused(rewritten(bundle, change), tmp_path)
    assert ("'more' is in it and not in its manifest" if added else "'cell.log' is in its manifest") in told


@pytest.mark.parametrize(
    "name",
    [
        "../out.txt",
        "a/../../out.txt",
        "/etc/out.txt",
        "C:/out.txt",
        "..\\out.txt",
        "a\\..\\..\\out.txt",
        "a//b",
        "./a",
        "a/",
        "a\nb",
        "a\x00b",
        "..",
        "x" * 300,
        ".hidden",
        "a/~\N{BULLET}",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    assert wrong_name(name)

    def change(members: dict[str, tuple[zipfile.ZipInfo, bytes]]) -> None:
        entry = zipfile.ZipInfo("x")
        entry.filename = entry.orig_filename = name
        members["zz"] = (entry, b"evil")

    refused(rewritten(bundle, change), tmp_path)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_a_name_that_is_let_through_stays_within_the_folder(name: str) -> None:
    if not wrong_name(name):
        inside = Path("/folder") / name
        assert inside.is_relative_to("/folder")
        assert ".." not in inside.parts


@pytest.mark.parametrize(
    ("kind", "told"),
    [(stat.S_IFLNK, "a link"), (stat.S_IFCHR, "a device"), (stat.S_IFBLK, "a device"), (stat.S_IFIFO, "a pipe")],
)
def test_a_link_or_a_device_is_refused(bundle: Path, tmp_path: Path, kind: int, told: str) -> None:
    def change(members: dict[str, tuple[zipfile.ZipInfo, bytes]]) -> None:
        members["incident.yaml"][0].external_attr = (kind | 0o777) << 16

    assert f"'incident.yaml' is {told}" in refused(rewritten(bundle, change), tmp_path)


def test_a_member_that_is_there_twice_is_refused(bundle: Path, tmp_path: Path) -> None:
    def change(members: dict[str, tuple[zipfile.ZipInfo, bytes]]) -> None:
        members["again"] = (zipfile.ZipInfo("INCIDENT.yaml"), b"schema: 1\n")

    assert "is there twice" in refused(rewritten(bundle, change), tmp_path)


def test_a_bomb_is_refused_by_what_it_would_become(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, "{}")
        archive.writestr("zeros", bytes(5_000_000))
    assert "-fold" in refused(bomb, tmp_path)


def test_a_log_of_one_line_ten_thousand_times_is_no_bomb_to_whoever_unpacks_it(tmp_path: Path) -> None:
    log = b"W1030 12:00:00 [6/8] torch._dynamo hit config.recompile_limit (8)\n" * 40_000
    write_bundle(tmp_path / "loud.zip", {"made_by": "1", "cell": "c"}, {"cell.log": log})
    unpack(tmp_path / "loud.zip", tmp_path / "inside")
    assert (tmp_path / "inside" / "cell.log").read_bytes() == log


def test_too_many_too_large_and_too_much_in_all_are_refused(bundle: Path, tmp_path: Path) -> None:
    assert "members, more than 2" in refused(bundle, tmp_path, members=2)
    assert "more than 0" in refused(bundle, tmp_path / "b", member_bytes=100)
    assert "in all would be unpacked" in refused(bundle, tmp_path / "c", total_bytes=2000)


def test_a_listing_that_lies_about_a_size_is_noticed(bundle: Path, tmp_path: Path) -> None:
    """The directory at the end says another size than what is really packed: no more than that is ever written."""
    content = bundle.read_bytes()
    real, lie = (2400).to_bytes(4, "little"), (24).to_bytes(4, "little")
    assert content.count(real) >= 2
    bundle.write_bytes(content.replace(real, lie))
    refused(bundle, tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "inside").rglob("*") if path.is_file()) < 1000


@pytest.mark.parametrize(
    "manifest",
    ["", "no json", "[]", "{}", json.dumps({"schema": 2}), json.dumps({"schema": 1, "files": {"a": 1}})],
)
def test_a_manifest_that_is_none_is_told(bundle: Path, tmp_path: Path, manifest: str) -> None:
    def change(members: dict[str, tuple[zipfile.ZipInfo, bytes]]) -> None:
        members[MANIFEST] = (members[MANIFEST][0], manifest.encode())

    assert refused(rewritten(bundle, change), tmp_path)


def test_another_kind_of_archive_or_none_is_told(tmp_path: Path) -> None:
    for name, content in (("a.tar.gz", b"\x1f\x8b\x08\x00rest"), ("b.zip", b"PK\x05\x06" + bytes(18)), ("c.zip", b"")):
        (tmp_path / name).write_bytes(content)
        assert is_bundle(tmp_path / name)
        folder = tmp_path / f"out-{name}"
        with pytest.raises(BundleError):
            unpack(tmp_path / name, folder)
    with pytest.raises(BundleError, match="no such file"):
        unpack(tmp_path / "missing.zip", tmp_path / "out")
