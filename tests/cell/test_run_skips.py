"""What a cell leaves out once it cannot PASS, and what it never leaves out."""

from pathlib import Path
from typing import Any

import pytest

from tests.cell.stand_in_groups import MODEL_FAILED, Groups, run
from toto_compat.cell.group import GroupResult
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import (
    Demand,
)
from toto_compat.contract.result import Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite, suites_of

NO_RECOMPILES = Demand(gate="recompiles", suite=Suite.RECOMPILE, figure="recompiles", limit=GateLimit(max=0))


def recompiled(value: float | None, *, kind: Kind = Kind.MEASURED, **left: Any) -> Groups:
    """A cell whose recompile suite counted so many."""
    figures = {"recompiles": Figure(value=value, kind=kind), "cold_compile_s": Figure(value=33.0)}
    evidence = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, figures=figures)
    return Groups(results={Group.OBSERVE: GroupResult(evidence={Suite.RECOMPILE: evidence}, **left)})


def test_a_cell_that_cannot_pass_skips_added_checks_and_names_them(tmp_path: Path) -> None:
    groups = recompiled(22)
    result = run(tmp_path, groups, repeats=3, demands=(NO_RECOMPILES,))
    assert groups.started == ["observe", "reference", "candidate", "compare", "speed", "cuda_lowering", "cudagraph"]
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
    assert groups.started[4:] == ["speed", "speed-2", "memory", "memory_reference", "cuda_lowering", "cudagraph"]
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
