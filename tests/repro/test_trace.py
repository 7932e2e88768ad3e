"""A trace is of the minimal script, or of the cell itself where there is none; what is missing is told."""

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtimes.stub_runtime import StubRuntime
from tests.verdict.sample_cells import cell_request
from toto_compat.contract.request import CacheRequest, CellRequest, CsvSeries
from toto_compat.contract.suites import Suite
from toto_compat.repro.trace import run_cell, run_minimal
from toto_compat.runtimes.seam import AttachedCommand, PreparedEnvironment

TRACE = Path(__file__).parents[1] / "fixtures" / "logs" / "trace-2.13.0"
# Stands in for an environment's interpreter: tells what it was asked and leaves a trace, as torch would.
INTERPRETER = """\
#!{python}
import json, os, pathlib, shutil, sys
here = pathlib.Path.cwd()
told = {{"words": sys.argv[1:], "variables": dict(os.environ)}}
told["files"] = {{str(path.relative_to(here)): path.read_text() for path in here.rglob("*.*") if path.is_file()}}
pathlib.Path({asked!r}).write_text(json.dumps(told))
for path in pathlib.Path({trace!r}).iterdir():
    shutil.copy(path, os.environ["TORCH_TRACE"])
print("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123")
sys.exit({code})
"""


@dataclass
class Asked:
    """What the interpreter was asked."""

    words: list[str]
    variables: dict[str, str]
    files: dict[str, str]


class TracingRuntime(StubRuntime):
    """A runtime whose interpreter is a script."""

    def __init__(self, folder: Path, *, code: int = 0, trace: Path = TRACE) -> None:
        super().__init__()
        self.asked = folder / "asked.json"
        self.python = folder / "python"
        text = INTERPRETER.format(python=sys.executable, asked=str(self.asked), trace=str(trace), code=code)
        self.python.write_text(text, encoding="utf-8")
        self.python.chmod(0o755)

    def attached(
        self,
        prepared: PreparedEnvironment,  # noqa: ARG002 - the protocol's
        words: tuple[str, ...],
        folder: Path,
        *,
        terminal: bool,  # noqa: ARG002
    ) -> AttachedCommand:
        replaced = tuple(word.replace("{python}", str(self.python)) for word in words)
        return AttachedCommand(replaced, {"PATH": os.environ["PATH"]}, folder)

    def was_asked(self) -> Asked:
        return Asked(**json.loads(self.asked.read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()


def prepared(request: CellRequest, runtime: str = "venv") -> PreparedEnvironment:
    return PreparedEnvironment(request.cell.environment, request.environment, runtime, "python", "lock")


def test_a_cell_that_no_script_stands_for_is_traced_itself_by_the_request_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import beside\n", encoding="utf-8")
    (tmp_path / "beside.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "prices.csv").write_text("time,close\n0,1\n", encoding="utf-8")
    request = cell_request(cache="mine").model_copy(
        update={
            "cache": CacheRequest(name="mine", source=f"{tmp_path}/mine.py:Mine"),
            "csv": CsvSeries(path=str(tmp_path / "prices.csv"), time_column="time", value_columns=("close",)),
            "variables": {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
            "quiet_lock": str(tmp_path / "quiet.lock"),
        }
    )
    runtime = TracingRuntime(tmp_path)
    traced = run_cell(runtime, prepared(request), request, minutes=1)
    asked = runtime.was_asked()
    assert asked.words == ["-m", "toto_compat.cell.group", "request.json", "observe", "left.json"]
    assert asked.variables["TORCH_TRACE"] == "trace" and asked.variables["TORCHINDUCTOR_MAX_AUTOTUNE"] == "1"
    given = CellRequest.model_validate_json(asked.files["request.json"])
    assert (given.cache.source, given.workload, given.settings) == (
        "cache/mine.py:Mine",
        request.workload,
        request.settings,
    )
    assert given.csv is not None and asked.files[given.csv.path] == "time,close\n0,1\n"
    assert asked.files["cache/beside.py"] == "x = 1\n"
    assert given.profile.suites == (Suite.RECOMPILE,) and given.quiet_lock is None
    assert str(tmp_path) not in asked.files["request.json"]
    assert "trace/dedicated_log_torch_trace_cell.log" in traced.files
    assert "trace/tlparse/index.html" in traced.files
    assert traced.files["traced.log"] == b"HF_TOKEN=<redacted>\n"
    assert traced.notes == ("no generated code: nothing of the failing function reached inductor",)
    assert not list((tmp_path / "cache").glob("traced-*"))


def test_a_script_is_run_isolated_from_this_package(tmp_path: Path) -> None:
    runtime = TracingRuntime(tmp_path, code=3)
    traced = run_minimal(runtime, prepared(cell_request()), "print(1)\n", minutes=1)
    asked = runtime.was_asked()
    assert asked.words == ["-I", "minimal.py"] and asked.files["minimal.py"] == "print(1)\n"
    assert "PYTHONSAFEPATH" not in asked.variables
    assert "minimal.log" in traced.files
    assert "the minimal script ended with exit code 3: see minimal.log" in traced.notes


def test_a_payload_that_lost_a_secret_is_still_one_to_tlparse_and_keys_of_the_compilers_caches_stay(
    tmp_path: Path,
) -> None:
    (written,) = TRACE.glob("dedicated_log_torch_trace_*.log")
    key = "a" + "bcd4efg2hij" * 4 + "klmnop7"
    told = f'{{"key": "{key}", "token": "hunter2"}}'
    (tmp_path / "trace").mkdir()
    head = f'V1119 10:14:14.409000 1 torch/a.py:1] {{"artifact": {{"name": "x"}}, "has_payload": "{md5(told)}"}}'
    text = f"{written.read_text(encoding='utf-8')}{head}\n\t{told}\n{head}\n"
    (tmp_path / "trace" / written.name).write_text(text, encoding="utf-8")
    runtime = TracingRuntime(tmp_path, trace=tmp_path / "trace")
    files = run_minimal(runtime, prepared(cell_request()), "print(1)\n", minutes=1).files
    clean = files["trace/dedicated_log_torch_trace_minimal.log"].decode()
    before, after = (re.findall(r'"has_payload": "(\w+)"\}\n((?:\t.*\n)*)', one) for one in (text, clean))
    assert before[:-2] == after[:-2]
    (named, payload), _ = after[-2:]
    assert payload == f'\t{{"key": "{key}", "token": "<redacted>"}}\n'
    assert named == md5(payload.strip())


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def test_what_cannot_be_traced_is_told(tmp_path: Path) -> None:
    request = cell_request(cache="mine")
    gone = request.model_copy(update={"cache": CacheRequest(name="mine", source=f"{tmp_path}/gone.py:Mine")})
    (note,) = run_cell(TracingRuntime(tmp_path), prepared(gone), gone, minutes=1).notes
    assert note.startswith("no TORCH_TRACE: what the cell reads is not there any more")
    weights = request.model_copy(update={"checkpoint_folder": str(tmp_path)})
    (note,) = run_cell(TracingRuntime(tmp_path), prepared(weights, "docker"), weights, minutes=1).notes
    assert note == "no TORCH_TRACE: a container does not see the checkpoint"
