"""Puts the evidence of a cell together from what the processes of its groups left."""

from collections.abc import Iterable
from typing import Any

from toto_compat.cell.group import suite_function
from toto_compat.cell.group_process import Collected, GroupRun
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import Failure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite, suites_of


def gathered_evidence(request: CellRequest, collected: Collected, runs: list[GroupRun]) -> dict[Suite, SuiteEvidence]:
    """The evidence of every suite that was asked for; what several processes measured comes last, made of the rest."""
    evidence = {
        suite: evidence_of(suite, collected, runs) for suite in request.profile.suites if not suite.rule.combine
    }
    for suite in (suite for suite in request.profile.suites if suite.rule.combine):
        evidence[suite] = evidence_of(suite, collected, runs, of_others=evidence)
    touched = dict.fromkeys(one for result in collected.results.values() for one in result.changed)
    return {suite: without_value(evidence[suite], touched) for suite in request.profile.suites}


def without_value(evidence: SuiteEvidence, touched: Iterable[str]) -> SuiteEvidence:
    """Take the figures back where the candidate changed switches of torch: they are of settings nobody asked for."""
    told = "; ".join(touched)
    if not told:
        return evidence
    why = f"the candidate changed what the cell's settings leave alone: {told}"
    figures = {
        name: figure.model_copy(update={"value": None, "low": None, "high": None, "missing": why})
        for name, figure in evidence.figures.items()
    }
    return evidence.model_copy(update={"figures": figures, "details": {**evidence.details, "changed_switches": told}})


def evidence_of(
    suite: Suite, collected: Collected, runs: list[GroupRun], of_others: dict[Suite, SuiteEvidence] | None = None
) -> SuiteEvidence:
    """One suite's evidence from the processes that took part in it."""
    own = [run for run in runs if run.group in suite.rule.runners and (run.number == 1 or suite.rule.over_repeats)]
    repeats_skipped = {
        run.name: failure.message
        for run in own
        if run.number > 1 and (failure := collected.failures.get(run.name)) and failure.kind == "skipped"
    }
    planned, own = len(own), [run for run in own if run.name not in repeats_skipped]
    last_of_group = {group: suites_of(group)[-1] for group in suite.rule.runners}
    # a process that two suites share counts for the one it is there for: the last
    spent = [collected.seconds.get(run.name, 0.0) for run in own if last_of_group[run.group] is suite]
    seconds = round(sum(spent), 3)
    for run in own:
        left = collected.results.get(run.name)
        if left is not None and suite in left.evidence and may_tell(run.group, left.evidence[suite]):
            evidence = left.evidence[suite]
            return evidence if evidence.seconds else evidence.model_copy(update={"seconds": seconds})
        if left is not None and left.tells_of(suite):
            continue
        failure = collected.failures.get(run.name)
        if failure is None:
            failure = Failure(kind="interrupted", message=f"the {run.name} group was not reached or not finished")
            return SuiteEvidence(suite=suite, outcome=Outcome.NOT_RUN, failure=failure)
        outcome = Outcome.NOT_RUN if failure.kind in ("pointless", "skipped") else Outcome.ERROR
        return SuiteEvidence(suite=suite, outcome=outcome, failure=failure, seconds=seconds)
    if not suite.rule.combine:  # nothing but its references was asked for
        return SuiteEvidence(suite=suite, outcome=Outcome.NOT_RUN, seconds=seconds)
    measurements: dict[Group, list[dict[str, Any]]] = {}
    for run in own:
        measurements.setdefault(run.group, []).append(collected.results[run.name].measurements[suite])
    combined: SuiteEvidence = suite_function(suite.rule.combine)(measurements, of_others or {})
    repeats = next((f"{len(own)} of {planned} processes: {why}" for why in repeats_skipped.values()), "")
    skipped = "; ".join(filter(None, (repeats, combined.skipped)))
    return combined.model_copy(update={"seconds": seconds, "version": suite.rule.version, "skipped": skipped})


def may_tell(group: Group, evidence: SuiteEvidence) -> bool:
    """Say whether a group's evidence of a suite is its to give.

    All may tell that it went wrong there; what was measured comes from the last one that takes part, and from nobody
    where it is put together here: a candidate's process hands over what it was asked for, and no verdict on itself.
    """
    rule = evidence.suite.rule
    return evidence.outcome is not Outcome.MEASURED or (not rule.combine and group is list(rule.runners)[-1])
