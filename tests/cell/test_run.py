"""The orchestrator with stand-in groups: whatever a group does to itself, the cell has a result. No torch needed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cell.suites.test_memory import memory_run
from toto_compat.cell import run as cell
from toto_compat.cell.group import GroupResult
from toto_compat.cell.kept import ANSWERS_PLACE, TRUTHS_PLACE
from toto_compat.cell.run import (
    Collected,
    GroupRun,
    InterruptedCellError,
    Starter,
    failure_of_process,
    group_environment,
    plan_groups,
    run_cell,
    run_one_group,
    seconds_allowed,
)
from toto_compat.cell.suites.speed_figures import SpeedRun, SpeedRuns
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.references import (
    ANSWERS,
    REFERENCES_FOLDER,
    TRUTHS,
    read_references,
    references_of,
    write_references,
)
from toto_compat.contract.request import (
    CacheRequest,
    CellProfile,
    CellRequest,
    Demand,
    Device,
    Environment,
    Origin,
    Workload,
)
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Group, Suite, suites_of


def request_in(
    folder: Path,
    *,
    timeout_minutes: float = 5,
    repeats: int = 1,
    suites: tuple[Suite, ...] = CellProfile(iterations=1).suites,
    demands: tuple[Demand, ...] = (),
) -> CellRequest:
    return CellRequest(
        cell=CellName("torch-2.13.0-cpu/upstream/default"),
        environment=Environment(torch="2.13.0", build="cpu"),
        cache=CacheRequest(name="upstream", source="builtin"),
        device=Device.CPU,
        profile_name="quick",
        profile=CellProfile(iterations=3, repeats=repeats, suites=suites, timeout_minutes=timeout_minutes),
        workload=Workload(),
        work_folder=str(folder),
        demands=demands,
    )


def good_result(group: Group) -> GroupResult:
    """What a group that finished leaves behind, thin."""
    match group:
        case Group.SPEED:
            timings: dict[str, tuple[float, ...]] = dict.fromkeys(
                ("upstream_eager", "same_cache_eager", "compiled"), (10.0,) * 36
            )
            speed = SpeedRuns(runs=(SpeedRun(timings=timings, warm_start_s=2.0),))
            return GroupResult(measurements={Suite.SPEED: speed.model_dump()})
        case Group.MEMORY | Group.MEMORY_REFERENCE:
            memory = memory_run(held=88 if group is Group.MEMORY else 64)
            return GroupResult(measurements={Suite.MEMORY: memory.model_dump()})
        case Group.OBSERVE:
            figures = {
                "cold_compile_s": Figure(value=33.0),
                "recompiles": Figure(value=0),
                "compile_peak_bytes": Figure(value=300),
            }
            evidence = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, figures=figures)
            return GroupResult(
                evidence={Suite.RECOMPILE: evidence},
                cache_class="toto.model.util:KVCache",
                facts={"torch": "2.13.0+cpu", "torch_git": "abc", "cuda": None},
            )
        case Group.REFERENCE | Group.CANDIDATE:
            return GroupResult(measurements={suite: {} for suite in suites_of(group)})
        case _:
            return GroupResult(evidence={s: SuiteEvidence(suite=s, outcome=Outcome.MEASURED) for s in suites_of(group)})


MODEL_FAILED = SuiteEvidence(
    suite=Suite.RECOMPILE,
    outcome=Outcome.MODEL_FAILED,
    failure=Failure(kind="exception", message="IndexError: out of range"),
)


class Groups:
    """Commands that stand in for the group processes: most finish, the named ones run a script of the test's."""

    def __init__(
        self, scripts: dict[Group, str] | None = None, results: dict[Group, GroupResult] | None = None
    ) -> None:
        self.scripts = scripts or {}
        self.results = results or {}
        self.started: list[str] = []

    def __call__(self, _request_path: Path, run: GroupRun, output: Path) -> list[str]:
        self.started.append(run.name)
        if run.group in self.scripts:
            return [sys.executable, "-c", self.scripts[run.group], str(output)]
        result = self.results.get(run.group) or good_result(run.group)
        write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        return [sys.executable, "-c", write, str(output), result.model_dump_json()]


def run(folder: Path, groups: Groups, **options: object) -> CellResult:
    request = request_in(folder, **options)  # type: ignore[arg-type]
    return run_cell(request, folder / "request.json", command=groups)


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


def test_a_group_that_crashes_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    script = "import os, signal; print('half way', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    result = run(tmp_path, Groups({Group.COMPARE: script}))
    for suite in (Suite.EQUIVALENCE, Suite.DETERMINISM):
        evidence = result.evidence[suite]
        assert evidence.outcome is Outcome.ERROR
        assert evidence.failure is not None
        assert evidence.failure.kind == "crash"
        assert "SIGSEGV" in evidence.failure.message
        assert "half way" in evidence.failure.last_lines
    assert result.evidence[Suite.SPEED].outcome is Outcome.MEASURED


# A result of the first of the group's suites, as a group leaves it that goes on with the second.
HALF_A_RESULT = GroupResult(
    evidence={Suite.EQUIVALENCE: SuiteEvidence(suite=Suite.EQUIVALENCE, outcome=Outcome.MEASURED)}
).model_dump_json()


def test_a_crash_costs_only_the_suites_that_were_not_finished(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        f"pathlib.Path(sys.argv[1]).write_text({HALF_A_RESULT!r})\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    evidence = run(tmp_path, Groups({Group.COMPARE: script})).evidence
    assert evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED
    assert evidence[Suite.DETERMINISM].outcome is Outcome.ERROR
    assert "SIGSEGV" in str(evidence[Suite.DETERMINISM].failure)


def test_a_crash_after_the_last_suite_costs_nothing(tmp_path: Path) -> None:
    whole = good_result(Group.COMPARE).model_dump_json()
    script = f"import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text({whole!r}); os.abort()"
    evidence = run(tmp_path, Groups({Group.COMPARE: script})).evidence
    assert evidence[Suite.DETERMINISM].outcome is Outcome.MEASURED


class HalfWay:
    """Starts a stand-in for a process that is half way when waiting for it ends with an error."""

    pid = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def start(self, _run: GroupRun, output: Path, log: Path) -> "HalfWay":
        output.write_text(HALF_A_RESULT)
        log.touch()
        return self

    def wait(self, **_: object) -> int:
        raise self._error


def collected_half_way(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Collected:
    monkeypatch.setattr(cell, "kill_group", lambda _process: -signal.SIGKILL)
    collected = Collected()
    request, equivalence = request_in(folder), GroupRun(Group.COMPARE)
    try:
        run_one_group(request, equivalence, collected, allowance=60.0, starter=HalfWay(error))  # type: ignore[arg-type]
    except InterruptedCellError:
        assert isinstance(error, InterruptedCellError)
    return collected


def test_a_timeout_costs_only_the_suites_that_were_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = collected_half_way(tmp_path, subprocess.TimeoutExpired("group", 60.0), monkeypatch)
    assert collected.results["compare"].tells_of(Suite.EQUIVALENCE)
    assert collected.failures["compare"].kind == "timeout"
    runs = [GroupRun(Group.COMPARE)]
    assert cell.evidence_of(Suite.EQUIVALENCE, collected, runs).outcome is Outcome.MEASURED
    assert cell.evidence_of(Suite.DETERMINISM, collected, runs).outcome is Outcome.ERROR


def test_a_stop_costs_only_the_suites_that_were_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = collected_half_way(tmp_path, InterruptedCellError(), monkeypatch)
    runs = [GroupRun(Group.COMPARE)]
    assert cell.evidence_of(Suite.EQUIVALENCE, collected, runs).outcome is Outcome.MEASURED
    assert cell.evidence_of(Suite.DETERMINISM, collected, runs).outcome is Outcome.NOT_RUN


def test_a_group_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    collected = Collected()
    groups = Groups({Group.OBSERVE: "import signal; signal.pause()"})
    observe = GroupRun(Group.OBSERVE)
    request = request_in(tmp_path)
    starter = Starter(request, tmp_path / "request.json", groups)
    run_one_group(request, observe, collected, allowance=0.5, starter=starter)
    assert not collected.results
    assert collected.failures["observe"].kind == "timeout"
    assert "timeout_minutes" in collected.failures["observe"].message


def test_a_group_that_hangs_leaves_time_for_the_others() -> None:
    assert seconds_allowed(600.0, groups_left=5) == 300.0
    assert seconds_allowed(300.0, groups_left=1) == 300.0
    assert seconds_allowed(-5.0, groups_left=2) == 0.0


def test_running_out_of_memory_is_told_apart_from_a_crash(tmp_path: Path) -> None:
    result = run(tmp_path, Groups({Group.SPEED: "raise MemoryError('no more')"}))
    failure = result.evidence[Suite.SPEED].failure
    assert failure is not None
    assert failure.kind == "out_of_memory"


def test_a_kernel_kill_for_memory_is_told_apart_from_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter(range(1000))
    monkeypatch.setattr(cell, "out_of_memory_kills", lambda: next(kills))
    result = run(tmp_path, Groups({Group.SPEED: "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}))
    failure = result.evidence[Suite.SPEED].failure
    assert failure is not None
    assert failure.kind == "out_of_memory"
    assert "SIGKILL" in failure.message


def test_a_forecast_that_raised_beside_a_kernel_kill_for_memory_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([0, 1, *[1] * 100])  # the first group's alone
    monkeypatch.setattr(cell, "out_of_memory_kills", lambda: next(kills))
    groups = Groups(results={Group.OBSERVE: GroupResult(evidence={Suite.RECOMPILE: MODEL_FAILED})})
    result = run(tmp_path, groups)
    evidence = result.evidence[Suite.RECOMPILE]
    assert evidence.outcome is Outcome.ERROR
    assert evidence.failure is not None
    assert evidence.failure.kind == "out_of_memory"
    assert "IndexError" in evidence.failure.message
    assert result.evidence[Suite.SPEED].outcome is Outcome.MEASURED


@pytest.mark.parametrize("left", ["", '{"evidence"', '{"unknown": 1}'])
def test_a_result_that_cannot_be_read_is_an_error(tmp_path: Path, left: str) -> None:
    script = f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({left!r})"
    result = run(tmp_path, Groups({Group.CUDAGRAPH: script}))
    assert result.evidence[Suite.CUDAGRAPH].outcome is Outcome.ERROR


def test_an_old_result_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "observe.json").write_text(good_result(Group.OBSERVE).model_dump_json())
    result = run(tmp_path, Groups({Group.OBSERVE: "raise SystemExit(3)"}))
    assert result.evidence[Suite.RECOMPILE].outcome is Outcome.ERROR


def test_a_forecast_that_cannot_be_compiled_is_not_timed(tmp_path: Path) -> None:
    groups = Groups(results={Group.OBSERVE: GroupResult(evidence={Suite.RECOMPILE: MODEL_FAILED})})
    result = run(tmp_path, groups)
    assert groups.started == ["observe", "reference", "candidate", "compare", "cudagraph"]
    assert result.evidence[Suite.RECOMPILE].outcome is Outcome.MODEL_FAILED
    assert result.evidence[Suite.SPEED].outcome is Outcome.NOT_RUN
    assert "IndexError" in str(result.evidence[Suite.SPEED].failure)


def test_one_repeat_that_fails_leaves_no_speed_to_judge(tmp_path: Path) -> None:
    script = "import sys; sys.exit('2' in sys.argv[1])"

    class SecondFails(Groups):
        def __call__(self, request_path: Path, run: GroupRun, output: Path) -> list[str]:
            if run.name == "speed-2":
                return [sys.executable, "-c", script, "2"]
            return super().__call__(request_path, run, output)

    groups = SecondFails()
    result = run(tmp_path, groups, repeats=3)
    assert [name for name in groups.started if name.startswith("speed")] == ["speed", "speed-3"]
    assert result.evidence[Suite.SPEED].outcome is Outcome.ERROR
    assert result.evidence[Suite.MEMORY].figures["memory"].value == 1.1


NO_RECOMPILES = Demand(gate="recompiles", suite=Suite.RECOMPILE, figure="recompiles", limit=GateLimit(max=0))


def recompiled(value: float | None, *, kind: Kind = Kind.MEASURED, **left: Any) -> Groups:
    """A cell whose recompile suite counted so many."""
    figures = {"recompiles": Figure(value=value, kind=kind), "cold_compile_s": Figure(value=33.0)}
    evidence = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, figures=figures)
    return Groups(results={Group.OBSERVE: GroupResult(evidence={Suite.RECOMPILE: evidence}, **left)})


def test_a_cell_that_cannot_pass_skips_added_checks_and_names_them(tmp_path: Path) -> None:
    groups = recompiled(22)
    result = run(tmp_path, groups, repeats=3, demands=(NO_RECOMPILES,))
    assert groups.started == ["observe", "reference", "candidate", "compare", "speed", "cudagraph"]
    why = "recompiles is 22, limit <= 0, so that this cell cannot PASS"
    assert result.skipped == {"memory": why, "speed in part": f"1 of 3 processes: {why}"}
    memory, speed = result.evidence[Suite.MEMORY], result.evidence[Suite.SPEED]
    assert (memory.outcome, memory.failure) == (Outcome.NOT_RUN, Failure(kind="skipped", message=why))
    assert speed.outcome is Outcome.MEASURED
    assert speed.details["forecasts_per_repeat"] == [36]
    assert not result.could_not_run


@pytest.mark.parametrize(
    "groups",
    [
        recompiled(0),
        recompiled(None),
        recompiled(float("nan")),
        recompiled(22, kind=Kind.PREDICTED),
        recompiled(22, changed=("torch.backends.cudnn.enabled",)),
    ],
    ids=["kept", "not measured", "not a number", "predicted", "will be taken back"],
)
def test_a_cell_that_may_still_pass_skips_nothing(tmp_path: Path, groups: Groups) -> None:
    result = run(tmp_path, groups, repeats=2, demands=(NO_RECOMPILES,))
    assert groups.started[4:] == ["speed", "speed-2", "memory", "memory_reference", "cudagraph"]
    assert result.skipped == {}


def test_a_cell_without_demands_skips_nothing(tmp_path: Path) -> None:
    groups = recompiled(22)
    assert run(tmp_path, groups).skipped == {}
    assert "memory" in groups.started


def test_a_demand_on_a_suite_that_is_not_asked_for_or_that_crashed_is_not_broken(tmp_path: Path) -> None:
    demands = (NO_RECOMPILES,)
    assert run(tmp_path, Groups(), suites=(Suite.SPEED, Suite.MEMORY), demands=demands).skipped == {}
    assert run(tmp_path, Groups({Group.OBSERVE: "raise SystemExit(3)"}), demands=demands).skipped == {}


def test_a_forecast_that_raised_comes_before_a_broken_demand(tmp_path: Path) -> None:
    groups = recompiled(22)
    groups.results[Group.COMPARE] = GroupResult(
        evidence={suite: MODEL_FAILED.model_copy(update={"suite": suite}) for suite in suites_of(Group.COMPARE)}
    )
    failure = run(tmp_path, groups, demands=(NO_RECOMPILES,)).evidence[Suite.MEMORY].failure
    assert failure is not None and failure.kind == "pointless"


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


def test_groups_share_compiler_caches_inside_the_cell_and_the_predictor_uses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    request = request_in(tmp_path)
    observe, predictor = (group_environment(request, group) for group in (Group.OBSERVE, Group.CUDAGRAPH))
    assert observe["TORCHINDUCTOR_CACHE_DIR"] == predictor["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(observe["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES" not in observe
    assert predictor["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"
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


def test_the_right_answers_are_out_of_the_candidates_reach_and_back_for_the_comparison(tmp_path: Path) -> None:
    hidden = "kept-from-the-candidate/references"
    left = good_result(Group.REFERENCE).model_dump_json()
    folder = "import pathlib, sys; work = pathlib.Path(sys.argv[1]).parent"
    say = f"print('there' if (work / {hidden!r}).exists() else 'gone', flush=True)"
    scripts = {
        Group.REFERENCE: f"{folder}; (work / {hidden!r}).parent.mkdir(); (work / {hidden!r}).write_text('42'); "
        f"pathlib.Path(sys.argv[1]).write_text({left!r})",
        Group.CANDIDATE: f"{folder}; {say}; pathlib.Path(sys.argv[1]).write_text({left!r})",
        Group.COMPARE: f"{folder}; {say}; raise SystemExit(3)",
        Group.SPEED: f"{folder}; {say}; raise SystemExit(3)",
    }
    run(tmp_path, Groups(scripts))
    logs = {group: (tmp_path / f"{group.value}.log").read_text().strip() for group in scripts if group != "reference"}
    assert logs == {Group.CANDIDATE: "gone", Group.COMPARE: "there", Group.SPEED: "gone"}


# Stands in for upstream eager: leaves its answers in both places, as the reference group does.
LEAVES_ANSWERS = (
    "import pathlib, sys; work = pathlib.Path(sys.argv[1]).parent\n"
    f"for place, text in (({str(ANSWERS_PLACE)!r}, 'answers'), ({str(TRUTHS_PLACE)!r}, 'truths')):\n"
    "    (work / place).parent.mkdir(exist_ok=True); (work / place).write_text(text)\n"
)
ASKS_UPSTREAM_EAGER = (
    f"{LEAVES_ANSWERS}pathlib.Path(sys.argv[1]).write_text({good_result(Group.REFERENCE).model_dump_json()!r})"
)
CONTENTS = {ANSWERS: b"answers", TRUTHS: b"truths"}


def run_given(folder: Path, groups: Groups, contents: dict[str, bytes]) -> CellResult:
    """A cell that is told of CONTENTS and finds `contents`."""
    write_references(folder / REFERENCES_FOLDER, contents)
    given = request_in(folder).model_copy(update={"references": references_of(CONTENTS, {}, key="key")})
    return run_cell(given, folder / "request.json", command=groups)


def test_a_cell_that_was_given_references_asks_nobody_and_says_which(tmp_path: Path) -> None:
    folder = "import pathlib, sys; work = pathlib.Path(sys.argv[1]).parent"
    list_all = "print(sorted(path.name for path in work.rglob('*.safetensors')), flush=True); raise SystemExit(3)"
    groups = Groups(dict.fromkeys((Group.OBSERVE, Group.COMPARE, Group.SPEED), f"{folder}; {list_all}"))
    result = run_given(tmp_path, groups, CONTENTS)
    assert "reference" not in groups.started
    assert {"candidate", "compare"} <= set(groups.started)
    assert result.provenance.references == references_of(CONTENTS, {}, key="key")
    seen = {name: (tmp_path / f"{name}.log").read_text().strip() for name in ("observe", "compare", "speed")}
    assert seen == {"observe": f"['{TRUTHS}']", "compare": f"['{ANSWERS}', '{TRUTHS}']", "speed": f"['{TRUTHS}']"}


def test_given_or_computed_by_the_cell_the_evidence_is_the_same(tmp_path: Path) -> None:
    own = run(tmp_path, Groups({Group.REFERENCE: ASKS_UPSTREAM_EAGER}))
    given = run_given(tmp_path, Groups(), CONTENTS)
    assert own.provenance.references == references_of(CONTENTS, {})

    def timeless(result: CellResult) -> dict[Suite, SuiteEvidence]:
        return {suite: one.model_copy(update={"seconds": 0}) for suite, one in result.evidence.items()}

    assert timeless(own) == timeless(given)


@pytest.mark.parametrize("contents", [{}, {ANSWERS: b"answers"}, {**CONTENTS, ANSWERS: b"answ"}])
def test_a_cell_that_was_given_the_wrong_references_computes_its_own(
    tmp_path: Path, contents: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    groups = Groups({Group.REFERENCE: ASKS_UPSTREAM_EAGER})
    result = run_given(tmp_path, groups, contents)
    assert "reference" in groups.started
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED
    assert result.provenance.references == references_of(CONTENTS, {})
    assert "references that were given are not used" in capfd.readouterr().out


def test_who_is_asked_for_references_alone_runs_nothing_else_and_leaves_them(tmp_path: Path) -> None:
    groups = Groups({Group.REFERENCE: ASKS_UPSTREAM_EAGER})
    request = request_in(tmp_path, suites=(Suite.EQUIVALENCE,)).model_copy(update={"only_references": True})
    result = run_cell(request, tmp_path / "request.json", command=groups)
    assert groups.started == ["reference"]
    assert result.failure is None
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.NOT_RUN
    told = result.provenance.references
    assert told is not None
    assert read_references(tmp_path / REFERENCES_FOLDER, told) == CONTENTS


@pytest.mark.parametrize("script", ["raise SystemExit(3)", f"{LEAVES_ANSWERS}raise SystemExit(3)"])
def test_who_is_asked_for_references_and_fails_leaves_none(tmp_path: Path, script: str) -> None:
    request = request_in(tmp_path, suites=(Suite.EQUIVALENCE,)).model_copy(update={"only_references": True})
    result = run_cell(request, tmp_path / "request.json", command=Groups({Group.REFERENCE: script}))
    assert result.provenance.references is None
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.ERROR
    assert not (tmp_path / REFERENCES_FOLDER).exists()


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
