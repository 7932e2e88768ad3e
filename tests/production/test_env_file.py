"""An env file is edited in its own lines only, whole at all times, and read as a shell would."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.errors import InputError, StorageError
from toto_compat.production import env_file

DISABLE = "TOTO_DISABLE_COMPILE"


def sourced(path: Path, name: str = DISABLE) -> str:
    """The value a child process sees after a real shell sourced the file."""
    shown = subprocess.run(
        [
            "sh",
            "-c",
            '. "$1"; exec "$2" -c "import os; print(repr(os.environ.get(\'$3\')))"',
            "sh",
            path,
            sys.executable,
            name,
        ],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    return str(eval(shown.stdout.splitlines()[-1]))  # noqa: S307 - what this test's own child printed


MINE = """# settings of the bot
API_URL="https://example.test/?a=1#b"   # with a hash

TOTO_COMPILE_MODE=default # was max-autotune
  export OTHER='two
lines TOTO_DISABLE_COMPILE=0 of text'
"""


def test_only_its_own_lines_change(tmp_path: Path) -> None:
    path = tmp_path / ".env.compile"
    path.write_text(MINE, encoding="utf-8")
    env_file.edit(path, {DISABLE: "1", "TOTO_COMPILE_MODE": "max-autotune"})
    expected = MINE.replace("TOTO_COMPILE_MODE=default # was", "export TOTO_COMPILE_MODE=max-autotune # was")
    assert path.read_text(encoding="utf-8") == f"{expected}export {DISABLE}=1\n"
    assert sourced(path) == "1"
    assert sourced(path, "TOTO_COMPILE_MODE") == "max-autotune"


def test_an_edit_and_its_reverse_give_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "env"
    before = b"\xff\xfe not text\n# comment\nexport TOTO_DISABLE_COMPILE=1\nA=b"
    path.write_bytes(before)
    env_file.edit(path, {DISABLE: "0"})
    assert path.read_bytes() == before.replace(b"COMPILE=1", b"COMPILE=0")
    env_file.edit(path, {DISABLE: "1"})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TOTO_DISABLE_COMPILE=0",
        "TOTO_DISABLE_COMPILE=0\n",
        "export TOTO_DISABLE_COMPILE=0\nTOTO_DISABLE_COMPILE=0\n",
        "TOTO_DISABLE_COMPILE=0\nunset TOTO_DISABLE_COMPILE\n",
        "if true; then\n  export TOTO_DISABLE_COMPILE=0\nfi\n",
        "export TOTO_DISABLE_COMPILE=1\nif true; then\n  export TOTO_DISABLE_COMPILE=0\nfi\n",
        "if false; then\nexport TOTO_DISABLE_COMPILE=0\nfi\n",
        "off() {\nTOTO_DISABLE_COMPILE=0\n}\n",
        "true && export TOTO_DISABLE_COMPILE=0\n",
        "export A=1 TOTO_DISABLE_COMPILE=0\n",
        "TOTO_DISABLE_COMPILE=0 true\n",
        "TOTO_DISABLE_COMPILE=$((1 - 1))\n",
        "TOTO_DISABLE_COMPILE=0; TOTO_COMPILE=1\n",
        "X='\nTOTO_DISABLE_COMPILE=1\n'\n",
        "cat > /dev/null <<EOF\nTOTO_DISABLE_COMPILE=1\nEOF\n",
        "A=1 # it's a comment\nTOTO_DISABLE_COMPILE=0\n",
        "A=one\\\nTOTO_DISABLE_COMPILE=1\n",
        'TOTO_DISABLE_COMPILE="0"\nexport TOTO_DISABLE_COMPILE\n',
        "TOTO_DISABLE_COMPILE= # nothing\n",
    ],
)
def test_disable_holds_after_sourcing_whatever_the_file_says(tmp_path: Path, text: str) -> None:
    path = tmp_path / "env"
    path.write_text(text, encoding="utf-8")
    env_file.edit(path, {DISABLE: "1"}, "switched off", at_any_cost=True)
    assert sourced(path) == "1"
    found = env_file.read(path).assigned(DISABLE)
    assert found is not None and found.value == "1"
    env_file.edit(path, {DISABLE: "1"}, "switched off", at_any_cost=True)
    assert path.read_text(encoding="utf-8").count("# toto-compat: switched off") == 1


_plain = st.text(st.sampled_from("ab01 '\"\\#=$\n\t;&<é"), max_size=12)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["export ", ""]), st.sampled_from([DISABLE, "OTHER"]), _plain), max_size=4))
def test_no_file_keeps_disable_from_being_read_back(lines: list[tuple[str, str, str]]) -> None:
    text = "\n".join(f"{export}{name}={value}" for export, name, value in lines)
    before = env_file.parse(text)
    assert "".join(one.text for one in before) == text
    after = env_file.parse(env_file.edited(before, {DISABLE: "1"}))
    found = after.assigned(DISABLE)
    assert found is not None and found.value == "1" and found.exported


def test_windows_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_bytes(b"A=1\r\nTOTO_DISABLE_COMPILE=0\r\n")
    env_file.edit(path, {DISABLE: "1", "TOTO_COMPILE": "0"})
    assert path.read_bytes() == b"A=1\r\nexport TOTO_DISABLE_COMPILE=1\r\nexport TOTO_COMPILE=0\r\n"


def test_permissions_stay_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    real = tmp_path / "shared" / "env"
    real.write_text("A=1\n", encoding="utf-8")
    real.chmod(0o640)
    link = tmp_path / ".env.compile"
    link.symlink_to("shared/env")
    env_file.edit(link, {DISABLE: "1"})
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == f"A=1\nexport {DISABLE}=1\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [path.name for path in real.parent.iterdir()] == ["env"]


def test_a_dangling_link_gets_the_file_it_names(tmp_path: Path) -> None:
    link = tmp_path / "env"
    link.symlink_to("real")
    env_file.edit(link, {DISABLE: "1"})
    assert sourced(tmp_path / "real") == "1" and link.is_symlink()


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises((StorageError, InputError)):
        env_file.edit(tmp_path / "a", {DISABLE: "1"}, at_any_cost=True)


def test_edits_at_the_same_time_all_arrive(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# mine\n", encoding="utf-8")
    names = [f"NAME_{number}" for number in range(16)]
    threads = [threading.Thread(target=env_file.edit, args=(path, {name: "1"})) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = env_file.read(path)
    assert all(held.assigned(name) for name in names)
    assert held.text.startswith("# mine\n")


def test_where_no_file_can_be_made_beside_it_disable_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root no permission stops a write, so the temporary file is refused instead."""
    path = tmp_path / "env"
    path.write_text("export TOTO_DISABLE_COMPILE=0", encoding="utf-8")
    monkeypatch.setattr(tempfile, "mkstemp", _refuse)
    with pytest.raises(StorageError):
        env_file.edit(path, {DISABLE: "1"})
    assert sourced(path) == "0"
    env_file.edit(path, {DISABLE: "1"}, "switched off", at_any_cost=True)
    assert sourced(path) == "1"


def _refuse(**_: object) -> tuple[int, str]:
    raise PermissionError(13, "Permission denied")


def test_on_a_full_disk_disable_still_flips_the_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files refuses what a full disk refuses: every byte that makes a file longer."""
    path = tmp_path / "env"
    path.write_text("export TOTO_DISABLE_COMPILE=0\n", encoding="utf-8")
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from toto_compat.production import env_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size,) * 2)\n"
        "env_file.edit(Path(sys.argv[1]), {'TOTO_DISABLE_COMPILE': '1'}, 'switched off', at_any_cost=True)\n"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True)
    assert sourced(path) == "1"


def test_a_folder_is_no_env_file(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        env_file.edit(tmp_path, {DISABLE: "1"}, at_any_cost=True)
