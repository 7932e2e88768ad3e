"""Slurm's commands as small scripts: what no real cluster does when it is asked to, such as taking one array of two.

Nothing is ever run: jobs stand in a file until somebody removes them. What a job does on a real Slurm is in
test_slurm.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.contract.result import CellResult, Failure, Outcome, Provenance, SuiteEvidence
from toto_compat.detached import watch_again
from toto_compat.evidence.files import read_model, write_model
from toto_compat.runtimes.progress import PlainProgress
from toto_compat.runtimes.slurm.exchange import Exchange, NodeResult, Submitted, Task, exchange_of
from toto_compat.runtimes.slurm.watch import Watch

SCRIPTS = {
    "srun": "",
    "sbatch": r"""
n=$(ls scripts | wc -l); id=$((201 + n))
if [ -e refuse_from ] && [ "$n" -ge "$(cat refuse_from)" ]; then echo "sbatch: error: not this one" >&2; exit 1; fi
if [ -e kill_before_it_is_taken ]; then kill -9 "$PPID"; exit; fi
cp "$1" "scripts/$id"; env >"variables/$id"
name=$(sed -n 's/^#SBATCH --job-name=//p' "$1"); last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' "$1")
if [ -n "$last" ]; then ids=$(seq -f "${id}_%g" 0 "$last"); else ids=$id; fi
for job in $ids; do echo "$job|PENDING||Resources|$name" >>queue; done
if [ -e lose_results ]; then mv "$(cat lose_results)" away; fi
if [ -e kill_whoever_submits ]; then kill -9 "$PPID"; fi
echo "Submitted batch job $id"
""",
    "squeue": """
env >variables/squeue
if [ -e silent ]; then exit 1; fi
cat queue
""",
    "scancel": """
env >variables/scancel
if [ -e silent ]; then exit 1; fi
for job; do echo "$job" >>cancelled; done
""",
}
TWO_ARRAYS = (
    "{partition: a, poll_seconds: 0.01, result_grace_seconds: 0, retries: 1, "
    "environments: {torch-2.12.0-cpu: {partition: b}}}"
)


class SmallSlurm:
    """A project that submits to it, from this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project, self.folder, self._monkeypatch = folder / "project", folder / "slurm", monkeypatch
        for place in (self.project, self.folder / "scripts", self.folder / "variables", self.folder / "bin"):
            place.mkdir(parents=True)
        (self.folder / "queue").touch()
        for name, text in SCRIPTS.items():
            script = self.folder / "bin" / name
            script.write_text(
                f'#!/bin/sh\ncase "$1" in /*|-*|[0-9]*|"") ;; *) exit 2 ;; esac\ncd {self.folder}\n{text}'
            )
            script.chmod(0o755)
        self.configure(TWO_ARRAYS)
        monkeypatch.chdir(self.project)
        monkeypatch.setenv("PATH", f"{self.folder}/bin:/usr/bin:/bin")
        self.use_cache("cache")

    def configure(self, slurm: str, matrix: str = MATRIX_TEXT) -> None:
        (self.project / "matrix.yaml").write_text(f"{matrix}slurm: {slurm}\n", encoding="utf-8")

    def use_cache(self, name: str) -> Path:
        self._monkeypatch.setenv("TOTO_COMPAT_CACHE", str(self.project / name))
        return self.project / name

    def order(self, name: str, value: str = "") -> None:
        (self.folder / name).write_text(value, encoding="utf-8")

    def call(self, *arguments: str) -> Result:
        """As on a terminal: nothing is taken out of what is printed on the way."""
        return CliRunner().invoke(cli, arguments, color=True)

    def submit(self, *arguments: str) -> Result:
        words = ("--executor", "slurm", "--device", "cpu", "--run", "one", "--detach", "torch-2.1*/*")
        return self.call("matrix", *words, *arguments)

    @property
    def run(self) -> Path:
        return self.project / "results" / "one"

    @property
    def exchange(self) -> Exchange:
        return exchange_of(self.run)

    @property
    def submitted(self) -> Submitted:
        return self.exchange.read_submitted()

    def change_submitted(self, old: str, new: str) -> None:
        path = self.exchange.folder / "submitted.json"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    def watch(self, said: list[str] | None = None) -> Watch:
        return watch_again(self.run, PlainProgress(4, write=(said if said is not None else []).append))

    def end_jobs(self) -> None:
        """Have Slurm forget every job, whatever it left."""
        self.order("queue")

    def hold_jobs(self, reason: str) -> None:
        """Have Slurm hold every job, for the reason that it gives."""
        queue = self.folder / "queue"
        queue.write_text(queue.read_text(encoding="utf-8").replace("|Resources|", f"|{reason}|"), encoding="utf-8")

    def leave_result(self, number: int, nonce: str | None = None, failure: Failure | None = None) -> Path:
        """Leave what a node leaves."""
        task = read_model(self.exchange.task(number), Task)
        evidence = {
            suite: SuiteEvidence(suite=suite, outcome=Outcome.MEASURED) for suite in task.request.profile.suites
        }
        result = CellResult(
            cell=task.request.cell, request=task.request, provenance=Provenance(), evidence=evidence, failure=failure
        )
        path = self.exchange.result(number)
        write_model(path, NodeResult(result=result, seconds=1.0, nonce=task.nonce if nonce is None else nonce))
        return path

    def leave_all_results(self) -> None:
        for task in self.submitted.tasks:
            self.leave_result(task.number)

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    @property
    def scripts(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in sorted((self.folder / "scripts").iterdir())]

    @property
    def queued(self) -> list[str]:
        return [line.partition("|")[0] for line in self.lines("queue")]

    def variables(self, name: str) -> set[str]:
        return {line.partition("=")[0] for line in self.lines(f"variables/{name}")}


def stored(cache: Path) -> Iterator[Path]:
    """Finished cells in a cache folder's store."""
    return cache.glob("evidence/??/*.json")
