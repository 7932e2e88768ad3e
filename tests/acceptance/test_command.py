"""The acceptance from its command: with a GPU that only nvidia-smi tells of, without one, resumed, rehearsed."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.acceptance.gpu_cells import MatrixOfThisMachine, checked
from tests.runtimes.nvidia import smi
from tests.runtimes.stub_runtime import StubRuntime
from tests.verdict.sample_cells import GATES, with_figures
from tests.verdict.stored_runs import store_run
from toto_compat.acceptance import command, sabotages
from toto_compat.acceptance.bundle import AcceptanceReport
from toto_compat.acceptance.campaign import REHEARSAL, Campaign, Ended, StepName
from toto_compat.acceptance.command import Wanted, accept
from toto_compat.acceptance.trials import MATRIX_FILE, lowered_for
from toto_compat.cli import cli
from toto_compat.contract.request import Environment
from toto_compat.environments.engine import EngineFacts, check_hands_out_gpus
from toto_compat.errors import EnvironmentBuildError, ExitCode, InputError, SelectionError
from toto_compat.matrix.expand import expand, select
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.workflow import run_matrix

MATRIX = Path(__file__).parents[2] / "matrix.yaml"
PRODUCTION, NEWEST, CPU = "torch-2.9.0-cu128", "torch-2.15.0-cu132", "torch-2.13.0-cpu"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "examine", lambda _matrix: iter(()))
    monkeypatch.setattr(command, "open_runtime", lambda *_, **__: StubRuntime())
    yield
    smi.forget()


def wanted(tmp_path: Path, *, rehearse: bool = False) -> Wanted:
    return Wanted(tmp_path / "results", MATRIX, rehearse=rehearse)


def report_in(folder: Path) -> AcceptanceReport:
    return AcceptanceReport.model_validate_json((folder / "bundle" / "acceptance.json").read_bytes())


def test_a_machine_without_a_gpu_reads_one_message_that_names_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    smi.without_devices(tmp_path, monkeypatch)
    done = CliRunner().invoke(cli, ["gpu-acceptance", "--matrix", str(MATRIX), "--results", str(tmp_path / "results")])
    assert isinstance(done.exception, EnvironmentBuildError)
    assert done.exception.code is ExitCode.ENVIRONMENT
    assert "no NVIDIA GPU answers here" in done.exception.message
    assert "--rehearse" in done.exception.hint
    assert not (tmp_path / "results").exists()  # nothing half-written


def test_on_a_gpu_it_goes_from_the_probe_to_a_bundle_in_which_every_claim_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    matrix = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), matrix) is Ended.HELD
    broken = [one.cache for one in sabotages.ALL]
    assert matrix.runs == ["lowering", "device", *broken, "production-check"]
    assert {asked.device for asked in matrix.asked} == {"cuda"}
    assert [asked.lower_only for asked in matrix.asked].count(True) == 1
    last = matrix.asked[-1]
    assert last.profile == "production-check"
    environments = {selector.partition("/")[0] for selector in last.selectors}
    assert environments == {PRODUCTION, NEWEST}
    report = report_in(tmp_path / "results" / "gpu-acceptance")
    predicted = report.campaign.steps[StepName.LOWERING].lines
    assert f"{PRODUCTION}/fixed_size/reduce-overhead: CUDA graphs would take every graph whole" in predicted
    assert any("would not take 8 graphs whole" in line for line in predicted)
    assert (report.rehearsal, report.warning) == (False, "")
    assert {claim.ended for claim in report.claims} == {Ended.HELD}
    assert {name for name in (PRODUCTION, NEWEST) if any(name in claim.claim for claim in report.claims)} == {
        PRODUCTION,
        NEWEST,
    }


def test_every_run_that_is_asked_for_is_one_of_its_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(0, "NVIDIA L40S", "8.9")])
    matrix = MatrixOfThisMachine()
    accept(wanted(tmp_path), matrix)
    loaded = load_matrix(tmp_path / "results" / "gpu-acceptance" / MATRIX_FILE)
    for asked in matrix.asked:
        cells = select(expand(loaded, asked.profile), asked.selectors)
        assert cells
    assert loaded.profiles["sabotage-memory"].workloads == ("quick",)  # a hoard of smoke's buffers would be too small
    assert loaded.profiles["lowering"].architectures == ("sm_86",)  # what an sm_89 card takes of these wheels


def test_a_slow_machines_patience_is_that_of_the_short_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    patient = tmp_path / "matrix.yaml"
    smoke = (
        "unannounced_shapes: false # a third of the compile time, and no gate looks at them\n    timeout_minutes: 30"
    )
    text = MATRIX.read_text(encoding="utf-8")
    assert smoke in text
    patient.write_text(text.replace(smoke, smoke.replace("30", "75")), encoding="utf-8")
    accept(replace(wanted(tmp_path), matrix_path=patient), MatrixOfThisMachine())
    profiles = load_matrix(tmp_path / "results" / "gpu-acceptance" / MATRIX_FILE).profiles
    own = [name for name in profiles if name in ("lowering", "device") or name.startswith("sabotage-")]
    assert {profiles[name].timeout_minutes for name in own} == {75}


def test_every_run_is_one_that_the_real_command_plans_on_this_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of `toto-compat matrix` up to the point where it would build and run: only lowering is done on the CPU."""
    smi.install(tmp_path, monkeypatch, smi.ONE)
    matrix = MatrixOfThisMachine()
    accept(replace(wanted(tmp_path), runtime="venv"), matrix)
    for asked in matrix.asked:
        capsys.readouterr()
        assert run_matrix(replace(asked, dry_run=True)) is ExitCode.OK
        told = capsys.readouterr().err
        assert f"device {'cpu' if asked.lower_only else 'cuda'}" in told
        assert "cannot" not in told
        assert all(selector in told for selector in asked.selectors)


def test_before_anything_begins_it_says_how_long_each_step_takes_and_what_is_finished_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    with pytest.raises(KeyboardInterrupt):
        accept(wanted(tmp_path), MatrixOfThisMachine(broken_off_at="device"))
    told = capsys.readouterr().err
    assert told.index("estimated") < told.index("step 1 of 6")
    estimated = re.search(
        r"estimated (\d+) min and .*: lowering (\d+) min, device (\d+) min, sabotages (\d+) min, "
        r"production-check (\d+) min; broken off anywhere, the same command goes on",
        told,
    )
    assert estimated is not None
    whole, *parts = map(int, estimated.groups())
    assert abs(whole - sum(parts)) <= len(parts)
    accept(wanted(tmp_path), MatrixOfThisMachine())
    assert "and what environments take to be built: device" in capsys.readouterr().err
    accept(wanted(tmp_path), MatrixOfThisMachine())
    assert "every run is finished: what is left takes seconds" in capsys.readouterr().err


def test_the_table_and_what_follows_of_it_are_those_of_the_production_check_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three suites on caches that are wrong on purpose nothing follows for production."""
    smi.install(tmp_path, monkeypatch, smi.ONE)
    matrix = MatrixOfThisMachine()
    accept(wanted(tmp_path), matrix)
    assert [asked.run for asked in matrix.asked if not asked.as_part] == ["production-check"]


@pytest.mark.parametrize(
    ("gpu", "taken"), [("sm_89", "sm_80"), ("sm_90", "sm_90a"), ("sm_107", "sm_100"), ("sm_110", ""), ("", "")]
)
def test_it_compiles_for_what_the_card_takes_of_a_wheel(gpu: str, taken: str) -> None:
    wheel = Environment(torch="2.15.0", build="cu132", gpu_architectures=("sm_80", "sm_90a", "sm_100", "sm_103a"))
    assert lowered_for(gpu, wheel) == taken


def test_a_step_that_ended_is_not_taken_again_and_one_that_was_broken_off_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    first = MatrixOfThisMachine(broken_off_at=sabotages.ALL[1].cache)
    with pytest.raises(KeyboardInterrupt):
        accept(wanted(tmp_path), first)
    state = tmp_path / "results" / "gpu-acceptance" / "state.json"
    campaign = Campaign.model_validate_json(state.read_bytes())
    assert list(campaign.steps) == [StepName.PROBE, StepName.LOWERING, StepName.DEVICE]
    second = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), second) is Ended.HELD
    assert second.runs == [*(one.cache for one in sabotages.ALL[1:]), "production-check"]
    third = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), third) is Ended.HELD
    assert third.runs == []


def test_what_could_not_be_run_is_not_shown_and_tried_again_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    failing = sabotages.ALL[2].cache
    assert accept(wanted(tmp_path), MatrixOfThisMachine(cannot_run=failing)) is Ended.NOT_SHOWN
    second = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), second) is Ended.HELD
    assert second.runs == [failing]


def test_what_others_on_the_machine_left_undecided_is_measured_again_and_not_taken_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    assert accept(wanted(tmp_path), MatrixOfThisMachine(disturbed="production-check")) is Ended.NOT_SHOWN
    second = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), second) is Ended.HELD
    assert [(asked.run, asked.fresh) for asked in second.asked] == [("production-check", True)]


def test_a_rehearsal_that_others_disturbed_is_not_walked_through_again(tmp_path: Path) -> None:
    accept(wanted(tmp_path, rehearse=True), MatrixOfThisMachine(disturbed="production-check"))
    second = MatrixOfThisMachine()
    accept(wanted(tmp_path, rehearse=True), second)
    assert second.runs == []


@pytest.mark.parametrize("run", ["lowering", "device", "production-check", sabotages.ALL[0].cache])
@pytest.mark.parametrize("what", ["run", "cell"])
def test_a_step_whose_run_is_no_longer_there_is_taken_again_whatever_the_state_says(
    run: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    accept(wanted(tmp_path), MatrixOfThisMachine())
    gone = tmp_path / "results" / "gpu-acceptance" / run
    shutil.rmtree(gone if what == "run" else gone / "cells")
    again = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), again) is Ended.HELD
    assert again.runs == [run]


def test_a_state_that_tells_of_a_sabotage_what_its_run_does_not_changes_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    accept(wanted(tmp_path), MatrixOfThisMachine())
    folder = tmp_path / "results" / "gpu-acceptance"
    environment = f"{PRODUCTION}/{sabotages.ALL[0].cache}/reduce-overhead"
    store_run(folder, sabotages.ALL[0].cache, [checked(environment)], gates=GATES, device="cuda")
    assert accept(wanted(tmp_path), MatrixOfThisMachine()) is Ended.BROKEN
    [told] = [claim for claim in report_in(folder).claims if "wrong on purpose" in claim.claim]
    assert told.ended is Ended.BROKEN
    assert "NOT caught" in told.found


def test_a_step_counts_as_its_runs_tell_it_and_not_as_the_state_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    accept(wanted(tmp_path), MatrixOfThisMachine())
    folder = tmp_path / "results" / "gpu-acceptance"
    slow = with_figures(checked(f"{PRODUCTION}/fixed_size/reduce-overhead"), {Gate.SPEEDUP: 0.5})
    store_run(folder, "production-check", [slow], gates=GATES, device="cuda")
    again = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), again) is Ended.BROKEN, "no claim speaks of the speed: the step alone does"
    assert again.runs == []
    state = Campaign.model_validate_json((folder / "state.json").read_bytes())
    assert state.steps[StepName.PRODUCTION_CHECK].ended is Ended.BROKEN


def test_how_many_cards_of_a_kind_are_free_today_is_no_other_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.EIGHT)
    accept(wanted(tmp_path), MatrixOfThisMachine())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    again = MatrixOfThisMachine()
    assert accept(wanted(tmp_path), again) is Ended.HELD
    assert again.runs == []


def test_another_card_or_driver_does_not_go_on_with_what_the_first_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    accept(wanted(tmp_path), MatrixOfThisMachine())
    smi.install(tmp_path, monkeypatch, [smi.gpu(driver_version="590.10")])
    with pytest.raises(InputError, match=r"gpus was .*580\.95.*, is .*590\.10") as caught:
        accept(wanted(tmp_path), MatrixOfThisMachine())
    assert "--run NAME" in caught.value.hint


def test_what_the_driver_cannot_run_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(driver_version="570.86.16")])
    matrix = MatrixOfThisMachine()
    accept(wanted(tmp_path), matrix)
    campaign = report_in(tmp_path / "results" / "gpu-acceptance").campaign
    assert campaign.about.environments == (PRODUCTION, "torch-2.10.0-cu128")
    assert "CUDA 13 needs 580" in campaign.left_out[NEWEST]


def test_an_engine_that_hands_out_no_gpu_ends_it_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles without the GPU would run all the same, and nothing after it."""
    facts = EngineFacts("28.0", cpus=8, runtimes=("runc",), cdi_devices=(), root_folder="/", free_bytes=None)

    class WithoutToolkit(StubRuntime):
        def obstacle(self, environment_name: str, environment: Environment) -> str:  # noqa: ARG002
            try:
                check_hands_out_gpus(environment_name, facts)
            except EnvironmentBuildError as error:
                return str(error)
            return ""

    smi.install(tmp_path, monkeypatch, smi.ONE)
    monkeypatch.setattr(command, "open_runtime", lambda *_, **__: WithoutToolkit())
    matrix = MatrixOfThisMachine()
    with pytest.raises(EnvironmentBuildError, match="containers get no GPU") as caught:
        accept(wanted(tmp_path), matrix)
    assert "nvidia-container-toolkit" in caught.value.hint
    assert matrix.runs == []


def test_of_two_environments_one_that_cannot_be_built_is_named_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    monkeypatch.setattr(command, "open_runtime", lambda *_, **__: StubRuntime(broken=(NEWEST,)))
    accept(wanted(tmp_path), matrix := MatrixOfThisMachine())
    assert matrix.runs[0] == "lowering"
    step = report_in(tmp_path / "results" / "gpu-acceptance").campaign.steps[StepName.PROBE]
    assert step.ended is Ended.NOT_SHOWN
    assert f"{NEWEST}: torch does not install; see the log" in step.lines


def test_a_full_card_ends_it_before_anything_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [{**smi.gpu(), "memory.used": "80000"}])
    matrix = MatrixOfThisMachine()
    with pytest.raises(EnvironmentBuildError, match="1559 of 81559 MB free"):
        accept(wanted(tmp_path), matrix)
    assert matrix.runs == []


def test_a_rehearsal_says_so_everywhere_and_shows_nothing_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)  # also where there is a GPU
    matrix = MatrixOfThisMachine()
    assert accept(wanted(tmp_path, rehearse=True), matrix) is Ended.NOT_SHOWN
    assert {asked.device for asked in matrix.asked} == {"cpu"}
    assert not any(asked.lower_only for asked in matrix.asked)
    assert {selector.partition("/")[0] for asked in matrix.asked for selector in asked.selectors} == {CPU}
    assert matrix.asked[-1].profile == "smoke"
    folder = tmp_path / "results" / "gpu-acceptance-rehearsal"
    report = report_in(folder)
    assert (report.rehearsal, report.warning) == (True, REHEARSAL)
    assert Ended.HELD not in {claim.ended for claim in report.claims}
    for name in ("acceptance.md", "acceptance.html"):
        assert REHEARSAL in (folder / "bundle" / name).read_text(encoding="utf-8")
    assert json.loads((folder / "bundle" / "run.json").read_bytes())["name"] == "cuda-rehearsal"
    printed = capsys.readouterr()
    assert REHEARSAL in printed.out
    assert REHEARSAL in printed.err


def test_a_rehearsal_is_not_published(tmp_path: Path) -> None:
    accept(wanted(tmp_path, rehearse=True), MatrixOfThisMachine())
    words = ["gpu-acceptance", "--matrix", str(MATRIX), "--results", str(tmp_path / "results"), "--publish"]
    done = CliRunner().invoke(cli, [*words, "--rehearse"])
    assert done.exception is not None and "it is a rehearsal" in str(done.exception)
    assert not (tmp_path / "results" / "reference").exists()
    nothing = CliRunner().invoke(cli, words)
    assert isinstance(nothing.exception, SelectionError)
