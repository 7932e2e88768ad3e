"""The orchestrator with stand-in groups: whatever a group does to itself, the cell has a result. No torch needed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cell.stand_in_groups import MODEL_FAILED, Groups, good_result, request_in, run
from toto_compat.cell import run as cell
from toto_compat.cell.group import GroupResult
from toto_compat.cell.group_process import GroupRun, failure_of_process, group_environment
from toto_compat.cell.run import plan_groups, run_cell
from toto_compat.cell.suites.speed_figures import SpeedRun, SpeedRuns
from toto_compat.contract.request import (
    Device,
    Origin,
)
from toto_compat.contract.result import CellResult, Figure, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Group, Suite


def test_a_cell_that_goes_well_has_evidence_of_every_suite(tmp_path: Path) -> None:
    groups = Groups()
    result = run(tmp_path, groups)
    assert groups.started == [
        "observe",
        "reference",
        "candidate",
        "compare",
        "speed",
        "memory",
        "memory_reference",
        "cuda_lowering",
        "cudagraph",
    ]
    assert {suite: evidence.outcome for suite, evidence in result.evidence.items()} == dict.fromkeys(
        result.request.profile.suites, Outcome.MEASURED
    )
    assert result.failure is None


def test_what_one_group_saw_reaches_the_evidence_of_another(tmp_path: Path) -> None:
    result = run(tmp_path, Groups())
    assert result.evidence[Suite.SPEED].figures["cold_compile_s"].value == 33.0
    assert result.evidence[Suite.MEMORY].figures["compile_peak_bytes"].value == 300


def test_only_after_the_recompile_suite_is_a_start_warm(tmp_path: Path) -> None:
    crashed = Groups({Group.OBSERVE: "raise SystemExit(3)"})
    for result in (run(tmp_path, Groups(), suites=(Suite.SPEED,)), run(tmp_path, crashed)):
        assert result.evidence[Suite.SPEED].figures["warm_start_s"].value is None
    assert run(tmp_path, Groups()).evidence[Suite.SPEED].figures["warm_start_s"].value == 2.0


def test_provenance_is_complete_without_importing_torch(tmp_path: Path) -> None:
    origin = Origin(lock="sha256:lock", runtime="venv", source_hash="beef")
    request = request_in(tmp_path).model_copy(update={"origin": origin})
    provenance = run_cell(request, tmp_path / "request.json", command=Groups()).provenance
    assert (provenance.lock, provenance.runtime, provenance.source_hash) == ("sha256:lock", "venv", "beef")
    assert (provenance.torch, provenance.torch_git) == ("2.13.0+cpu", "abc")
    assert provenance.cache_class == "toto.model.util:KVCache"
    assert provenance.packages["pydantic"]
    assert provenance.cores >= 1
    assert provenance.memory_bytes > 0
    assert provenance.started <= provenance.finished


def test_slow_programs_are_asked_before_the_groups_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, started_before = Groups(), []

    def collect(_origin: Origin, *, started: str) -> Provenance:
        started_before.append(list(groups.started))
        return Provenance(started=started, compiler="g++ 12")

    monkeypatch.setattr(cell, "collect_provenance", collect)
    assert run(tmp_path, groups).provenance.compiler == "g++ 12"
    assert started_before == [[]]


def test_the_orchestrator_imports_no_torch() -> None:
    code = "import sys, toto_compat.cell; sys.exit('torch' in sys.modules or 'toto' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_groups_of_the_suites_asked_for_run(tmp_path: Path) -> None:
    request = request_in(tmp_path, suites=(Suite.DETERMINISM, Suite.SPEED), repeats=2)
    assert [run.name for run in plan_groups(request)] == [
        "reference",
        "candidate",
        "compare",
        "speed",
        "speed-2",
    ]
    request = request_in(tmp_path, suites=(Suite.MEMORY,), repeats=2)
    assert [run.name for run in plan_groups(request)] == ["memory", "memory_reference"]


def test_groups_share_compiler_caches_inside_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    request = request_in(tmp_path)
    observe, predictor = (group_environment(request, group) for group in (Group.OBSERVE, Group.CUDAGRAPH))
    assert observe["TORCHINDUCTOR_CACHE_DIR"] == predictor["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(observe["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    assert "TORCH_LOGS" not in observe


def test_on_cuda_every_group_finds_the_kernels_that_were_tuned_before(tmp_path: Path) -> None:
    """Without its caches Inductor tunes anew, and CUDA graphs would be those of other kernels than the timed ones."""
    on_cuda = request_in(tmp_path).model_copy(update={"device": Device.CUDA})
    of_groups = [group_environment(on_cuda, group) for group in Group]
    assert all("TORCHINDUCTOR_FORCE_DISABLE_CACHES" not in one for one in of_groups)
    assert len({one["TORCHINDUCTOR_CACHE_DIR"] for one in of_groups}) == 1


def test_a_process_that_a_fault_of_the_machine_ended_says_what_to_do() -> None:
    tail = ("terminate called after throwing", "CUDA error: uncorrectable ECC error encountered")
    failure = failure_of_process(GroupRun(Group.SPEED), -6, tail, killed_for_memory=False)
    assert failure.kind == "environment"
    assert "restart the machine" in failure.message


def test_no_folder_of_the_cell_can_be_imported_by_accident(tmp_path: Path) -> None:
    group_environment(request_in(tmp_path), Group.OBSERVE)
    assert {folder.name for folder in tmp_path.iterdir()}.isdisjoint({"triton", "inductor", "torch"})


def test_an_unusable_request_is_refused_with_a_message_and_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    finished = subprocess.run(
        [sys.executable, "-m", "toto_compat.cell", str(tmp_path / "request.json"), str(tmp_path / "result.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 9
    assert "request.json" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "result.json").exists()


def test_a_cell_told_to_stop_leaves_a_result_and_no_process(tmp_path: Path) -> None:
    """A real orchestrator, whose groups wait for ever."""
    (tmp_path / "request.json").write_text(request_in(tmp_path / "work").model_dump_json(by_alias=True))
    program = (
        "import sys, toto_compat.cell.run as cell, toto_compat.cell.__main__ as entry\n"
        "wait = 'import os, signal; print(os.getpid(), flush=True); signal.pause()'\n"
        "cell.run_cell.__kwdefaults__['command'] = lambda *_: [sys.executable, '-c', wait]\n"
        "sys.exit(entry.main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "request.json"), str(tmp_path / "result.json")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "::suite recompile start\n"
    log = tmp_path / "work" / "observe.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
    result = CellResult.model_validate(json.loads((tmp_path / "result.json").read_text()))
    assert result.failure is not None
    assert result.failure.kind == "interrupted"
    assert result.evidence[Suite.RECOMPILE].outcome is Outcome.NOT_RUN
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.parametrize("kind", [None, "interrupted"])
def test_a_signal_while_the_result_is_put_together_does_not_cost_it(tmp_path: Path, kind: str | None) -> None:
    """Whether the cell has finished by then or was told to stop once already, while it started its group."""
    request = request_in(tmp_path / "work", suites=(Suite.CUDAGRAPH,))
    (tmp_path / "request.json").write_text(request.model_dump_json(by_alias=True))
    program = (
        "import os, signal, sys, toto_compat.cell.run as cell, toto_compat.cell.__main__ as entry\n"
        "def signalled(function, *numbers):\n"
        "    def call(*arguments, **options):\n"
        "        for number in numbers:\n"
        "            os.kill(os.getpid(), number)\n"
        "        return function(*arguments, **options)\n"
        "    return call\n"
        "both = (signal.SIGTERM, signal.SIGINT)\n"
        f"stops = {'both[:1]' if kind else '()'}\n"
        "command = signalled(lambda *_: [sys.executable, '-c', ''], *stops)\n"
        "cell.run_cell.__kwdefaults__['command'] = command\n"
        "cell.complete_provenance = signalled(cell.complete_provenance, *both)\n"
        "entry.write_atomically = signalled(entry.write_atomically, *both)\n"
        "sys.exit(entry.main(sys.argv[1:]))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "request.json"), str(tmp_path / "result.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    result = CellResult.model_validate_json((tmp_path / "result.json").read_text())
    assert (result.failure.kind if result.failure else None) == kind


def test_progress_is_told_suite_by_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, Groups(), suites=(Suite.RECOMPILE,))
    assert capsys.readouterr().out.splitlines() == ["::suite recompile start", "::suite recompile done"]


def test_every_repeat_counts_for_a_suite_that_says_so_wherever_its_row_stands(tmp_path: Path) -> None:
    """Not because it happens to be the last of its group: another row may come after it."""
    timings: dict[str, tuple[float, ...]] = dict.fromkeys(("upstream_eager", "same_cache_eager"), (10.0,) * 36)
    slow = SpeedRuns(runs=(SpeedRun(timings=timings | {"compiled": (40.0,) * 36}, warm_start_s=2.0),))

    class OneSlowRepeat(Groups):
        def __call__(self, request_path: Path, run: GroupRun, output: Path) -> list[str]:
            measured = GroupResult(measurements={Suite.SPEED: slow.model_dump()})
            self.results = {Group.SPEED: measured} if run.number == 3 else {}
            return super().__call__(request_path, run, output)

    evidence = run(tmp_path, OneSlowRepeat(), repeats=3).evidence
    assert evidence[Suite.SPEED].details["forecasts_per_repeat"] == [36, 36, 36]
    assert evidence[Suite.SPEED].figures["speedup"].value == pytest.approx(0.25)
    assert [suite for suite in Suite if suite.rule.over_repeats] == [Suite.SPEED]


def test_a_candidate_that_changed_switches_has_no_figures(tmp_path: Path) -> None:
    observed = good_result(Group.OBSERVE).model_copy(update={"changed": ("float32_matmul_precision from a to b",)})
    result = run(tmp_path, Groups(results={Group.OBSERVE: observed}))
    figures = [figure for evidence in result.evidence.values() for figure in evidence.figures.values()]
    assert figures
    assert {figure.value for figure in figures} == {None}
    assert all("float32_matmul_precision from a to b" in figure.missing for figure in figures)


def test_a_forecast_that_raised_is_evidence_although_nothing_was_compared(tmp_path: Path) -> None:
    failed = {
        suite: MODEL_FAILED.model_copy(update={"suite": suite}) for suite in (Suite.EQUIVALENCE, Suite.DETERMINISM)
    }
    groups = Groups(results={Group.CANDIDATE: GroupResult(evidence=failed)})
    result = run(tmp_path, groups)
    assert "compare" not in groups.started
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.MODEL_FAILED


def test_a_candidates_process_gives_no_verdict_on_itself(tmp_path: Path) -> None:
    """It hands over answers; evidence that it writes instead of them, of its own or of another suite, is nobody's."""
    forged = {
        suite: SuiteEvidence(suite=suite, outcome=Outcome.MEASURED, figures={suite.value: Figure(value=0.0)})
        for suite in (Suite.EQUIVALENCE, Suite.DETERMINISM, Suite.SPEED, Suite.MEMORY)
    }
    answers = good_result(Group.CANDIDATE).measurements
    groups = Groups(results={Group.CANDIDATE: GroupResult(evidence=forged, measurements=answers)})
    result = run(tmp_path, groups)
    assert "compare" in groups.started
    for suite, one in forged.items():
        assert result.evidence[suite].figures != one.figures, suite


def test_a_suite_that_is_put_together_here_takes_no_ready_evidence(tmp_path: Path) -> None:
    forged = SuiteEvidence(suite=Suite.MEMORY, outcome=Outcome.MEASURED, figures={"memory": Figure(value=0.1)})
    left = GroupResult(evidence={Suite.MEMORY: forged}, measurements=good_result(Group.MEMORY).measurements)
    result = run(tmp_path, Groups(results={Group.MEMORY: left}))
    assert result.evidence[Suite.MEMORY].figures != forged.figures
