"""An incident file from a log: what it shows is filled in, what it cannot know is named, and no secret gets through."""

import os
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.repro.production_events import LIMIT_HIT
from toto_compat.contract.request import CompileSettings
from toto_compat.errors import ExitCode, InputError, StorageError, TotoCompatError
from toto_compat.repro.command import repro_command
from toto_compat.repro.drafted import write_incident
from toto_compat.repro.incident import Incident, is_like, load_incident, match_event
from toto_compat.repro.production_freeze import read_freeze
from toto_compat.repro.seen import guess_cache, how_sure, read_log

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "fixtures" / "logs"
PRODUCTION = LOGS / "production.log"
LIMIT = """\
W1117 12:52:09.450000 16547 torch/_dynamo/convert_frame.py:1994] [6/8] torch._dynamo hit config.recompile_limit (8)
W1117 12:52:09.450000 16547 torch/_dynamo/convert_frame.py:1994] [6/8]    function: 'positional_embedding' \
(/venv/lib/python3.11/site-packages/toto/model/attention.py:105)
W1117 12:52:09.450000 16547 torch/_dynamo/convert_frame.py:1994] [6/8]    last reason: 6/7: \
kv_cache._current_idx[7] == 0
"""


def from_log(log: Path, target: Path, *more: str) -> tuple[Incident, str, str]:
    """The incident, its text, and what was printed."""
    arguments = ["--from-log", str(log), "--matrix", str(ROOT / "matrix.yaml"), "-o", str(target), *more]
    run = CliRunner().invoke(repro_command, arguments, catch_exceptions=False)
    assert run.exit_code == ExitCode.OK, run.output
    return load_incident(target), target.read_text(encoding="utf-8"), run.output


def error_of(log: Path, *more: str) -> TotoCompatError:
    run = CliRunner().invoke(repro_command, ["--from-log", str(log), "--matrix", str(ROOT / "matrix.yaml"), *more])
    assert isinstance(run.exception, TotoCompatError), run.output
    return run.exception


def test_productions_raw_lines_name_2_9_0_first_and_productions_environment(tmp_path: Path) -> None:
    incident, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml")
    assert read_log(str(PRODUCTION)).releases[0].release == "2.9.0"
    assert incident.environment == "torch-2.9.0-cu128"
    assert (incident.cache, incident.mode) == ("list_index", "reduce-overhead")
    assert "best first: 2.9.0, 2.9.1" in printed
    assert "# unknown: the workload" in text
    limit = incident.expect[0]
    assert (limit.function, limit.limit, limit.reason_like) == (
        "positional_embedding",
        8,
        "*/7: kv_cache._current_idx[7] == 0",
    )


@pytest.mark.parametrize(
    ("changed", "date"),
    [
        ("2026-11-18T10:00", "2026-11-17"),
        ("2026-01-02T10:00", "2025-11-17"),  # no line is younger than the log
        ("2026-11-16T23:30", "2026-11-17"),  # but for a clock ahead of UTC
        ("2025-12-31T23:30", "2025-11-17"),
    ],
)
def test_a_line_without_a_year_is_of_the_last_one_that_it_can_be_of(tmp_path: Path, changed: str, date: str) -> None:
    log = tmp_path / "service.log"
    log.write_text(LIMIT, encoding="utf-8")
    moment = datetime.fromisoformat(f"{changed}Z").timestamp()
    os.utime(log, (moment, moment))
    assert from_log(log, tmp_path / "i.yaml")[0].date == date


def test_a_warning_that_says_less_than_another_is_not_expected_twice(tmp_path: Path) -> None:
    incident, _, _ = from_log(PRODUCTION, tmp_path / "i.yaml")
    assert sum(one.kind == "recompile_limit" for one in incident.expect) == 1


def test_the_lines_of_a_run_on_2_13_0_are_certain_and_name_the_interpreter(tmp_path: Path) -> None:
    log = tmp_path / "cell.log"
    log.write_text(LIMIT, encoding="utf-8")
    incident, text, _ = from_log(log, tmp_path / "i.yaml")
    seen = read_log(str(log))
    assert how_sure(seen.releases).startswith("certain")
    assert seen.python == "3.11"
    assert incident.environment == "torch-2.13.0-cpu"
    assert (incident.expect[0].file, incident.expect[0].line) == ("toto/model/attention.py", 105)
    assert "# unknown: the mode" in text
    assert incident.mode == "default"


@pytest.mark.parametrize(("frame", "reason"), [("31", "31/7"), ("6", "6/7"), ("6", "6/7_1")])
def test_what_a_service_compiled_before_does_not_keep_its_incident_from_coming_again(
    tmp_path: Path, frame: str, reason: str
) -> None:
    log = tmp_path / "service.log"
    log.write_text(LIMIT.replace("[6/8]", f"[{frame}/8]").replace("6/7:", f"{reason}:"), encoding="utf-8")
    incident, _, _ = from_log(log, tmp_path / "i.yaml")
    (expected,) = incident.expect
    here = LIMIT_HIT.model_copy(update={"reason": LIMIT_HIT.reason.replace("7:", f"{reason.partition('/')[2]}:")})
    assert match_event(expected, [here]).holds
    for other in ({"function": "forward"}, {"reason": "6/3: kv_cache._current_idx[7] == 0"}, {"limit": 9}):
        assert not match_event(expected, [here.model_copy(update=other)]).holds


@pytest.mark.parametrize(
    ("hit", "torch", "settings"),
    [
        ("recompile_limit (8)", "2.13.0", CompileSettings()),
        ("recompile_limit (256)", "2.13.0", CompileSettings(recompile_limit=256)),
        ("recompile_limit (64)", "2.13.0", CompileSettings(recompile_limit=64)),
        ("accumulated_recompile_limit (256)", "2.13.0", CompileSettings()),
        ("accumulated_recompile_limit (400)", "2.13.0", CompileSettings(accumulated_recompile_limit=400)),
        ("accumulated_recompile_limit (8)", "2.13.0", CompileSettings(accumulated_recompile_limit=8)),
        ("cache_size_limit (16)", "2.5.1", CompileSettings(recompile_limit=16)),
        ("accumulated_cache_size_limit (64)", "2.3.1", CompileSettings()),
        ("accumulated_cache_size_limit (64)", "2.5.1", CompileSettings(accumulated_recompile_limit=64)),
        ("accumulated_recompile_limit (256)", "2.16.0", CompileSettings()),  # younger than the table of defaults
    ],
)
def test_a_limit_that_is_not_the_releases_own_is_set_under_its_own_name(
    tmp_path: Path, hit: str, torch: str, settings: CompileSettings
) -> None:
    log = tmp_path / "service.log"
    log.write_text(LIMIT.replace("recompile_limit (8)", hit), encoding="utf-8")
    incident, _, _ = from_log(log, tmp_path / "i.yaml", "--torch", torch)
    assert incident.settings == settings
    assert f"({incident.expect[0].limit})" in hit


def test_a_log_of_several_incidents_says_so_and_expects_what_one_process_can_show(tmp_path: Path) -> None:
    _, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml")
    for told in ("events of 5 days", "positions that are tensors, which no one cache has", "cut the log"):
        assert told in text and told in printed
    log = tmp_path / "two.log"
    other = LIMIT.replace("(8)", "(256)").replace("positional_embedding", "forward")
    log.write_text(f"{LIMIT}{other}", encoding="utf-8")
    incident, text, _ = from_log(log, tmp_path / "j.yaml")
    assert (incident.settings, [one.limit for one in incident.expect]) == (CompileSettings(), [8])
    assert "recompile_limit at 8 and at 256" in text
    assert "also in the log, not expected here: recompile_limit in forward" in text
    log.write_text(LIMIT, encoding="utf-8")
    assert "several" not in from_log(log, tmp_path / "k.yaml")[1]


def test_scalar_capture_that_the_log_shows_and_the_cache_is_not_made_for_is_told(tmp_path: Path) -> None:
    incident, text, _ = from_log(PRODUCTION, tmp_path / "i.yaml")
    assert incident.cache == "list_index" and not incident.settings.capture_scalar_outputs
    assert "scalar capture is not set, since list_index was not made for it. Yet `incompatible op aten._local" in text


def test_the_log_is_named_as_the_file_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "prod.log").write_text(LIMIT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "incidents").mkdir()
    incident, _, _ = from_log(Path("logs/prod.log"), Path("incidents/i.yaml"))
    assert incident.log == "../logs/prod.log"
    secret = tmp_path / "hf_abcdefghijklmnopqrstuvwxyz0123.log"
    secret.write_text(LIMIT, encoding="utf-8")
    incident, text, printed = from_log(secret, tmp_path / "j.yaml")
    assert incident.log is None and "hf_abc" not in text + printed


def test_a_guard_that_a_wrap_cut_may_go_on_when_it_comes_again(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    cut = LIMIT.replace("kv_cache._current_idx", "kv_cache\n2025-11-04 10:14:15 INFO done\n._current_idx")
    log.write_text(cut, encoding="utf-8")
    incident, _, _ = from_log(log, tmp_path / "i.yaml")
    assert incident.expect[0].reason_like == "*/7: kv_cache*"
    assert match_event(incident.expect[0], [LIMIT_HIT]).holds


def test_of_the_services_own_code_no_place_is_expected(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    own = LIMIT.replace("/venv/lib/python3.11/site-packages/toto/model/attention.py:105", "/srv/bot/kv.py:57")
    log.write_text(
        own + own.replace("positional_embedding", "torch_dynamo_resume_in_append_at_57").replace("[7]", "[8]"),
        encoding="utf-8",
    )
    incident, text, _ = from_log(log, tmp_path / "i.yaml")
    assert [(one.function, one.file, one.line) for one in incident.expect] == [
        ("positional_embedding", None, None),
        (None, None, None),
    ]
    assert "kv.py:57 is the service's own: no place is expected" in text


@pytest.mark.parametrize("release", ["2.5.1", "2.9.0", "2.13.0", "2.15.0"])
def test_the_release_of_every_captured_log_is_the_first_candidate(release: str) -> None:
    assert read_log(str(LOGS / f"events-{release}.log")).releases[0].release == release


def test_a_release_that_the_matrix_lacks_becomes_pins(tmp_path: Path) -> None:
    incident, text, _ = from_log(PRODUCTION, tmp_path / "i.yaml", "--torch", "2.8.1")
    assert incident.environment == ""
    assert incident.pins is not None
    assert (incident.pins.torch, incident.pins.cuda) == ("2.8.1", "cu128")
    assert "torch 2.8.1: you said so" in text
    assert "the log itself speaks of 2.9.0" in text


def test_a_freeze_becomes_pins_and_what_names_no_release_is_left_out(tmp_path: Path) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text(
        "torch==2.9.0+cu128\ntoto-ts==0.2.0\nnumpy==2.1.3\n"
        "bot @ git+https://deploy:hunter2hunter2@git.example/bot.git@abc\n-e /srv/bot\n",
        encoding="utf-8",
    )
    incident, text, _ = from_log(PRODUCTION, tmp_path / "i.yaml", "--freeze", str(freeze))
    assert incident.pins is not None
    assert "numpy==2.1.3" in incident.pins.frozen
    assert "left out, since their lines name no release: bot" in text
    assert "hunter2" not in text
    assert "by the freeze" in text


def test_a_secret_in_the_log_does_not_reach_the_incident(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(
        LIMIT.replace("kv_cache._current_idx[7] == 0", "L['self'].url == 'https://u:hunter2hunter2@h/'"),
        encoding="utf-8",
    )
    _, text, printed = from_log(log, tmp_path / "i.yaml", "--torch", "2.13.0")
    assert "hunter2" not in text
    assert "hunter2" not in printed


def test_the_log_of_a_captured_cache_names_it() -> None:
    assert guess_cache(read_log(str(PRODUCTION))).value == "list_index"
    assert guess_cache(read_log(str(PRODUCTION))).sure


def test_a_log_without_compiler_events_is_a_clear_error(tmp_path: Path) -> None:
    log = tmp_path / "quiet.log"
    log.write_text("2025-11-04 10:14:14 | INFO | all is well\n", encoding="utf-8")
    error = error_of(log)
    assert isinstance(error, InputError)
    assert error.code is ExitCode.INPUT
    assert "nothing to reproduce" in error.message
    assert "TORCH_LOGS" in error.hint
    log.write_text("Using torch.compile for Toto (mode=default, backend=inductor)\n", encoding="utf-8")
    assert "nothing that the compiler did" in error_of(log).message


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 100, b"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x01\x02"]
)
def test_what_is_no_log_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(content)
    assert error_of(log).code is ExitCode.INPUT
    assert error_of(tmp_path / "missing.log").code is ExitCode.INPUT


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "i.yaml"
    target.write_text("mine\n", encoding="utf-8")
    assert isinstance(error_of(PRODUCTION, "-o", str(target)), StorageError)
    assert target.read_text(encoding="utf-8") == "mine\n"
    assert error_of(PRODUCTION, "-o", str(tmp_path / "no" / "folder.yaml")).code is ExitCode.STORAGE


def test_a_log_that_does_not_tell_its_release_asks_for_it(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("skipping cudagraphs due to mutated inputs (2 instances)\n", encoding="utf-8")
    assert "--torch" in error_of(log).hint
    incident, _, _ = from_log(log, tmp_path / "i.yaml", "--torch", "2.13.0")
    assert incident.environment == "torch-2.13.0-cu130"  # CUDA graphs were skipped on a GPU


@pytest.mark.parametrize("torch", ["2.9", "latest", "2.9.0; rm"])
def test_a_release_that_is_none_is_told(torch: str, tmp_path: Path) -> None:
    assert error_of(PRODUCTION, "--torch", torch, "-o", str(tmp_path / "i.yaml")).code is ExitCode.INPUT


def test_a_file_that_is_no_freeze_is_told_with_its_line(tmp_path: Path) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("torch==2.9.0\nthis is a letter\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"freeze.txt:2: .* no line of pip freeze"):
        read_freeze(freeze)
    freeze.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="pins nothing"):
        read_freeze(freeze)


def test_what_the_log_says_cannot_become_yaml_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    evil = "x == 1'\\n- kind: graph_break # }{]: &a *b !!python/object"
    log.write_text(LIMIT.replace("kv_cache._current_idx[7] == 0", evil), encoding="utf-8")
    incident, text, _ = from_log(log, tmp_path / "i.yaml")
    assert len(incident.expect) == 1
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("guard", ["api_key='abc123'", "L['cfg'] == Config(token='abc123')", "password: abc123 def"])
def test_a_quoted_secret_in_a_guard_leaves_yaml_and_anything_in_its_place(tmp_path: Path, guard: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(LIMIT.replace("kv_cache._current_idx[7] == 0", guard), encoding="utf-8")
    incident, text, printed = from_log(log, tmp_path / "i.yaml")
    assert "abc123" not in text + printed
    assert incident.expect[0].reason is None
    assert is_like(incident.expect[0].reason_like or "", f"6/7: {guard}")


def test_a_skip_with_a_star_or_a_secret_in_its_reason_is_expected_so_that_it_can_come_again(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    reason = "non-cuda device (x * y) in api_key='abc123'"
    log.write_text(f"W1030 12:00:00.000000 7 skipping cudagraphs due to {reason}\n", encoding="utf-8")
    incident, text, printed = from_log(log, tmp_path / "i.yaml", "--torch", "2.9.0")
    assert "abc123" not in text + printed
    assert is_like(incident.expect[0].reason_like or "", reason)


def test_a_guard_on_a_number_is_expected_word_for_word_whatever_its_name(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(LIMIT.replace("kv_cache._current_idx[7]", "L['self'].access_token"), encoding="utf-8")
    incident, _, _ = from_log(log, tmp_path / "i.yaml")
    assert incident.expect[0].reason_like == "*/7: L['self'].access_token == 0"


def test_a_place_that_no_release_logs_from_is_told_and_two_releases_may_be_two_incidents(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text(LIMIT.replace(":1994]", ":99994]"), encoding="utf-8")
    _, _, printed = from_log(log, tmp_path / "i.yaml")
    assert (
        "no known release logs from torch/_dynamo/convert_frame.py:99994: it is newer, a nightly or patched" in printed
    )
    log.write_text(f"{LIMIT}{LIMIT.replace(':1994]', ':1358]')}", encoding="utf-8")
    _, _, printed = from_log(log, tmp_path / "j.yaml")
    assert "if these are several: lines of another release than" in printed
    log.write_text(LIMIT, encoding="utf-8")
    _, text, _ = from_log(log, tmp_path / "k.yaml")
    assert "no known release" not in text and "if these are several" not in text


@pytest.mark.parametrize("option", ["--from-log", "--freeze", "--env"])
def test_a_pipe_and_a_folder_are_refused_and_not_waited_for(tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        words = [option, str(path), *(["--from-log", str(PRODUCTION)] if option != "--from-log" else [])]
        run = CliRunner().invoke(repro_command, [*words, "--matrix", str(ROOT / "matrix.yaml")])
        assert isinstance(run.exception, InputError), run.output
        assert run.exception.hint


def test_an_env_file_that_is_no_text_and_a_log_without_a_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.env").write_bytes(bytes(range(128, 256)) * 4)
    assert "no env file" in error_of(PRODUCTION, "--env", str(tmp_path / "x.env")).message
    assert "no log is named" in error_of(PRODUCTION, "--from-log", "").message


def test_no_name_of_a_file_and_no_variable_ends_a_comment(tmp_path: Path) -> None:
    log = tmp_path / "x\nschema: 2\x07.log"
    log.write_text(LIMIT, encoding="utf-8")
    (tmp_path / "x.env").write_text("export TOTO_COMPILE_MODE='a\nschema: 3'\n", encoding="utf-8")
    _, text, _ = from_log(log, tmp_path / "i.yaml", "--env", str(tmp_path / "x.env"))
    assert yaml.safe_load(text)["schema"] == 1
    assert not [line for line in text.splitlines() if line.startswith(("schema: 2", "schema: 3"))]


def test_a_full_disk_and_an_interrupt_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for write, raised in ((full, StorageError), (stopped, KeyboardInterrupt)):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", write)
            with pytest.raises(raised):
                write_incident("schema: 1\n", tmp_path / "i.yaml")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "date"), [("2026-03-01", "2024-02-29"), ("2024-03-01", "2024-02-29"), ("2024-02-01", "2020-02-29")]
)
def test_the_day_that_not_every_year_has_is_of_one_that_has_it(tmp_path: Path, changed: str, date: str) -> None:
    log = tmp_path / "service.log"
    log.write_text(LIMIT.replace("W1117", "W0229"), encoding="utf-8")
    moment = datetime.fromisoformat(f"{changed}T10:00Z").timestamp()
    os.utime(log, (moment, moment))
    assert from_log(log, tmp_path / "i.yaml")[0].date == date


CUDA_GRAPHS = "W1101 12:00:00.000000 7 skipping cudagraphs due to mutated inputs (2 instances)\n"


def test_a_log_that_tells_of_cuda_graphs_and_of_no_mode_is_not_of_torchs_own(tmp_path: Path) -> None:
    log, given = tmp_path / "service.log", ("--torch", "2.9.0")
    log.write_text(CUDA_GRAPHS, encoding="utf-8")
    incident, text, printed = from_log(log, tmp_path / "i.yaml", *given)
    assert incident.mode == "reduce-overhead"
    above = "# unknown: no line names it; reduce-overhead is a guess: torch's own mode has no CUDA graphs"
    assert above in text[: text.index("\nmode: ")].splitlines()[-1]
    assert "unknown: the mode: no line names it; reduce-overhead is a guess" in printed
    log.write_text(LIMIT, encoding="utf-8")
    assert from_log(log, tmp_path / "j.yaml", *given)[0].mode == "default"
    log.write_text(f"Using torch.compile for Toto (mode=default, backend=inductor)\n{CUDA_GRAPHS}", encoding="utf-8")
    assert from_log(log, tmp_path / "k.yaml", *given)[0].mode == "default"


def test_a_variable_that_brings_cuda_graphs_into_every_mode_leaves_the_mode_open(tmp_path: Path) -> None:
    (tmp_path / "service.log").write_text(CUDA_GRAPHS, encoding="utf-8")
    (tmp_path / "x.env").write_text("TORCHINDUCTOR_CUDAGRAPHS=1\n", encoding="utf-8")
    given = ("--torch", "2.9.0", "--env", str(tmp_path / "x.env"))
    assert from_log(tmp_path / "service.log", tmp_path / "i.yaml", *given)[0].mode == "default"


TOO_LONG = "n" * 300


@pytest.mark.parametrize("option", ["--from-log", "--freeze", "--env", "-o"])
def test_a_name_that_is_too_long_for_a_file_is_told(option: str) -> None:
    error = error_of(PRODUCTION, option, TOO_LONG)
    assert TOO_LONG in error.message and "File name too long" in error.message


def test_a_version_with_more_digits_than_python_reads_is_none(tmp_path: Path) -> None:
    digits, target = "9" * 5000, ("-o", str(tmp_path / "i.yaml"))
    assert "no exact release" in error_of(PRODUCTION, "--torch", f"2.9.{digits}", *target).message
    (tmp_path / "freeze.txt").write_text(f"torch==2.9.0\nnumpy=={digits}\n", encoding="utf-8")
    error = error_of(PRODUCTION, "--freeze", str(tmp_path / "freeze.txt"), *target)
    assert "freeze.txt:2: 'numpy==999" in error.message
