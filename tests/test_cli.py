"""The command as a user meets it: every listed command exists, and every mistake ends with its own exit code."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from toto_compat.cli import COMMANDS, SECTIONS, cli, main
from toto_compat.errors import ExitCode, TotoCompatError


def run_command(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toto_compat.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)} | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_and_explains_itself(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help


def commands_below(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for below, subcommand in command.commands.items():
            yield from commands_below(subcommand, f"{name} {below}")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    silent = [
        f"{path} {option.opts[-1]}"
        for path, one in commands_below(command, name)
        for option in one.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert silent == []


@pytest.mark.parametrize("name", ["toggle", "images"])
def test_the_list_of_subcommands_is_not_cut_off(name: str) -> None:
    shown = run_command(name, "--help")
    assert shown.returncode == ExitCode.OK
    assert "..." not in shown.stdout.partition("Commands:")[2]


def test_every_command_stands_in_one_section_of_the_help() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)


def test_help_lists_every_command() -> None:
    shown = run_command("--help")
    assert shown.returncode == ExitCode.OK
    described = {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ") and line.strip()}
    assert set(COMMANDS) <= described
    assert all(f"{heading}:" in shown.stdout for heading in SECTIONS)


def test_an_unknown_command_is_a_usage_error() -> None:
    shown = run_command("matrixx")
    assert shown.returncode == ExitCode.USAGE
    assert "No such command 'matrixx'" in shown.stderr


def test_an_unknown_option_is_a_usage_error_without_traceback() -> None:
    shown = run_command("matrix", "--no-such-option")
    assert shown.returncode == ExitCode.USAGE
    assert "--no-such-option" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_broken_matrix_file_names_file_and_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("schema: 1\nenvironments: [\n", encoding="utf-8")
    shown = run_command("matrix", "--matrix", str(broken), "--dry-run", cwd=tmp_path)
    assert shown.returncode == ExitCode.MATRIX_FILE
    assert "broken.yaml" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_selector_that_matches_nothing_is_a_selection_error() -> None:
    shown = run_command("matrix", "torch-9.9.9-cpu/*", "--dry-run", cwd=Path(__file__).parent.parent)
    assert shown.returncode == ExitCode.SELECTION
    assert "torch-9.9.9-cpu" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_missing_log_is_an_input_error(tmp_path: Path) -> None:
    shown = run_command("analyze", str(tmp_path / "absent.log"))
    assert shown.returncode in {ExitCode.INPUT, ExitCode.USAGE}
    assert "absent.log" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_clicks_own_exit_ends_the_command_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("stub")
    def stub() -> None:
        click.get_current_context().exit(ExitCode.FINDINGS)

    monkeypatch.setattr(cli, "get_command", lambda *_: stub)
    monkeypatch.setattr(sys, "argv", ["toto-compat", "stub"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.FINDINGS


def test_exit_codes_tell_the_error_classes_apart() -> None:
    codes = [error.code for error in TotoCompatError.__subclasses__()]
    assert len(codes) == len(set(codes))
    assert ExitCode.BUG not in codes
