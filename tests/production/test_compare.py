"""`compare`: held-out windows, paired intervals, and a comparison of eager with eager that says so."""

import random
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from toto_compat.contract.csv_file import CsvColumns
from toto_compat.errors import EnvironmentBuildError, ExitCode, InputError
from toto_compat.production.backtest import BacktestResult, Forecasts, Window, scored
from toto_compat.production.compare import compare_command, interval_of_difference, metrics_of, not_active, windows_of


def columns(count: int) -> CsvColumns:
    return CsvColumns(tuple(range(0, 60 * count, 60)), 60, (tuple(float(number) for number in range(count)),))


def test_windows_are_the_newest_and_no_held_out_point_is_in_two() -> None:
    cut = windows_of("AAPL", columns(100), context=20, horizon=10, count=3)
    assert [window.truth for window in cut] == [tuple(map(float, range(start, start + 10))) for start in (70, 80, 90)]
    assert cut[0].context == tuple(map(float, range(50, 70)))
    assert cut[0].first_timestamp == 50 * 60
    assert len(windows_of("AAPL", columns(45), context=20, horizon=10, count=9)) == 2
    with pytest.raises(InputError, match="29 points; context 20 and horizon 10 need 30"):
        windows_of("AAPL", columns(29), context=20, horizon=10, count=1)


def test_errors_are_of_the_points_that_were_measured() -> None:
    window = Window(symbol="A", context=(1.0,), truth=(2.0, None, 4.0), first_timestamp=0, interval_seconds=1)
    found = scored([([1.0, 50.0, 6.0], 3.0)], (window,), lambda ours, _truth, context: ours[0] + (context[0] or 0.0))
    assert (found.absolute, found.squared, found.percentage, found.score) == ((1.5,), (2.5,), (50.0,), (2.0,))
    zero = window.model_copy(update={"truth": (0.0, 1.0, 1.0)})
    assert scored([([1.0, 1.0, 1.0], 3.0)], (zero,), None).percentage == (None,)


def test_the_interval_covers_no_difference_and_leaves_out_a_real_one() -> None:
    generator = random.Random(4)  # noqa: S311 - noise, no secret
    eager = [generator.uniform(1, 5) for _ in range(40)]
    same = [one + generator.gauss(0, 0.01) for one in eager]
    _, low, high = interval_of_difference(same, eager)
    assert low < 0 < high
    worse = [one + 0.05 for one in same]
    mean, low, high = interval_of_difference(worse, eager)
    assert 0 < low <= mean <= high


def result(*, calls: int = 3, because: str = "") -> BacktestResult:
    one = Forecasts(absolute=(1.0, 2.0), squared=(1.0, 4.0), percentage=(None, 5.0), score=(), milliseconds=(3.0, 4.0))
    return BacktestResult(
        eager=one,
        compiled=one,
        largest_difference=0.0,
        cache_class="x:Y",
        graph_calls=calls,
        compilations=1,
        eager_because=because,
        torch="2.13.0",
        lock="here:0",
    )


def test_eager_against_eager_is_told() -> None:
    assert not_active(result()) == ""
    assert "eager was compared with eager" in not_active(result(calls=0))
    assert "both forecasts are eager" in not_active(result(because="dtype bfloat16"))


def test_a_window_without_a_percentage_is_left_out_of_it_on_both_sides() -> None:
    compared = metrics_of(result())
    assert list(compared) == ["MAE", "RMSE", "MAPE %"]
    assert compared["MAPE %"] == ([5.0], [5.0])


def written(folder: Path, name: str, count: int = 60) -> Path:
    rows = "".join(f"2026-01-01T{hour // 60:02}:{hour % 60:02}:00Z,{100 + hour}\n" for hour in range(count))
    path = folder / name
    path.write_text("timestamp,close\n" + rows, encoding="utf-8")
    return path


def test_an_interpreter_without_torch_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="the forecasts failed") as raised:
        CliRunner().invoke(
            compare_command,
            [str(written(tmp_path, "A.csv")), "--context", "32", "--horizon", "8"],
            catch_exceptions=False,
        )
    assert "--python" in str(raised.value)


def test_a_score_that_is_not_there_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        CliRunner().invoke(
            compare_command,
            [str(written(tmp_path, "A.csv")), "--context", "8", "--horizon", "8", "--score", "gone.py:f"],
            catch_exceptions=False,
        )


SHORT = ("--context", "8", "--horizon", "8")


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        (("--score", "mine"), "--score 'mine': no name of code", "path/to/file.py:function"),
        (("--score", "gone.py"), "--score 'gone.py': no name of code", "path/to/file.py:function"),
        (("--score", ":f"), "--score ':f': no name of code", "path/to/file.py:function"),
        (("--cache", "fixed-size"), "--cache 'fixed-size'", "did you mean fixed_size?"),
        (("--cache", "gone.py:Mine"), "--cache gone.py:Mine: no file", "path/to/file.py:Class"),
        (("--samples", "10"), "--samples 10 is no multiple of --samples-per-batch 16", "whole batches"),
        (("--checkpoint", ""), "no checkpoint is named", "accepted"),
    ],
)
def test_what_the_other_process_would_stumble_over_is_told_before_it_is_started(
    tmp_path: Path, words: tuple[str, ...], told: str, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(compare_command, [str(written(tmp_path, "A.csv")), *SHORT, *words], catch_exceptions=False)
    assert told in caught.value.message
    assert hint in caught.value.hint


def test_a_device_that_torch_does_not_know_is_a_usage_error(tmp_path: Path) -> None:
    refused = CliRunner().invoke(compare_command, [str(written(tmp_path, "A.csv")), "--device", "gpu"])
    assert refused.exit_code == ExitCode.USAGE
    assert "'gpu' is none of cpu, cuda and cuda:N" in refused.output


def test_a_series_that_is_given_twice_is_not_counted_twice(tmp_path: Path) -> None:
    path = str(written(tmp_path, "A.csv"))
    with pytest.raises(InputError, match="A is given twice"):
        CliRunner().invoke(compare_command, [path, str(tmp_path), *SHORT], catch_exceptions=False)


def test_a_window_with_nothing_to_forecast_from_is_told() -> None:
    empty = CsvColumns(tuple(range(30)), 1, ((None,) * 20 + (1.0,) * 10,))
    with pytest.raises(InputError, match="nothing was measured in the 20 points before point 21"):
        windows_of("AAPL", empty, context=20, horizon=10, count=1)


def test_an_interpreter_is_found_from_where_the_command_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has a working directory of its own, in which a relative path leads elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("mine").symlink_to(sys.executable)
    said = "ModuleNotFoundError: No module named 'torch'"
    with pytest.raises(EnvironmentBuildError, match=said):
        CliRunner().invoke(
            compare_command, [str(written(tmp_path, "A.csv")), *SHORT, "--python", "./mine"], catch_exceptions=False
        )
    for nothing in ("", "./gone"):
        with pytest.raises(EnvironmentBuildError, match="no program that can be run"):
            CliRunner().invoke(compare_command, ["A.csv", *SHORT, "--python", nothing], catch_exceptions=False)


def test_what_the_other_process_says_need_not_be_utf_8(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nprintf 'g++: \\377 is no file' >&2\nexit 1\n", encoding="ascii")
    broken.chmod(0o755)
    asked = [str(written(tmp_path, "A.csv")), *SHORT, "--python", str(broken)]
    with pytest.raises(EnvironmentBuildError, match="is no file"):
        CliRunner().invoke(compare_command, asked, catch_exceptions=False)
