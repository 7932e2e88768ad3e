"""`toto-compat toggle` from the command line: on by verdict only, off whatever else is broken."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.production.judged_files import row, write_verdict
from toto_compat.cli import cli
from toto_compat.errors import ExitCode, InputError, RefusedError
from toto_compat.production.toggle import toggle_command

TORCH = "2.13.0+cpu"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TOTO_")]:
        monkeypatch.delenv(name)


def toggle(*arguments: str) -> Result:
    return CliRunner().invoke(toggle_command, arguments, catch_exceptions=False)


def enable(*arguments: str) -> Result:
    return toggle("enable", "--torch", TORCH, "--toto-ts", "0.2.0", "--device", "cpu", *arguments)


def lines(path: str = ".env.compile") -> list[str]:
    return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def judged(tmp_path: Path, **changes: Any) -> str:
    return str(write_verdict(tmp_path, row(**{"torch": TORCH, **changes})))


def test_enable_writes_what_the_verdict_allows(tmp_path: Path) -> None:
    Path(".env.compile").write_text("# mine\nexport TOTO_DISABLE_COMPILE=1\nOTHER=x\n", encoding="utf-8")
    assert "is PASS in run nightly" in enable("--verdict", judged(tmp_path)).output
    assert lines() == [
        "export TOTO_DISABLE_COMPILE=0",
        "OTHER=x",
        "export TOTO_COMPILE=1",
        "export TOTO_COMPILE_MODE=default",
        "export TOTO_COMPILE_BACKEND=inductor",
    ]
    assert (
        "compile, cache fixed_size, mode default"
        in toggle("status", "--verdict", judged(tmp_path), "--torch", TORCH, "--toto-ts", "0.2.0").output
    )


@pytest.mark.parametrize("changes", [{"torch": "2.12.0+cpu"}, {"source_hash": "other"}, {"toto_ts": "9"}])
def test_enable_refuses_another_stack_and_leaves_the_file_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    Path(".env.compile").write_text("export TOTO_DISABLE_COMPILE=1\n", encoding="utf-8")
    with pytest.raises(RefusedError):
        enable("--verdict", judged(tmp_path, **changes))
    assert lines() == ["export TOTO_DISABLE_COMPILE=1"]


def test_enable_without_a_verdict_says_how_to_get_one() -> None:
    with pytest.raises(InputError, match="there is no verdict") as raised:
        enable()
    assert "report RUN --format verdict" in str(raised.value)
    assert not Path(".env.compile").exists()


def test_a_forced_enable_keeps_its_reason_in_the_file_until_a_verdict_allows_it(tmp_path: Path) -> None:
    toggle("enable", "--force", "it's incident 42; rm -rf $HOME\nsecond")
    text = Path(".env.compile").read_text(encoding="utf-8")
    assert "# toto-compat: forced on " in text
    assert text.count("\n") == 4
    assert "compile, forced: it's incident 42; rm -rf $HOME second" in toggle("status").output
    enable("--verdict", judged(tmp_path))
    assert "incident" not in Path(".env.compile").read_text(encoding="utf-8")


def test_a_force_without_a_reason_is_refused() -> None:
    with pytest.raises(InputError, match="needs a reason"):
        toggle("enable", "--force", "  ")


def test_mode_takes_only_modes_of_torch() -> None:
    toggle("mode", "max-autotune")
    assert lines() == ["export TOTO_COMPILE_MODE=max-autotune"]
    with pytest.raises(InputError, match="'fast' is unknown"):
        toggle("mode", "fast")


def test_status_shows_file_environment_result_and_the_verdicts_age(tmp_path: Path) -> None:
    toggle("disable")
    os.environ["TOTO_COMPILE"] = "1"
    try:
        shown = json.loads(toggle("status", "--json", "--verdict", judged(tmp_path)).output)
    finally:
        del os.environ["TOTO_COMPILE"]
    assert shown["in the file"] == {"TOTO_DISABLE_COMPILE": "1"}
    assert shown["in the environment"] == {"TOTO_COMPILE": "1"}
    assert shown["effective"].startswith("eager: TOTO_DISABLE_COMPILE=1 in .env.compile:")
    assert "0 days old" in shown["verdict"]


@pytest.mark.parametrize("content", ["", "{", '{"schema": 7}'])
def test_status_and_enable_say_what_is_wrong_with_a_verdict(tmp_path: Path, content: str) -> None:
    (tmp_path / "v.json").write_text(content, encoding="utf-8")
    assert "v.json" in toggle("status", "--verdict", "v.json").output
    with pytest.raises(InputError):
        enable("--verdict", "v.json")


BROKEN = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pydantic", "yaml", "torch", "packaging", "docker", "rich", "platformdirs"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from toto_compat.cli import main
main()
"""


def test_disable_works_with_everything_else_broken(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").write_text("{{{", encoding="utf-8")
    (tmp_path / "v.json").write_text("{{{", encoding="utf-8")
    Path(".env.compile").write_text("export TOTO_COMPILE=1\nif broken (\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, "toggle", "disable"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TOTO_COMPAT_VERDICT": "v.json", "TOTO_COMPAT_CACHE": "/proc/nowhere"},
    )
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert lines()[-1] == "export TOTO_DISABLE_COMPILE=1"


def test_toggle_is_a_command_of_the_program() -> None:
    assert "Switch compile off" in CliRunner().invoke(cli, ["toggle", "--help"]).output


def test_a_terminal_obeys_nothing_of_the_file() -> None:
    Path(".env.compile").write_text('export TOTO_COMPILE_MODE="\x1b[31m\x07x"\n', encoding="utf-8")
    shown = CliRunner().invoke(toggle_command, ["status"], color=True).output
    assert "TOTO_COMPILE_MODE=x" in shown
    assert not {"\x1b", "\x07"} & set(shown)
