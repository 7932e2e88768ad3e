"""What pip is set to use is asked of pip itself, and pages of indexes are read as pip reads them."""

import http.server
import io
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from toto_compat.environments.package_index import IndexSettings, index_settings, list_wheels, read_answer, redacted
from toto_compat.errors import EnvironmentBuildError

TORCH = "torch-2.15.0-cp312-cp312-manylinux_2_28_x86_64.whl"


@pytest.fixture
def pip_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    path = tmp_path / "pip.conf"
    path.write_text("[global]\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def test_variables_come_before_sections_of_commands_and_these_before_the_general_one(
    pip_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_conf.write_text(
        "[global]\nindex-url = https://general.example/simple\ncert = /general.pem\n"
        "extra-index-url = https://one.example/simple\n  https://two.example/simple\n"
        "[install]\nindex-url = https://install.example/simple\n"
    )
    asked = index_settings()
    assert asked.indexes == (
        "https://install.example/simple",
        "https://one.example/simple",
        "https://two.example/simple",
    )
    assert asked.certificates == "/general.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example/simple")
    assert index_settings().indexes[0] == "https://variable.example/simple"


def test_without_any_setting_it_is_pips_own_index(pip_conf: Path) -> None:
    [index] = index_settings().indexes
    assert index.startswith("https://")


def test_no_index_leaves_the_folders(pip_conf: Path, tmp_path: Path) -> None:
    pip_conf.write_text(f"[global]\nno-index = true\nfind-links = {tmp_path}\n")
    (tmp_path / TORCH).touch()
    (tmp_path / "torch-2.15.0.tar.gz").touch()
    (tmp_path / "torchvision-0.30-py3-none-any.whl").touch()
    settings = index_settings()
    assert settings.indexes == ()
    [wheel], warnings = list_wheels(settings, "torch")
    assert (wheel.version, wheel.pythons, warnings) == (Version("2.15.0"), ("3.12",), [])


def test_an_interpreter_without_pip_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="cannot start"):
        index_settings(str(tmp_path / "python"))


def test_an_index_in_a_folder_is_read(tmp_path: Path) -> None:
    page = tmp_path / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    digest = "a" * 64
    page.write_text(
        f'<base href="../../files/"><a href="{TORCH}#sha256={digest}" data-yanked="too slow &amp; wrong">{TORCH}</a>'
    )
    [wheel], _ = list_wheels(IndexSettings(((tmp_path / "simple").as_uri(),)), "torch")
    assert (wheel.sha256, wheel.yanked) == (digest, "too slow & wrong")
    assert wheel.url == (tmp_path / "files" / TORCH).as_uri()


@pytest.mark.parametrize("setting", ["indexes", "folders"])
def test_a_setting_that_is_no_address_is_told_without_its_password(setting: str) -> None:
    usual = {"indexes": ("https://index.example/simple",)}
    with pytest.raises(EnvironmentBuildError, match=r"pip is set to ask '\[::1/simple'") as told:
        IndexSettings(**{**usual, setting: (*usual["indexes"], "https://me:secret@[::1/simple")})  # type: ignore[arg-type]
    assert "secret" not in str(told.value)


def test_a_password_is_not_shown() -> None:
    assert redacted("https://me:secret@index.example/simple/torch/") == "https://****@index.example/simple/torch/"


# --- an index that answers with something else ------------------------------------------------------------------------

FILE = {"filename": TORCH, "url": f"/files/{TORCH}", "hashes": {"sha256": "a" * 64}}


class Page:
    """What the server answers to every request."""

    body = b""
    kind = "application/vnd.pypi.simple.v1+json"
    missing = 0  # bytes that are promised and not sent


@pytest.fixture
def page() -> Iterator[tuple[Page, IndexSettings]]:
    own = Page()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if own.kind == "garbage":
                self.wfile.write(b"no HTTP at all\r\n\r\n")
                return
            self.send_response(200)
            self.send_header("Content-Type", own.kind)
            self.send_header("Content-Length", str(len(own.body) + own.missing))
            self.end_headers()
            self.wfile.write(own.body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield own, IndexSettings((f"http://127.0.0.1:{server.server_address[1]}/simple",))
        server.shutdown()


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"null", b'{"files": {}}', b'{"files": [3]}', b"[" * 100_000, b'{"files": [{"filename": 3}]}'],
    ids=["empty", "no files", "a list", "null", "no list", "numbers", "deep", "no name"],
)
def test_a_page_that_is_none_of_an_index_is_an_error(page: tuple[Page, IndexSettings], body: bytes) -> None:
    served, settings = page
    served.body = body
    with pytest.raises(EnvironmentBuildError, match="not a page of a package index"):
        list_wheels(settings, "torch")


def test_an_answer_that_is_cut_off_is_an_error_and_not_a_short_list(page: tuple[Page, IndexSettings]) -> None:
    served, settings = page
    served.kind, served.body, served.missing = "text/html", f'<a href="{TORCH}">x</a>'.encode(), 500
    with pytest.raises(EnvironmentBuildError, match="cut off after"):
        list_wheels(settings, "torch")


def test_a_server_that_speaks_no_http_is_an_error(page: tuple[Page, IndexSettings]) -> None:
    served, settings = page
    served.kind = "garbage"
    with pytest.raises(EnvironmentBuildError, match="no HTTP answer"):
        list_wheels(settings, "torch")


class Trickle(io.BytesIO):
    """An answer that never ends."""

    headers = None

    def read1(self, _size: int | None = -1, /) -> bytes:
        return b"x"


def test_an_answer_that_never_ends_is_given_up_by_time_and_by_size() -> None:
    seconds = itertools.count(step=1.0)
    with pytest.raises(OSError, match="did not end within 300 s"):
        read_answer(Trickle(), clock=lambda: next(seconds))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="longer than 1,000 bytes"):
        read_answer(Trickle(), most_bytes=1000, clock=lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("digest", ["../../../evil", 5, "A" * 63, "g" * 64, None])
def test_a_hash_that_is_none_is_left_out(page: tuple[Page, IndexSettings], digest: object) -> None:
    served, settings = page
    served.body = json.dumps({"files": [{**FILE, "hashes": {"sha256": digest}}]}).encode()
    [[wheel], _] = list_wheels(settings, "torch")
    assert wheel.sha256 == "", "it would name a file of the cache"


@pytest.mark.parametrize(
    ("yanked", "told"), [(None, None), (False, None), ("", None), (True, ""), ("too slow", "too slow")]
)
def test_withdrawn_is_what_pip_takes_for_withdrawn(
    page: tuple[Page, IndexSettings], yanked: object, told: str | None
) -> None:
    served, settings = page
    served.body = json.dumps({"files": [{**FILE, "yanked": yanked}]}).encode()
    [[wheel], _] = list_wheels(settings, "torch")
    assert wheel.yanked == told


def test_files_of_other_projects_make_no_release(page: tuple[Page, IndexSettings]) -> None:
    served, settings = page
    other = {**FILE, "filename": TORCH.replace("torch-2.15.0", "torchvision-2.99.0")}
    served.body = json.dumps({"files": [other, FILE]}).encode()
    [wheels, _] = list_wheels(settings, "torch")
    assert [wheel.file for wheel in wheels] == [TORCH]


def test_a_page_of_find_links_that_does_not_answer_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / TORCH).touch()
    settings = IndexSettings((), folders=(str(tmp_path), "http://me:secret@127.0.0.1:9/wheels.html"))
    [[wheel], [warning]] = list_wheels(settings, "torch")
    assert (wheel.file, "find-links does not answer" in warning, "secret" in warning) == (TORCH, True, False)
