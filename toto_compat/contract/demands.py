"""Whether a cell can still PASS, by what was measured so far."""

import math
from collections.abc import Mapping, Sequence

from toto_compat.contract.request import Demand
from toto_compat.contract.result import Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite


def broken_demand(demands: Sequence[Demand], evidence: Mapping[Suite, SuiteEvidence]) -> str:
    """Name the first demand that a measured figure breaks: 'recompiles is 22, limit <= 0'; '' if it can still PASS."""
    for demand in demands:
        measured = evidence.get(demand.suite)
        figure = measured.figures.get(demand.figure) if measured and measured.outcome is Outcome.MEASURED else None
        if figure is None or figure.value is None or figure.kind is not Kind.MEASURED or math.isnan(figure.value):
            continue
        if not demand.limit.admits(figure.value):
            return f"{demand.gate} is {figure.value:g}, limit {demand.limit.text}"
    return ""
