"""A short campaign of `nox -s faults`: nothing is lost, nothing is left, every promise about files and codes holds."""

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.outcome import Campaign, Outcome, kind_of
from tests.faults.trial import CELLS, Damage, build_shim, promises, resumed, still_left, whole_cell

SEED = 18


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("faults")
    return Campaign(folder, build_shim(folder), SEED, moments=1)


def told(fault: str, campaign: Campaign) -> list[Outcome]:
    outcomes = list(FAULTS[fault](campaign))
    if why := next((one.not_run for one in outcomes if "can be mounted here" in one.not_run), ""):
        pytest.skip(why)
    tried = [outcome for outcome in outcomes if not outcome.not_run]
    assert tried
    return tried


@pytest.mark.parametrize(
    "fault",
    [
        "runner killed",
        "runner and supervisors killed",
        "cell killed",
        "supervisor killed",
        "disk full at one call",
        "disk full from a call on",
        "disk breaks at one call",
        "small disk",
        "limit on file size",
        "results read-only",
        "results gone",
        "results removed",
        "results slow",
        "clock jumps",
        "stored cell damaged",
        "stored references damaged",
        "run damaged",
        "stored cells of an older layout",
        "run of a later version",
        "two runners",
        "two runners, one name",
        "package index goes away",
    ],
)
def test_nothing_is_lost_by_a_fault(fault: str, campaign: Campaign) -> None:
    assert {outcome.moment: outcome.damage for outcome in told(fault, campaign) if outcome.damage} == {}


@pytest.mark.parametrize("fault", ["cell never ends", "cell floods its log", "cell takes all memory"])
def test_a_cell_that_misbehaves_costs_itself_alone(fault: str, campaign: Campaign) -> None:
    assert {outcome.moment: outcome.damage for outcome in told(fault, campaign) if outcome.damage} == {}


def test_a_torch_that_segfaults_at_import_is_told_as_a_crash(campaign: Campaign) -> None:
    outcomes = told("torch segfaults at import", campaign)
    assert [outcome.moment for outcome in outcomes] == ["seen by the probe", "in a cell"]
    assert [outcome.damage for outcome in outcomes] == [Damage(), Damage()]


@pytest.mark.slurm
def test_a_runner_killed_as_it_submits_to_slurm_loses_no_job(campaign: Campaign) -> None:
    (outcome,) = FAULTS["runner killed as it submits"](campaign)
    if outcome.not_run:
        pytest.skip(outcome.not_run)
    assert outcome.damage == Damage()


# --- the campaign can fail --------------------------------------------------------------------------------------------


def test_a_lost_cell_a_second_run_and_a_leftover_would_be_seen(campaign: Campaign) -> None:
    """Each is brought about by hand: a stored cell removed, a temporary file, a process, a half-written file."""
    with campaign.trial() as trial:
        assert trial.start().wait().code == 0
        assert trial.kept() == CELLS
        assert still_left(trial) == []
        gone = next(trial.cache.glob("evidence/??/*.json"))
        name = whole_cell(gone)
        gone.unlink()
        (trial.results / ".half-made.tmp").touch()
        damage = resumed(trial)
        assert damage.lost == (f"{name} was kept and is run again",)
        assert damage.left == ("results/.half-made.tmp",)
        half = next(trial.cache.glob("evidence/??/*.json"))
        half.write_bytes(half.read_bytes()[:100])
        assert trial.damaged_files() == [str(half.relative_to(trial.folder))]


def test_every_kind_of_call_is_tried_where_one_of_each_is_wanted(campaign: Campaign) -> None:
    many = Campaign(campaign.folder, campaign.shim, SEED, 20, _calls={"virtualenvs": list(campaign.calls())})
    calls = many.calls()
    drawn = many.one_of_each_kind("full", lambda call: call.startswith(("write ", "rename ")))
    tried = [kind_of(calls[number - 1]) for number in drawn]
    assert len(tried) == len(set(tried)) > 20
    assert set(tried) == {kind_of(call) for call in calls if call.startswith(("write ", "rename "))}
    assert "rename /c/evidence//.json" in tried


def test_moments_come_from_the_seed_and_are_spread_over_the_run(campaign: Campaign) -> None:
    calls = {"virtualenvs": list(campaign.calls())}
    again = Campaign(campaign.folder, campaign.shim, SEED, 20, _calls=calls)
    other = Campaign(campaign.folder, campaign.shim, SEED + 1, 20, _calls=calls)
    drawn = again.moments_of("runner")
    assert drawn == again.moments_of("runner") == sorted(set(drawn))
    assert len(drawn) == 20
    assert drawn != other.moments_of("runner")
    tenth = len(campaign.calls()) // 10
    assert drawn[0] <= tenth and drawn[-1] > len(campaign.calls()) - tenth


def test_a_traceback_and_an_undocumented_exit_code_are_broken_promises(campaign: Campaign) -> None:
    with campaign.trial() as trial:
        (trial.folder / "matrix.yaml").write_text("schema: 9\n", encoding="utf-8")
        ended = trial.start().wait()
        assert promises(ended, 3) == []
        [broken] = promises(ended, 0)
        assert broken.startswith("exit code 3 instead of 0")
