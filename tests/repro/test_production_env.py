"""The env file of production: what it sets is taken over, what only a shell could say is named, and no secret."""

from pathlib import Path

import pytest

from tests.repro.test_from_log import PRODUCTION, error_of, from_log
from toto_compat.repro.production_env import read_env


def test_an_env_file_gives_settings_and_torchs_variables_and_never_a_secret(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text(
        "export TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS=1\nTORCHINDUCTOR_MAX_AUTOTUNE=1\n"
        "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123\nALPACA_KEY=PKSECRETSECRET\nDATABASE_URL=postgres://u:pw123456@h/db\n"
        "TORCH_LOGS=recompiles\n",
        encoding="utf-8",
    )
    incident, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml", "--env", str(env))
    assert incident.settings.capture_scalar_outputs
    assert incident.variables == {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert "not passed on: TORCH_LOGS" in text
    for secret in ("hf_abc", "PKSECRET", "pw123456", "postgres"):
        assert secret not in text + printed


def test_a_variable_that_nothing_reads_is_told_and_its_value_written_nowhere(tmp_path: Path) -> None:
    env = tmp_path / "bot.env"
    env.write_text("TOTO_LOGIN=bob:hunter2\nTOTO_DB=bob/hunter2@host\nTORCHINDUCTOR_MAX_AUTOTUNE=1\n", encoding="utf-8")
    incident, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml", "--env", str(env))
    assert incident.variables == {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert "# not passed on: TOTO_LOGIN: nothing reads it" in text
    assert "hunter2" not in text + printed


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("TOTO_COMPILE_MODE=$MODE", "TOTO_COMPILE_MODE: the shell computes it, in line 2 of bot.env"),
        ("PYTORCH_CUDA_ALLOC_CONF=${X:-a}", "PYTORCH_CUDA_ALLOC_CONF: the shell computes it, in line 2 of bot.env"),
        ("TOTO_COMPILE_MODE: max-autotune", "what these lines of bot.env do, which are no plain NAME=value: 2"),
        ("unset TOTO_COMPILE_MODE", "what these lines of bot.env do, which are no plain NAME=value: 2"),
        ("TORCH_ALLOW_X=$(hostname)", "what these lines of bot.env do, which are no plain NAME=value: 2"),
        ("source other.env", "what these lines of bot.env do, which are no plain NAME=value: 2"),
    ],
)
def test_what_only_a_shell_could_say_is_named_as_unknown(tmp_path: Path, line: str, told: str) -> None:
    env = tmp_path / "bot.env"
    env.write_text(f"# of the bot\n{line}\n\nset -a\nexport TORCH_ALLOW_X=1\nexport TORCH_ALLOW_X\n", encoding="utf-8")
    _, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml", "--env", str(env))
    assert f"# unknown: {told}\n" in text
    assert f"unknown: {told}\n" in printed


def test_a_value_that_a_later_line_computes_is_not_the_one_before_it(tmp_path: Path) -> None:
    env = tmp_path / "bot.env"
    env.write_text("TOTO_COMPILE_MODE=default\nTOTO_COMPILE_MODE=$MODE\n", encoding="utf-8")
    given = read_env(env)
    assert (given.values, given.computed) == ({}, {"TOTO_COMPILE_MODE": 2})


def test_a_variable_of_torchs_with_a_secret_in_it_is_named_and_its_value_written_nowhere(tmp_path: Path) -> None:
    env = tmp_path / "bot.env"
    env.write_text("PYTORCH_TOKEN=hunter2hunter2\nTORCHINDUCTOR_X=hf_abcdefghijklmnopqrstuvwxyz\n", encoding="utf-8")
    incident, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml", "--env", str(env))
    assert incident.variables == {}
    assert "# PYTORCH_TOKEN is kept back: a secret\n# TORCHINDUCTOR_X is kept back: a secret\n" in text
    assert "hunter2" not in text + printed and "hf_abc" not in text + printed


@pytest.mark.parametrize("content", ["", "# nothing\n", "mode: default\n", '{"TOTO_COMPILE_MODE": "default"}\n'])
def test_a_file_that_sets_nothing_is_no_env_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "bot.env").write_text(content, encoding="utf-8")
    error = error_of(PRODUCTION, "--env", str(tmp_path / "bot.env"), "-o", str(tmp_path / "i.yaml"))
    assert "no line of it is NAME=value" in error.message and error.hint
    assert not (tmp_path / "i.yaml").exists()
