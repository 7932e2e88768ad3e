"""`toto-compat matrix --data`: the user's own series from the files people have to rows under a real cell."""

import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from tests.run_all import MAKE_WAY
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import load_run

ROOT = Path(__file__).parent.parent
CELL = "torch-2.13.0-cpu/fixed_size/default+traced"
DAYS = 640
MORNING = datetime(2023, 1, 2, tzinfo=UTC)


def price(day: int) -> float:
    return round(100 + 0.05 * day + 8 * math.sin(day / 11) + (day * 37 % 13) / 4, 2)


def days(count: int = DAYS) -> list[tuple[datetime, float]]:
    return [(MORNING + timedelta(days=day), price(day)) for day in range(count)]


# One symbol per format; those that differ only in how they are written must have the same figures.
FILES: dict[str, str] = {
    "AAPL.csv": "timestamp,open,high,low,close,volume\n"
    + "".join(f"{day:%Y-%m-%d},1,1,1,{value},1000\n" for day, value in days()),
    "MSFT.csv": "Date,Close\r\n" + "".join(f"{day:%Y-%m-%d},{value}\r\n" for day, value in reversed(days())),
    "BTCUSD.csv": "\ufeffDate;Close\n" + "".join(f"{day.isoformat()};{value}\n" for day, value in days()),
    "ETHUSD.csv": "time,close\n" + "".join(f"{int(day.timestamp() * 1000)},{value}\n" for day, value in days()),
    "short & <odd>.csv": "time,close\n" + "".join(f"{int(day.timestamp())},{value}\n" for day, value in days(150)),
    "flat.csv": "time,close\n" + "".join(f"{int(day.timestamp())},5\n" for day, _ in days()),
}
SAME = ("AAPL", "MSFT", "BTCUSD", "ETHUSD")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a matrix file whose profile runs the suite of symbols alone, traced and not lowered."""
    folder = tmp_path_factory.mktemp("symbols")
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["settings"]["traced"] = {"backend": "eager"}
    matrix["caches"]["fixed_size"]["settings"] = ["traced"]
    matrix["workloads"]["few"] = {"model": "tiny", "context": [128, 192], "horizon": [64], "batches": [1]}
    matrix["profiles"]["symbols"] = {"iterations": 1, "workloads": ["few"], "suites": ["symbols"]}
    (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")
    (folder / "data").mkdir()
    for name, text in FILES.items():
        (folder / "data" / name).write_bytes(text.encode())
    return folder


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    cli = [*MAKE_WAY, sys.executable, "-m", "toto_compat.cli", "matrix", CELL, "--profile", "symbols"]
    return subprocess.run(
        [*cli, "--runtime", "venv", "--device", "cpu", "--jobs", "1", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_format_is_a_row_under_its_cell_and_an_unchanged_cell_is_not_run_again(project: Path) -> None:
    done = command(project, "--data", "data", "--run", "first")
    assert done.returncode == ExitCode.OK, done.stdout
    table = json.loads((project / "results/first/compatibility.json").read_text(encoding="utf-8"))
    [row] = table["rows"]
    symbols = {one["symbol"]: one for one in row["symbols"]}
    assert sorted(symbols) == sorted(name.removesuffix(".csv") for name in FILES), done.stdout
    errors = {symbols[name]["mae_eager"] for name in SAME}
    assert len(errors) == 1 and errors.pop() > 0
    for one in symbols.values():
        assert one["mae_compiled"] == pytest.approx(one["mae_eager"], rel=1e-4)
        assert one["recompiles"] == 0
    assert symbols["MSFT"]["notes"] == "newest first: put in order"
    assert symbols["flat"]["notes"] == "constant: every value is 5"
    assert symbols["short & <odd>"]["notes"] == "short: 82 rows of context, 14 padded on the left"
    for gate in ("symbol_equivalence", "symbol_mae", "symbol_recompiles"):
        assert row["gates"][gate]["status"] == "PASS", row["gates"][gate]
    assert "short & <odd>" in done.stdout
    assert "<odd>" not in (project / "results/first/compatibility.md").read_text(encoding="utf-8")
    assert str(project) not in (project / "results/first/cells" / f"{CELL}.json").read_text(encoding="utf-8")

    again = command(project, "--data", str(project / "data"), "--run", "second")
    assert load_run(project / "results/second").cells[0].reused, again.stdout
    changed = project / "data" / "flat.csv"
    changed.write_text(changed.read_text(encoding="utf-8").replace(",5\n", ",6\n"), encoding="utf-8")
    plan = command(project, "--data", "data", "--dry-run")
    assert "1 to run, 0 from the store" in plan.stdout
    without = command(project, "--data", "data", "--symbols", "AAPL", "--dry-run")
    assert "1 to run, 0 from the store" in without.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--data", "none"), ExitCode.INPUT, "no such file or folder"),
        (("--data", "data", "--symbols", "APPL"), ExitCode.SELECTION, "did you mean AAPL?"),
        (("--data", "data", "--column", "Closed"), ExitCode.INPUT, "did you mean close?"),
        (("--data", "short.csv"), ExitCode.INPUT, "short.csv: has 20 rows, the workload few needs 100"),
        (("--data", "comma.csv"), ExitCode.INPUT, "comma.csv:3: close: '1,234.5' has a thousands separator"),
        (("--symbols", "AAPL"), ExitCode.USAGE, "name these with --data"),
        (("--checkpoint", "no such weights"), ExitCode.INPUT, "neither a folder nor a hub id"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_runs(
    project: Path, options: tuple[str, ...], code: ExitCode, message: str
) -> None:
    short = [f"{day},{price(day)}" for day in range(20)]
    (project / "short.csv").write_text("\n".join(["time,close", *short]), encoding="utf-8")
    (project / "comma.csv").write_text('time,close\n1,2\n2,"1,234.5"\n', encoding="utf-8")
    done = command(project, *options)
    assert done.returncode == code, done.stdout
    assert message in done.stdout
    assert "Traceback" not in done.stdout
    assert "started" not in done.stdout
