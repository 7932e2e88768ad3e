"""A cell whose logs try to become part of the page."""

from tests.verdict.sample_cells import good_result, suite_error, with_events, with_suite
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.result import CellResult, Outcome
from toto_compat.contract.suites import Suite

HOSTILE = (
    "</script><script>alert('guard')</script><img src=x onerror=\"alert('image')\">"
    "<!--<script> ]]> {{ 7 * 7 }} \u2028 ' onmouseover=alert(1) &lt;b&gt;"
)


def hostile_cell() -> CellResult:
    """Every place that carries text from torch or the machine carries markup."""
    result = good_result(cache="upstream")
    events = [
        Event(
            kind=kind,
            severity=Severity.WARNING,
            function=HOSTILE,
            file=HOSTILE,
            line=1,
            reason=HOSTILE,
            stack=(HOSTILE,),
        )
        for kind in EventKind
    ]
    result = with_events(result, Suite.RECOMPILE, *events)
    result = with_suite(result, Suite.MEMORY, suite_error(Suite.MEMORY, Outcome.ERROR, HOSTILE))
    changed = result.provenance.model_copy(
        update={"cpu": HOSTILE, "host": HOSTILE, "packages": {HOSTILE: HOSTILE}, "system_packages": {HOSTILE: HOSTILE}}
    )
    return result.model_copy(update={"provenance": changed})
