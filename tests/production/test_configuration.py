"""The lines that a report prints, sourced by a real shell and read by `configure()` in a child process."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.production.judged_files import TODAY, row, write_verdict
from tests.verdict.sample_cells import good_result, production_incident
from tests.verdict.stored_runs import store_run
from toto_compat.contract.request import CompileSettings, Device
from toto_compat.contract.result import CellResult
from toto_compat.matrix.user_cache import user_cache_identity
from toto_compat.production import configuration, configure, installed
from toto_compat.production.configuration import dynamo_settings
from toto_compat.report.command import report_command

READ = """
import json
from toto_compat.production import configure
switch = configure().switch
print(json.dumps([switch.eager_because, switch.compile, switch.mode, switch.backend]))
"""


@pytest.fixture(autouse=True)
def _as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has no torch: its release is what the rows of these tests were judged on."""
    monkeypatch.setattr(configuration, "_torch_here", lambda: TORCH)
    monkeypatch.setattr(installed, "package_version", {"toto-ts": "0.2.0"}.get)


TORCH = "2.13.0+cpu"


def report(results: Path, *arguments: str) -> str:
    done = CliRunner().invoke(report_command, ["run", *arguments, "--results", str(results)], catch_exceptions=False)
    return done.stdout


def sourced(lines: str, folder: Path) -> list[Any]:
    """What a service sees whose start script sources these lines."""
    (folder / ".env.compile").write_text(lines, encoding="utf-8")
    shown = subprocess.run(
        ["sh", "-c", '. ./.env.compile; exec "$1" -c "$2"', "sh", sys.executable, READ],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: list[Any] = json.loads(shown.stdout)
    return answer


@pytest.mark.parametrize(
    ("cells", "seen"),
    [
        (
            [good_result(torch="2.9.0", build="cu128", mode="reduce-overhead")],
            ["", True, "reduce-overhead", "inductor"],
        ),
        ([production_incident(build="cu128")], ["TOTO_DISABLE_COMPILE=1 in the environment", False, None, None]),
    ],
    ids=["enable", "keep off"],
)
def test_the_page_the_record_and_the_env_format_say_what_configure_reads(
    tmp_path: Path, cells: list[CellResult], seen: list[Any]
) -> None:
    store_run(tmp_path, "run", cells, device="cuda")
    lines = report(tmp_path, "--format", "env")
    assert sourced(lines, tmp_path) == seen
    assert f"Set in production:\n\n```\n{lines}```" in report(tmp_path, "--format", "decision")
    report(tmp_path, "--format", "html", "--output", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert lines.rstrip("\n").replace("'", "&#39;") in page.replace("&#x27;", "&#39;")


def test_the_lines_of_the_device_that_is_asked_for(tmp_path: Path) -> None:
    store_run(tmp_path, "run", [good_result()])
    assert "export TOTO_COMPILE=1" in report(tmp_path, "--format", "env")
    assert "export TOTO_DISABLE_COMPILE=1" in report(tmp_path, "--format", "env", "--device", "cuda")


def test_without_a_verdict_nothing_is_compiled() -> None:
    plan = configure(environment={"TOTO_COMPILE": "1"}).plan(Device.CPU, None)
    assert plan.cache is None and "there is no verdict" in plan.why


def test_a_verdict_for_what_is_installed_is_followed(tmp_path: Path) -> None:
    path = write_verdict(tmp_path, row())
    plan = configure(verdict=path, environment={}).plan(Device.CPU, None)
    assert (plan.cache, plan.mode) == ("fixed_size", "default")
    named = configure(environment={"TOTO_COMPAT_VERDICT": str(path)}).plan(Device.CPU, None)
    assert named == plan


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"TOTO_DISABLE_COMPILE": "1"}, "TOTO_DISABLE_COMPILE=1"),
        ({"TOTO_COMPILE": "0"}, "TOTO_COMPILE is off"),
        ({"TOTO_COMPILE_MODE": "max-autotune"}, "mode max-autotune was not judged PASS"),
        ({"TOTO_COMPILE_MODE": "quick"}, "is no mode"),
        ({"TOTO_COMPILE_BACKEND": "aot_eager"}, "backend aot_eager was not judged PASS"),
        ({"TOTO_COMPILE_FORCE": "because"}, "TOTO_COMPILE is not on"),
    ],
    ids=str,
)
def test_what_the_variables_forbid_stays_eager(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    plan = configure(verdict=write_verdict(tmp_path, row()), environment=environment).plan(Device.CPU, None)
    assert plan.cache is None and said in plan.why


@pytest.mark.parametrize("content", [b"", b"{}", b'{"schema": 99}', b"\xff" * 10])
def test_a_broken_verdict_is_no_verdict_and_no_exception(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "verdict.json"
    path.write_bytes(content)
    plan = configure(verdict=path, environment={}).plan(Device.CPU, None)
    assert plan.cache is None and str(path) in plan.why


def test_past_its_review_date_a_verdict_is_not_followed(tmp_path: Path) -> None:
    configured = configure(verdict=write_verdict(tmp_path, row()), environment={})
    assert "was to be reviewed" in configured.plan(Device.CPU, None, today=TODAY + timedelta(days=91)).why


def test_a_force_needs_no_verdict_and_says_its_reason() -> None:
    environment = {"TOTO_COMPILE": "1", "TOTO_COMPILE_FORCE": "incident 42", "TOTO_COMPILE_MODE": "default"}
    plan = configure(environment=environment).plan(Device.CPU, None)
    assert (plan.cache, plan.mode) == ("fixed_size", "default")
    assert "incident 42" in plan.why


def test_a_cache_that_is_taken_alone_is_used_and_not_compiled(tmp_path: Path) -> None:
    path = write_verdict(tmp_path, row(mode=None))
    plan = configure(verdict=path, environment={"TOTO_COMPILE": "0", "TOTO_DISABLE_COMPILE": "0"}).plan(
        Device.CPU, None
    )
    assert (plan.cache, plan.mode) == ("fixed_size", None)


def test_a_cache_of_ones_own_must_be_the_judged_one_to_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\n", encoding="utf-8")
    source = f"{file}:Mine"
    judged = row(cache="mine", cache_source=source, cache_identity=user_cache_identity(source))
    configured = configure(verdict=write_verdict(tmp_path, judged), environment={})
    assert configured.plan(Device.CPU, None).cache_source == source
    file.write_text("class Mine: x = 1\n", encoding="utf-8")
    assert "differs from what was judged" in configured.plan(Device.CPU, None).why
    file.unlink()
    assert "cannot be read" in configured.plan(Device.CPU, None).why


def test_settings_go_by_the_name_that_the_release_knows() -> None:
    settings = CompileSettings(recompile_limit=64, capture_scalar_outputs=True)
    assert dynamo_settings(settings, "2.6.0") == {"capture_scalar_outputs": True, "cache_size_limit": 64}
    assert dynamo_settings(settings, "2.13.0+cpu") == {"capture_scalar_outputs": True, "recompile_limit": 64}


def test_it_prints_what_is_in_force_and_what_decided_it(tmp_path: Path) -> None:
    path = tmp_path / ".env.compile"
    path.write_text("export TOTO_DISABLE_COMPILE=1\n", encoding="utf-8")
    text = str(configure(env_file=path, environment={"TOTO_COMPILE_MODE": "default"}))
    assert f"TOTO_DISABLE_COMPILE  1  ({path}:1)" in text
    assert "TOTO_COMPILE_MODE     default  (the environment)" in text
    assert "runs                  eager" in text
