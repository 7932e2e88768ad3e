"""Wrong bindings are seen, by what is wrong with them; honest ones raise no alarm."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import trial_of
from tests.cell.suites.equivalence import wrong_bindings as wrong
from toto_compat.cell.group import GroupResult
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import run_candidate
from toto_compat.cell.suites.equivalence.compare import run_compare, run_determinism
from toto_compat.cell.suites.equivalence.reference import run_reference
from toto_compat.contract.request import CellProfile, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import WholeModel

pytestmark = pytest.mark.cell

WORKLOAD = Workload(
    context_patches=(4, 6), horizon_patches=(9,), batches=(1, 2), samples=32, samples_per_batch=16, missing=0.05
)
PROFILE = CellProfile(iterations=2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("reference")
    run_reference(Session(trial_of("upstream", workload=WORKLOAD), PROFILE, work=work))
    return work


@pytest.fixture
def work(reference: Path, tmp_path: Path) -> Path:
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    return tmp_path


def compared(work: Path, binding: type[wrong.Honest]) -> SuiteEvidence:
    trial = trial_of("upstream", workload=WORKLOAD)
    eager = trial.eager()
    assert isinstance(eager, WholeModel)
    session = Session(trial, PROFILE, binding(eager), work=work)
    asked = run_candidate(session)
    left = GroupResult(measurements={Suite.EQUIVALENCE: asked.model_dump()})
    (work / "candidate.json").write_text(left.model_dump_json(), encoding="utf-8")
    return run_compare(session)


def worst(evidence: SuiteEvidence) -> tuple[float, str]:
    figure = evidence.figures["equivalence"]
    assert figure.value is not None, figure.missing
    return figure.value, figure.method


@pytest.mark.parametrize("binding", [wrong.Honest, wrong.RefusesAThread, wrong.DrawsOtherwise])
def test_an_honest_binding_is_equivalent(work: Path, binding: type[wrong.Honest]) -> None:
    value, method = worst(compared(work, binding))
    assert value <= 1.0, method


@pytest.mark.parametrize(
    ("binding", "seen_in"),
    [
        (wrong.AnswersByShape, "another series"),
        (wrong.RemembersTheLast, "again"),
        (wrong.SpoiltByAnException, "again_after_an_exception"),
        (wrong.SpoiltByABreak, "again_after_a_break"),
        (wrong.WrongInAThread, "again_in_a_thread"),
        (wrong.DrawsTooClose, "samples: spread"),
        (wrong.CopiesARound, "samples: rows and rounds"),
        (wrong.SamplesTheMean, "samples"),
        (wrong.ClaimsTotosDraws, "samples: seed for seed"),
    ],
)
def test_a_wrong_binding_is_seen_where_it_is_wrong(work: Path, binding: type[wrong.Honest], seen_in: str) -> None:
    evidence = compared(work, binding)
    value, _ = worst(evidence)
    assert value > 1.0
    red = [one for one in evidence.details["comparisons"] if one["ratio"] > 1.0]
    assert any(seen_in in f"{one['scenario']} {one['quantity']}" for one in red), red[:3]


def test_what_refused_a_thread_is_told(work: Path) -> None:
    assert "from the thread that made me" in compared(work, wrong.RefusesAThread).details["thread_refused"]


def test_every_kind_of_series_that_eager_can_forecast_is_compared(work: Path) -> None:
    evidence = compared(work, wrong.Honest)
    tried = {one["scenario"] for one in evidence.details["comparisons"]}
    assert {"constant", "large", "small", "one spike", "left padded", "not contiguous"} <= tried
    assert "rows with groups of their own" in tried
    assert set(evidence.details["without_a_reference"]) <= {"nan under the mask"}


def test_both_controls_are_seen(work: Path) -> None:
    figures = compared(work, wrong.Honest).figures
    for name in ("equivalence_control", "samples_control"):
        control = figures[name].value
        assert control is not None and control > 1.0


def test_eager_is_deterministic_and_a_forecast_with_a_memory_is_not(work: Path) -> None:
    for binding, exact in ((wrong.Honest, True), (wrong.RemembersTheLast, False)):
        compared(work, binding)
        session = Session(trial_of("upstream", workload=WORKLOAD), PROFILE, work=work)
        value = run_determinism(session).figures["determinism"].value
        assert value is not None
        assert (value == 0.0) is exact


def test_the_users_own_criteria_are_figures(work: Path) -> None:
    figures = compared(work, wrong.Honest).figures
    assert (figures["mae_delta"].value, figures["mae_to_eager"].value, figures["mae_sigma"].value) == (0.0, 0.0, 0.0)
    spoilt = compared(work, wrong.AnswersByShape).figures
    assert spoilt["mae"].value is not None
