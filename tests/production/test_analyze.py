"""`toto-compat analyze` on production's lines and on everything a file can be instead of a log."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from toto_compat.contract.log_line import printable
from toto_compat.errors import ExitCode, InputError
from toto_compat.logs.source import explained
from toto_compat.production.analysis_output import as_text
from toto_compat.production.analyze import analyze_command, analyze_logs

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"
PRODUCTION = LOGS / "production.log"
QUIET = "2025-11-04 10:14:14 | INFO | forecast done\n"


def analyze(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(analyze_command, [str(argument) for argument in arguments], input=stdin)


def analyze_json(*arguments: str | Path) -> dict[str, Any]:
    result = analyze("--json", *arguments)
    assert result.exit_code == ExitCode.OK
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def refused(path: Path | str) -> InputError:
    with pytest.raises(InputError) as caught:
        analyze_logs([str(path)])
    return caught.value


def test_production_groups_by_function_and_reason() -> None:
    groups = {
        (group["kind"], group["function"], group["reason"]): (group["events"], group["instances"])
        for group in analyze_json(PRODUCTION)["groups"]
    }
    assert groups == {
        ("recompile_limit", "", ""): (3, 3),
        ("recompile_limit", "positional_embedding", "kv_cache._current_idx[N] == N"): (2, 2),
        ("cudagraph_skip", "", "mutated inputs (N instances)"): (3, 18),
        ("cudagraph_skip", "", "incompatible op aten._local_scalar_dense.default"): (1, 1),
        ("dynamic_shape", "", "Eq(sN, N) | Eq(sN*sN, sN)"): (1, 1),
        ("cudagraph_partition", "", "non gpu ops"): (1, 1),
        ("compile_setting", "Toto", "mode=reduce-overhead, backend=inductor"): (1, 1),
    }


def test_a_group_says_where_it_was_seen_and_what_its_limit_was() -> None:
    group = analyze_json(PRODUCTION)["groups"][1]
    assert (group["file"], group["line"], group["limits"]) == ("toto/model/attention.py", 105, [8])
    assert (group["first"], group["last"]) == (f"{PRODUCTION}:1", f"{PRODUCTION}:5")
    assert group["compile_ids"] == ["6/8"]
    assert group["example"] == "6/7: kv_cache._current_idx[7] == 0"


def test_worst_comes_first() -> None:
    severities = [group["severity"] for group in analyze_json(PRODUCTION)["groups"]]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_the_prefix_names_the_release() -> None:
    releases = [hint["release"] for hint in analyze_json(PRODUCTION)["torch_releases"]]
    assert releases == ["2.9.0"]
    both = [hint["release"] for hint in analyze_json(LOGS / "releases.log")["torch_releases"]]
    assert sorted(both) == ["2.5.1", "2.7.0"]


def test_several_logs_are_counted_together_with_positions_in_each(tmp_path: Path) -> None:
    second = tmp_path / "second.log"
    second.write_text(QUIET + "skipping cudagraphs due to mutated inputs (1 instances)\n", encoding="utf-8")
    found = analyze_json(PRODUCTION, second)
    skip = next(group for group in found["groups"] if group["reason"] == "mutated inputs (N instances)")
    assert (skip["events"], skip["last"]) == (4, f"{second}:2")


@pytest.mark.parametrize(
    ("threshold", "code"), [("error", ExitCode.OK), ("warning", ExitCode.FINDINGS), ("info", ExitCode.FINDINGS)]
)
def test_fail_on_asks_for_this_severity_or_worse(tmp_path: Path, threshold: str, code: ExitCode) -> None:
    log = tmp_path / "a.log"
    log.write_text("skipping cudagraphs due to mutated inputs (1 instances)\n", encoding="utf-8")
    assert analyze("--fail-on", threshold, log).exit_code == code


def test_findings_without_fail_on_are_no_failure() -> None:
    assert analyze(PRODUCTION).exit_code == ExitCode.OK


def test_a_quiet_log_says_what_it_could_not_have_shown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(QUIET * 3, encoding="utf-8")
    result = analyze("--fail-on", "info", log)
    assert result.exit_code == ExitCode.OK
    assert "no compiler events" in result.stdout
    assert "TORCH_LOGS=recompiles,graph_breaks" in result.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("*.log")))
def test_text_fits_100_columns(name: str) -> None:
    lines = as_text(analyze_logs([str(LOGS / name)])).splitlines()
    assert max(len(line) for line in lines) <= 100


def test_every_group_carries_cause_and_fix() -> None:
    text, groups = analyze(PRODUCTION).stdout, analyze_json(PRODUCTION)["groups"]
    assert text.count("  cause: ") == text.count("  fix (") == len(groups)
    assert all(group["cause"] and group["fix"] and group["holds_for"] for group in groups)


def test_a_bucket_that_was_not_announced_is_a_finding_and_an_announced_one_is_not(tmp_path: Path) -> None:
    line = (
        "WARNING:toto_compat.buckets:compiling decode step for batch 3, variates 1, capacity 80 (bucket 4 of at most 16"
    )
    announced, unannounced = tmp_path / "announced.log", tmp_path / "unannounced.log"
    announced.write_text(f"{line})\n")
    unannounced.write_text(f"{line}, not announced)\n")
    assert analyze("--fail-on", "warning", announced).exit_code == ExitCode.OK
    found = analyze("--fail-on", "warning", unannounced)
    assert found.exit_code == ExitCode.FINDINGS
    assert "batch_sizes" in found.stdout


def test_a_gzipped_log_reads_the_same_whatever_its_name(tmp_path: Path) -> None:
    packed = tmp_path / "production.log.1"
    packed.write_bytes(gzip.compress(PRODUCTION.read_bytes()))
    assert analyze_json(packed)["events"] == analyze_json(PRODUCTION)["events"]


def test_standard_input_reads_the_same() -> None:
    result = analyze("--json", "-", stdin=PRODUCTION.read_bytes())
    found = json.loads(result.stdout)
    assert (found["events"], found["files"]) == (12, ["standard input"])


def test_a_utf_16_log_reads_the_same(tmp_path: Path) -> None:
    log = tmp_path / "windows.log"
    log.write_text(PRODUCTION.read_text(encoding="utf-8"), encoding="utf-16")
    assert analyze_json(log)["events"] == 12


def test_bytes_that_are_not_utf_8_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "latin.log"
    log.write_bytes("Größe\n".encode("latin-1") + PRODUCTION.read_bytes())
    assert analyze_json(log)["events"] == 12


def test_a_log_that_begins_with_the_hole_of_a_truncation_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rotated.log"
    log.write_bytes(b"\x00" * 3000 + b"\n" + PRODUCTION.read_bytes())
    assert analyze_json(log)["events"] == 12


def test_a_missing_file_is_named() -> None:
    error = refused("no/such.log")
    assert error.code is ExitCode.INPUT
    assert "no/such.log: there is no such file" in str(error)


def test_a_folder_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    assert f"{tmp_path}/*.log" in str(refused(tmp_path))


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (PermissionError(13, "Permission denied"), "no permission to read it"),
        (OSError(5, "Input/output error"), "cannot be read: Input/output error"),
    ],
)
def test_an_unreadable_file_is_refused(cause: OSError, message: str) -> None:
    # raised by hand: root, who often runs tests in containers, may read every file
    with pytest.raises(InputError, match=message), explained("secret.log"):
        raise cause


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    dump = tmp_path / "core"
    dump.write_bytes(bytes(range(256)) * 100)
    assert "binary" in str(refused(dump))


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "cut.log.gz"
    packed.write_bytes(gzip.compress(os.urandom(200_000).hex().encode())[:50_000])
    assert "damaged or cut off" in str(refused(packed))


def test_an_empty_log_is_a_log(tmp_path: Path) -> None:
    log = tmp_path / "empty.log"
    log.touch()
    assert analyze_json(log)["events"] == 0


def test_a_hostile_log_cannot_steer_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "evil\x1b[2J.log"
    log.write_bytes(
        b"torch._dynamo hit config.recompile_limit (8)\n"
        b"function: '\x1b]0;title\x07forward\xe2\x80\xae' (/x/\x9b31m.py:1)\n"
        b"last reason: 1/2: \x1b[31mred\x1b[0m\x08\x08 == 0\n"
    )
    text = as_text(analyze_logs([str(log)]))
    assert all(printable(line) == line for line in text.splitlines())
    assert "red == N" in text
    assert analyze(log).exit_code == ExitCode.OK


def test_a_flood_of_different_reasons_keeps_few_groups_and_every_event(tmp_path: Path) -> None:
    log = tmp_path / "flood.log"
    names = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(5000))
    log.write_text("".join(f"skipping cudagraphs due to op {name}\n" for name in names), encoding="utf-8")
    found = analyze_json(log)
    assert found["events"] == 5000
    assert len(found["groups"]) <= 2001


def test_reading_a_log_imports_no_torch() -> None:
    code = (
        "import sys; from toto_compat.production.analyze import analyze_logs; "
        f"analyze_logs([{str(PRODUCTION)!r}]); "
        "sys.exit(any(name.split('.')[0] in ('torch', 'toto') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("release", ["2.5.1", "2.9.0", "2.13.0", "2.15.0"])
def test_a_log_counts_what_the_live_observer_counted_in_the_same_run(release: str) -> None:
    observed = json.loads((LOGS / f"events-{release}.json").read_text(encoding="utf-8"))
    assert observed["torch"].startswith(release)
    counted: Counter[str] = Counter()
    for group in analyze_json(LOGS / f"events-{release}.log")["groups"]:
        counted[group["kind"]] += group["events"]
    assert counted == observed["events"]


@pytest.mark.parametrize("release", ["2.5.1", "2.9.0", "2.13.0", "2.15.0"])
def test_the_incident_is_named_in_the_log_of_every_release(release: str) -> None:
    found = analyze_json(LOGS / f"events-{release}.log")
    limit = next(group for group in found["groups"] if group["kind"] == "recompile_limit")
    assert (limit["function"], limit["limits"]) == ("positional_embedding", [8])
    assert limit["reason"].endswith("._current_idx[N] == N")
    assert [hint["release"] for hint in found["torch_releases"]] == [release]


def test_times_and_a_timeline_over_all_events() -> None:
    found = analyze_json(PRODUCTION)
    assert found["span"] == ["2025-10-30T09:08:09", "2025-11-07T09:47:09"]
    named = next(group for group in found["groups"] if group["function"] == "positional_embedding")
    assert (named["first_time"], named["last_time"]) == ("--10-30T09:08:09.060000", "--11-01T01:56:35.074000")
    assert sum(named["timeline"]) == 2
    assert named["timeline"][0] == 1


def test_the_cells_that_show_the_same_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    named = next(group for group in analyze_json(PRODUCTION)["groups"] if group["function"] == "positional_embedding")
    assert any(cell.startswith("torch-2.13.0-cpu/list_index/") for cell in named["cells"])
    monkeypatch.chdir(tmp_path)
    assert not any(group["cells"] for group in analyze_json(PRODUCTION)["groups"])


def test_a_run_that_does_not_exist_is_refused() -> None:
    result = analyze("--run", "no-such-run", PRODUCTION)
    assert isinstance(result.exception, InputError)
    assert "no-such-run" in str(result.exception)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    log = tmp_path / "big.log"
    block = (QUIET * 1000).encode() + PRODUCTION.read_bytes()
    peaks = []
    for blocks in (20, 400):
        with log.open("wb") as stream:
            for _ in range(blocks):
                stream.write(block)
        code = (
            "import sys; from toto_compat.production.analyze import analyze_logs; "
            "print(analyze_logs([sys.argv[1]]).events); "
            # not ru_maxrss: that one counts the process which this one is a fork of
            "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        )
        command = [sys.executable, "-c", code, str(log)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(shown[0]) == 12 * blocks
        peaks.append(int(shown[1]) / 1024)
    assert peaks[1] < peaks[0] + 8  # MB, for a log that is 17 MB longer
    assert peaks[1] < 150


def test_following_a_pipe_tells_each_event_and_the_groups_at_its_end() -> None:
    command = [sys.executable, "-m", "toto_compat.cli", "analyze", "--follow", "-"]
    with PRODUCTION.open("rb") as log:
        shown = subprocess.run(command, stdin=log, capture_output=True, text=True, check=True).stdout
    assert shown.count(" [standard input:") == 12
    assert "standard input: 12 events in 7 groups" in shown


def test_following_ends_at_the_severity_that_was_asked_for_and_on_a_signal(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("skipping cudagraphs due to mutated inputs (1 instances)\n", encoding="utf-8")
    command = [sys.executable, "-m", "toto_compat.cli", "analyze", "--follow", "--json", str(log)]
    ended = subprocess.run([*command, "--fail-on", "warning"], capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.FINDINGS
    assert json.loads(ended.stdout)["kind"] == "cudagraph_skip"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["kind"] == "cudagraph_skip"  # it is past the start
        running.terminate()
        assert running.wait(60) == ExitCode.OK


@pytest.mark.parametrize("path", [".", "a.log.gz"])
def test_what_cannot_be_followed_is_refused(path: str) -> None:
    result = analyze("--follow", path)
    assert isinstance(result.exception, InputError)
    assert "cannot be followed" in str(result.exception)
