"""What production's log of 2025-10-30 shows, as an event."""

from toto_compat.contract.events import Event, EventKind, Severity

LIMIT_HIT = Event(
    kind=EventKind.RECOMPILE_LIMIT,
    severity=Severity.ERROR,
    function="positional_embedding",
    file="toto/model/attention.py",
    line=105,
    compile_id="6/8",
    reason="6/7: kv_cache._current_idx[7] == 0",
    limit=8,
)
