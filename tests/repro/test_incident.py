"""An incident is matched by the fields it names, and a near miss says in what it differs."""

from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.observe.events import Event, EventKind, Severity
from toto_compat.repro.incident import (
    ExpectedEvent,
    Incident,
    describe_match,
    load_incident,
    match_event,
    match_incident,
)

INCIDENT = Path(__file__).parent.parent.parent / "incidents" / "2025-10-30-recompile-limit.yaml"
PRODUCTION = Event(
    kind=EventKind.RECOMPILE_LIMIT,
    severity=Severity.ERROR,
    function="positional_embedding",
    file="toto/model/attention.py",
    line=105,
    compile_id="6/8",
    reason="6/7: kv_cache._current_idx[7] == 0",
    normalised_reason="kv_cache._current_idx[N] == N",
    limit=8,
    logged_from="torch/_dynamo/convert_frame.py:1358",
)
RECOMPILE = Event(kind=EventKind.RECOMPILE, severity=Severity.WARNING, function="forward", reason="6/0: layer_idx == 0")


def changed(**fields: object) -> Event:
    return PRODUCTION.model_copy(update=fields)


def test_productions_own_event_matches_the_incident_that_ships() -> None:
    matches = match_incident(load_incident(INCIDENT), [RECOMPILE, PRODUCTION], "2.9.0+cu128")
    assert [match.holds for match in matches] == [True, True]


def test_torchs_source_line_is_expected_on_productions_release_only() -> None:
    newer = changed(logged_from="torch/_dynamo/convert_frame.py:1994")
    incident = load_incident(INCIDENT)
    assert all(match.holds for match in match_incident(incident, [newer], "2.13.0+cpu"))
    assert [match.holds for match in match_incident(incident, [newer], "2.9.0")] == [True, False]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (changed(function="forward"), "function: 'forward' here"),
        (changed(reason="6/7: kv_cache._current_idx[3] == 0"), "reason: '6/7: kv_cache._current_idx[3] == 0' here"),
        (changed(limit=256), "limit: 256 here"),
    ],
)
def test_what_differs_is_named(event: Event, said: str) -> None:
    (match, *_) = match_incident(load_incident(INCIDENT), [event], "2.13.0")
    assert not match.holds
    assert any(said in line for line in describe_match(match))


def test_no_such_event_at_all_is_said_plainly() -> None:
    (match, *_) = match_incident(load_incident(INCIDENT), [RECOMPILE], "2.13.0")
    assert describe_match(match)[-1].strip() == "no recompile_limit at all"


def test_the_nearest_event_is_the_one_that_differs_least() -> None:
    far = changed(function="forward", line=1, reason="x")
    near = changed(line=106)
    match = match_event(
        ExpectedEvent(kind=EventKind.RECOMPILE_LIMIT, function="positional_embedding", line=105), [far, near]
    )
    assert match.nearest == near


def test_too_few_is_not_enough() -> None:
    match = match_event(ExpectedEvent(kind=EventKind.RECOMPILE, at_least=2), [RECOMPILE])
    assert not match.holds
    assert "found only 1" in describe_match(match)[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema: 1\ntitle: x\n", "environment: Field required"),
        ("schema: 1\nexpect: []\n", "expect: Tuple should have at least 1 item"),
        ("a: [", "not valid YAML"),
        ("", "the file: Input should be"),
    ],
)
def test_a_file_that_is_no_incident_is_refused_with_the_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        load_incident(path)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_incident(tmp_path / "none.yaml")


def test_every_shipped_incident_is_valid() -> None:
    for path in INCIDENT.parent.glob("*.yaml"):
        assert isinstance(load_incident(path), Incident)
