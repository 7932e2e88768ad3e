"""`lint-env` on the variables that production's documents recommend, and on ones that people get wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from toto_compat.contract.events import Severity
from toto_compat.environments.torch_sources.variables import load_table
from toto_compat.errors import ExitCode, InputError
from toto_compat.production.lint_env import Finding, Given, findings, lint_env_command


def lint(torch: str = "2.13.0", **values: str) -> list[Finding]:
    return list(findings(Given(values, dict.fromkeys(values, "the environment")), torch, load_table()))


@pytest.mark.parametrize("release", load_table().releases)
@pytest.mark.parametrize(
    "name", ["TORCH_COMPILE_MODE", "TORCHDYNAMO_RECOMPILE_LIMIT", "TORCHDYNAMO_CACHE_SIZE_LIMIT", "TORCH_CUDAGRAPHS"]
)
def test_what_torch_never_read_is_an_error_with_what_to_do_instead(name: str, release: str) -> None:
    (found,) = lint(release, **{name: "1"})
    assert found.severity is Severity.ERROR
    assert "read" in found.problem and found.fix


@pytest.mark.parametrize(
    "name", ["TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "TORCH_TRACE"]
)
def test_what_torch_reads_is_no_finding(name: str) -> None:
    assert lint(**{name: "1"}) == []


def test_a_misspelling_names_what_was_meant() -> None:
    (found,) = lint(TORCHDYNAMO_CAPTURE_SCALAR_OUTPUT="1")
    assert found.fix == "did you mean TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS?"
    (own,) = lint(TOTO_COMPILE_MOD="default")
    assert own.fix == "did you mean TOTO_COMPILE_MODE?"


def test_a_flag_that_torch_compares_with_1_is_not_set_by_true() -> None:
    (found,) = lint(TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS="true")
    assert "counts as off" in found.problem
    assert lint(TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS="0") == []


def test_a_variable_of_another_release_does_nothing_here() -> None:
    table = load_table()
    newest = [one for one in table.variables.values() if one.releases[0] == table.releases[-1]]
    newer = next(one for one in newest if one.name.startswith("TORCHINDUCTOR"))
    (found,) = lint(table.releases[0], **{newer.name: "1"})
    assert f"only {table.releases[-1]} does" in found.problem
    assert all("only" not in one.problem for one in lint(table.releases[-1], **{newer.name: "1"}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"TOTO_DISABLE_COMPILE": "1", "TOTO_COMPILE": "1"}, "is on and wins"),
        ({"TORCHDYNAMO_DISABLE": "1", "TOTO_COMPILE": "1"}, "torch.compile does nothing under it"),
        ({"TOTO_COMPILE_FORCE": "why"}, "forces nothing"),
        ({"TOTO_COMPILE": "ja"}, "counts as 0"),
        ({"TOTO_DISABLE_COMPILE": "nein"}, "counts as 1"),
        ({"TOTO_COMPILE_MODE": "fast"}, "is no mode"),
    ],
    ids=str,
)
def test_conflicts_and_invalid_values_are_told(values: dict[str, str], said: str) -> None:
    assert any(said in one.problem for one in lint(**values))


def test_other_peoples_variables_are_left_alone() -> None:
    assert lint(PATH="/bin", CUDA_VISIBLE_DEVICES="0", TORCH_NCCL_BLOCKING_WAIT="1", PYTORCH_CUDA_ALLOC_CONF="x") == []


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(lint_env_command, arguments)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_productions_own_file_of_old_is_taken_apart(tmp_path: Path) -> None:
    file = tmp_path / ".env.compile"
    mode = b"export TORCH_COMPILE_MODE=max-autotune\r\n"
    file.write_bytes(b"TOTO_DISABLE_COMPILE=1\n" + mode + b"export TOTO_COMPILE=1\n" * 2)
    code, text = run(str(file), "--torch", "2.9.0", "--fail-on", "error")
    assert code == ExitCode.FINDINGS
    assert f"error: TOTO_DISABLE_COMPILE ({file}:1): not exported: after `source` no program sees it" in text
    assert f"({file}:2): torch 2.9.0 never reads it -> the mode is an argument of torch.compile" in text
    assert "Windows line end" in text and "also assigned in line 3" in text
    assert f"eager: TOTO_DISABLE_COMPILE=1 in {file}:1" in text


def test_what_is_in_force_is_said_of_the_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPILE_MODE", "default")
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    document = json.loads(run("--json", "--torch", "2.13.0+cpu")[1])
    assert document["table"] == "2.13.0"
    assert any("mode default" in line for line in document["in_force"])
    assert any(
        line.startswith("TORCH_LOGS=recompiles is read by torch 2.13.0 in torch/") for line in document["in_force"]
    )


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(str(tmp_path / "gone"))
    with pytest.raises(InputError, match="is no version"):
        run("--torch", "newest")


def test_a_binary_file_is_not_told_to_be_in_order(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\x7fELF\0\0TOTO_COMPILE=1\n")
    with pytest.raises(InputError, match="this is no env file") as caught:
        CliRunner().invoke(lint_env_command, [str(tmp_path / "core")], catch_exceptions=False)
    assert "NAME=value" in caught.value.hint


def test_an_empty_release_is_not_the_newest() -> None:
    with pytest.raises(InputError, match="'' is no version"):
        CliRunner().invoke(lint_env_command, ["--torch", ""], catch_exceptions=False)


def test_a_terminal_obeys_nothing_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text('export TORCH_LOGS="\x1b[31m\x07x"\n', encoding="utf-8")
    shown = CliRunner().invoke(lint_env_command, [str(path)], color=True).output
    assert "TORCH_LOGS=x is read" in shown
