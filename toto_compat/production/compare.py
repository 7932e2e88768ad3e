"""`toto-compat compare`: eager against compiled on the user's own series, on held-out data."""

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from toto_compat.contract.caches import CACHES
from toto_compat.contract.csv_file import CsvColumns
from toto_compat.contract.source_hash import PACKAGE
from toto_compat.errors import EnvironmentBuildError, ExitCode, InputError
from toto_compat.matrix.checkpoint import resolve_checkpoint
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.given_path import GivenPath
from toto_compat.matrix.symbols import ReadSymbol, read_symbols
from toto_compat.production.backtest import BacktestRequest, BacktestResult, Forecasts, Window
from toto_compat.production.switch import MODES
from toto_compat.production.torch_device import checked_device

_RESAMPLES = 2000
_SEED = 20251030


def windows_of(symbol: str, columns: CsvColumns, *, context: int, horizon: int, count: int) -> list[Window]:
    """Cut the newest windows of a series, none of whose held-out points is in another's; the newest one last."""
    values = columns.values[0]
    most = (len(values) - context) // horizon
    if most < 1:
        raise InputError(
            f"{symbol}: {len(values)} points; context {context} and horizon {horizon} need {context + horizon}",
            hint="give a longer file, or smaller --context and --horizon",
        )
    cut = []
    for number in range(min(count, most), 0, -1):
        split = len(values) - number * horizon
        truth = values[split : split + horizon]
        if all(one is None for one in truth):
            raise InputError(
                f"{symbol}: nothing was measured in the {horizon} points after point {split}",
                hint="fill in the missing values, or leave that file out",
            )
        if all(one is None for one in values[split - context : split]):
            raise InputError(
                f"{symbol}: nothing was measured in the {context} points before point {split + 1}",
                hint="there is nothing to forecast from: fill in the missing values, or leave that file out",
            )
        cut.append(
            Window(
                symbol=symbol,
                context=values[split - context : split],
                truth=truth,
                first_timestamp=columns.timestamps[split - context],
                interval_seconds=columns.interval_seconds,
            )
        )
    return cut


def interval_of_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean difference and its 95 % interval, by resampling windows: each is its own control."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    generator = random.Random(_SEED)  # noqa: S311 - resampling, no secret
    means = sorted(statistics.fmean(generator.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    return statistics.fmean(differences), means[int(0.025 * _RESAMPLES)], means[int(0.975 * _RESAMPLES)]


def metrics_of(result: BacktestResult) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Return every metric per window, of compiled and of eager; one without values is left out."""

    def both(name: str) -> tuple[list[float], list[float]]:
        pairs = zip(getattr(result.compiled, name), getattr(result.eager, name), strict=True)
        kept = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        return [ours for ours, _ in kept], [theirs for _, theirs in kept]

    compared: dict[str, tuple[Sequence[float], Sequence[float]]] = {"MAE": both("absolute")}
    ours, theirs = both("squared")
    compared["RMSE"] = ([math.sqrt(one) for one in ours], [math.sqrt(one) for one in theirs])
    compared["MAPE %"] = both("percentage")
    compared["score"] = both("score")
    return {name: values for name, values in compared.items() if values[0]}


def not_active(result: BacktestResult) -> str:
    """Say why compiled was not compiled; '' where compiled graphs ran in the forecasts that were scored."""
    if result.eager_because:
        return f"the cache does not cover {result.eager_because}: both forecasts are eager"
    if result.graph_calls == 0:
        return "no compiled graph ran in any forecast: eager was compared with eager"
    return ""


def as_document(request: BacktestRequest, result: BacktestResult) -> dict[str, object]:
    rows = {}
    for name, (ours, theirs) in metrics_of(result).items():
        mean, low, high = interval_of_difference(ours, theirs)
        rows[name] = {
            "eager": statistics.fmean(theirs),
            "compiled": statistics.fmean(ours),
            "difference": mean,
            "low": low,
            "high": high,
            "windows": len(ours),
        }
    return {
        "torch": result.torch,
        "lock": result.lock,
        "cache": request.cache,
        "cache_class": result.cache_class,
        "mode": request.mode,
        "compile_active": not not_active(result),
        "graph_calls": result.graph_calls,
        "compilations": result.compilations,
        "symbols": len({window.symbol for window in request.windows}),
        "windows": len(request.windows),
        "largest_difference": result.largest_difference,
        "median_ms": {"eager": _median_ms(result.eager), "compiled": _median_ms(result.compiled)},
        "metrics": rows,
    }


def _median_ms(forecasts: Forecasts) -> float:
    return statistics.median(forecasts.milliseconds)


def run_backtest(request: BacktestRequest, python: str) -> BacktestResult:
    """Run it in an interpreter that has torch and toto-ts; the package is copied, so that nothing else comes along."""
    with tempfile.TemporaryDirectory(prefix="toto-compare-") as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "source" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
        command = [python, "-P", "-m", "toto_compat.production.backtest", "request.json", "output.json"]
        variables = {**os.environ, "PYTHONPATH": str(folder / "source")}
        try:
            # what a compiler or a score prints need not be UTF-8
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, errors="replace", check=False
            )
        except OSError as error:
            raise EnvironmentBuildError(
                f"{python}: cannot be started: {error.strerror}", hint="name an interpreter: --python PYTHON"
            ) from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
            hint = (
                "install torch and toto-ts beside this command, or name an interpreter that has them: --python PYTHON"
            )
            raise EnvironmentBuildError(f"the forecasts failed: {last}", hint=hint)
        return BacktestResult.model_validate_json((folder / "output.json").read_text(encoding="utf-8"))


@click.command("compare")
@click.argument("data", nargs=-1, required=True, type=GivenPath())
@click.option("--column", help="The column to forecast.  [default: close, or the only one]")
@click.option("--context", type=click.IntRange(min=1), default=512, show_default=True, help="Points the model sees.")
@click.option("--horizon", type=click.IntRange(min=1), default=128, show_default=True, help="Held-out points.")
@click.option("--windows", type=click.IntRange(min=1), default=8, show_default=True, help="At most, per series.")
@click.option(
    "--checkpoint", help="Folder, or hub id with revision.  [default: seeded weights, which forecast nothing]"
)
@click.option(
    "--model",
    type=click.Choice(["tiny", "base"]),
    default="base",
    show_default=True,
    help="Shape of the seeded weights.",
)
@click.option("--cache", default="fixed_size", show_default=True, help="A built-in KV cache, or path/to/file.py:Class.")
@click.option("--mode", type=click.Choice(MODES), default="default", show_default=True, help="The compile mode.")
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Samples to take the median of; 0: the mean.",
)
@click.option(
    "--samples-per-batch",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="How many of them at a time.",
)
@click.option("--score", default="", metavar="FILE.py:FUNCTION", help="Your own score of (forecast, truth, context).")
@click.option("--device", callback=checked_device, default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--python", default=sys.executable, help="Interpreter with torch and toto-ts.  [default: this one]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def compare_command(
    *,
    data: tuple[Path, ...],
    column: str | None,
    context: int,
    horizon: int,
    windows: int,
    checkpoint: str | None,
    score: str,
    python: str,
    as_json: bool,
    **asked: Any,
) -> None:
    """Forecast held-out points of your own series eager and compiled: DATA is CSV files, or folders of them.

    Exits with 10 where nothing was compiled, since eager was then compared with eager."""
    cache, score = _checked(asked["cache"], score, samples=asked["samples"], batch=asked["samples_per_batch"])
    interpreter = _interpreter(python)
    read = _read(data, column)
    cut = [
        window
        for one in read
        for window in windows_of(one.series.name, one.columns, context=context, horizon=horizon, count=windows)
    ]
    folder = str(resolve_checkpoint(checkpoint, relative_to=Path.cwd())) if checkpoint is not None else None
    request = BacktestRequest.model_validate(
        {"windows": cut, "checkpoint": folder, "score": score, **asked, "cache": cache}
    )
    result = run_backtest(request, interpreter)
    document = as_document(request, result)
    problem = not_active(result)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(_text(document, request, seeded=folder is None))
    if problem:
        click.echo(f"COMPILE WAS NOT ACTIVE: {problem}", err=True)
        sys.exit(ExitCode.FINDINGS)


def _read(data: Sequence[Path], column: str | None) -> list[ReadSymbol]:
    """Read all series; one that is given twice would be counted twice, and make the interval narrower than it is."""
    read = [one for path in data for one in read_symbols(path, column, ())]
    places: dict[str, str] = {}
    for one in read:
        name, place = one.series.name, one.series.series.path
        if name in places:
            raise InputError(f"{name} is given twice: {places[name]} and {place}", hint="name each series once")
        places[name] = place
    return read


def _checked(cache: str, score: str, *, samples: int, batch: int) -> tuple[str, str]:
    """Give cache and score as the other process finds them; what it would stumble over is told here."""
    if samples % batch:
        raise InputError(
            f"--samples {samples} is no multiple of --samples-per-batch {batch}", hint="toto-ts draws whole batches"
        )
    if cache not in CACHES:
        cache = _code("--cache", cache, f"{', '.join(CACHES)} or path/to/file.py:Class", nearest_name(cache, CACHES))
    return cache, _code("--score", score, "path/to/file.py:function") if score else ""


def _code(option: str, given: str, accepted: str, near: str | None = None) -> str:
    file, colon, name = given.rpartition(":")
    if not (file and colon and name.isidentifier()):
        hint = f"did you mean {near}?" if near else f"accepted: {accepted}"
        raise InputError(f"{option} {given!r}: no name of code", hint=hint)
    path = Path(file).absolute()
    if not path.is_file():
        raise InputError(f"{option} {given}: no file {path}", hint=f"accepted: {accepted}")
    return f"{path}:{name}"


def _interpreter(python: str) -> str:
    """Find the interpreter from here: where it is run, a path relative to this folder leads elsewhere."""
    found = shutil.which(python) if python else None
    if found is None:
        raise EnvironmentBuildError(
            f"--python {python!r}: no program that can be run", hint="name an interpreter with torch and toto-ts"
        )
    return str(Path(found).absolute())


def _text(document: dict[str, object], request: BacktestRequest, *, seeded: bool) -> str:
    rows = document["metrics"]
    times = document["median_ms"]
    assert isinstance(rows, dict) and isinstance(times, dict)
    lines = [
        f"torch {document['torch']}, cache {request.cache} ({document['cache_class']}), mode {request.mode}: "
        f"{document['graph_calls']} calls of compiled graphs, {document['compilations']} compilations",
        f"{document['symbols']} series, {document['windows']} windows of {len(request.windows[0].truth)} unseen points",
        "",
        f"{'':8}{'eager':>14}{'compiled':>14}{'difference':>14}   95 % interval",
    ]
    for name, row in rows.items():
        figures = f"{row['eager']:>14.6g}{row['compiled']:>14.6g}{row['difference']:>+14.3g}"
        lines.append(f"{name:8}{figures}   {row['low']:+.3g} to {row['high']:+.3g}")
    lines += [
        f"{'ms':8}{times['eager']:>14.1f}{times['compiled']:>14.1f}",
        "",
        f"largest difference of two forecasts, over the size of eager's: {document['largest_difference']:.2g}",
    ]
    if seeded:
        lines.append("seeded weights: the errors say nothing about a trained model, their difference does")
    return "\n".join(lines)
