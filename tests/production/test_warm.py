"""`toto-compat warm`: what it needs, what it refuses before anything is compiled, and the call that it ends with."""

import importlib.util
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from toto_compat.errors import EnvironmentBuildError, ExitCode, InputError
from toto_compat.production.warm import call_of, refuse_without_torch, run_process, warm_command
from toto_compat.production.warming import WarmRequest


def test_an_interpreter_without_torch_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "toto") else found(name))
    with pytest.raises(EnvironmentBuildError, match="has no torch and no toto-ts") as raised:
        CliRunner().invoke(warm_command, ["--cache-dir", str(tmp_path / "kept")], catch_exceptions=False)
    assert "pip install torch toto-ts" in str(raised.value)
    assert not (tmp_path / "kept").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "toto" else object())
    with pytest.raises(EnvironmentBuildError, match="has no toto-ts:"):
        refuse_without_torch()


def test_a_context_past_the_announced_one_is_refused(tmp_path: Path) -> None:
    asked = ["--cache-dir", str(tmp_path), "--max-context", "256", "--context", "512"]
    with pytest.raises(InputError, match="--context 512 is more than --max-context 256"):
        CliRunner().invoke(warm_command, asked, catch_exceptions=False)


def test_the_call_to_copy_announces_what_was_compiled() -> None:
    asked = WarmRequest(cache_dir="/var/lib/bot/compiled", batch_sizes=(128, 384), max_horizon=8)
    assert call_of(asked) == (
        "compile_toto(model, mode='reduce-overhead', max_context=512, max_horizon=8, batch_sizes=(128, 384), "
        "cache_dir='/var/lib/bot/compiled')"
    )
    assert ", draws='toto-ts', " in call_of(asked.model_copy(update={"draws": "toto-ts"}))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--device", "gpu"), "'gpu' is none of cpu, cuda and cuda:N"),
        (("--device", "cuda:x"), "'cuda:x' is none of"),
        (("--cache-dir", ""), "it is empty"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_before_torch_is_asked_for(words: tuple[str, ...], told: str) -> None:
    refused = CliRunner().invoke(warm_command, ["--cache-dir", "kept", *words])
    assert refused.exit_code == ExitCode.USAGE
    assert told in refused.output


def test_a_checkpoint_that_is_an_empty_word_is_not_the_seeded_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint is named"):
        CliRunner().invoke(warm_command, ["--cache-dir", str(tmp_path), "--checkpoint", ""], catch_exceptions=False)


def test_a_file_is_no_cache_dir(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(InputError, match="kept: a file, and no folder"):
        CliRunner().invoke(warm_command, ["--cache-dir", str(tmp_path / "kept")], catch_exceptions=False)


def test_what_a_compiler_says_need_not_be_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nprintf 'g++: \\377 is no file' >&2\nexit 1\n", encoding="ascii")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EnvironmentBuildError, match="is no file"):
        run_process(WarmRequest(cache_dir=str(tmp_path)))
