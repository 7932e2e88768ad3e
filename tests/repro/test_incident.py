"""An incident is matched by the fields it names, and a near miss says in what it differs."""

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.errors import InputError
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.incident import (
    ExpectedEvent,
    Incident,
    check_names,
    describe_match,
    is_like,
    load_incident,
    match_event,
    match_incident,
)
from toto_compat.repro.schema import schema_command

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
        ("schema: 1\ntitle: x\n", "1: environment: found nothing; accepted name of the environment in matrix.yaml"),
        ("schema: 1\nexpect: []\n", "2: expect: found an empty list; accepted at least 1 of them"),
        ("schema: 1\ndate: 2025-10-30\n", '2: date: found 2025-10-30 (a date); accepted text in quotes: "2025-10-30"'),
        ("schema: 1\ntitel: x\n", "did you mean title?"),
        ("schema: 1\nexpect:\n- kind: recompil\n", "3: expect[0].kind: found 'recompil'; accepted "),
        ("schema: 1\nexpect:\n- kind: recompil\n", "did you mean recompile?"),
        ("schema: 1\nworkload:\n  modell: tiny\n", "3: workload.modell: found an unknown key; "),
        ("a: [", "1: found broken YAML"),
        ("", "1: found an empty file"),
        ("just text", "1: found 'just text'; accepted a mapping with schema, title, "),
    ],
)
def test_a_file_that_is_no_incident_is_refused_with_line_key_and_nearest_name(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        load_incident(path)
    assert "accepted a value" not in caught.value.message
    assert "incidents/" in caught.value.hint


def test_a_key_written_twice_is_refused_and_not_decided_by_the_last(tmp_path: Path) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(INCIDENT.read_text().replace("cache: list_index\n", "cache: list_index\ncache: fixed_size\n"))
    with pytest.raises(InputError, match="cache: found the key a second time"):
        load_incident(path)


@pytest.mark.parametrize("torch", ["2.x", "2.9", ">=2.9", "2.9.0+cu128"])
def test_a_release_that_no_torch_can_have_is_refused(tmp_path: Path, torch: str) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(INCIDENT.read_text().replace('torch: "2.9.0"', f'torch: "{torch}"'))
    with pytest.raises(InputError, match=re.escape(f"expect[1].torch: found {torch!r}; accepted the one exact")):
        load_incident(path)


def test_a_missing_file_a_folder_and_a_binary_are_input_errors_with_a_hint(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path / "none.yaml", "does not exist"),
        (tmp_path, "is a folder, not a file"),
        (binary, "not UTF-8 text"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            load_incident(path)
        assert "incidents/" in caught.value.hint


def test_every_shipped_incident_is_valid() -> None:
    for path in INCIDENT.parent.glob("*.yaml"):
        assert isinstance(load_incident(path), Incident)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "expect:\n",
            "gates:\n- gate: latency_stabilty\nexpect:\n",
            "gates[0].gate: found 'latency_stabilty'; accepted ",
        ),
        ("expect:\n", "gates:\n- gate: latency_stabilty\nexpect:\n", "did you mean latency_stability?"),
        ("expect:\n", "gates:\n- gate: symbol_speedup\nexpect:\n", "about series named with --data; accepted "),
        (
            "expect:\n",
            "gates:\n- gate: mae_delta\nexpect:\n",
            "gates[0].limit: found nothing; accepted a limit, such as",
        ),
        ("expect:\n", "gates:\n- {gate: speedup, figure: {min: 2, max: 1}}\nexpect:\n", "min must not be above max"),
        ("expect:\n", "gates:\n- {gate: speedup, predicted_by: [cudagraph]}\nexpect:\n", "what CUDA graphs do"),
        ("expect:\n", "gates:\n- {gate: speedup, needs: gpu}\nexpect:\n", "gates[0].needs: found 'gpu'; accepted cuda"),
        ("    limit: 8\n", "    limit: 8\n    at_least: 3\n    at_most: 2\n", "expect[0].at_most: found 2 (a number)"),
        ("    limit: 8\n", "    limit: 8\n    at_least: 0\n", "found 0 without at_most"),
        (
            "expect:\n",
            "raised:\n- {error_like: '*', suite: symbols}\nexpect:\n",
            "raised[0].suite: found 'symbols', which",
        ),
        ("expect:\n", "raised:\n- {error_like: '*', predicted_by: [cudagraph]}\nexpect:\n", "nobody predicts an error"),
        ("settings: {}\n", "settings: {}\nsuites: [recompil]\n", "did you mean recompile?"),
        ("mode: reduce-overhead\n", "mode: reduce_overhead\n", "did you mean reduce-overhead?"),
    ],
)
def test_what_cannot_be_expected_is_told_with_line_key_and_nearest_name(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(INCIDENT.read_text().replace(old, new))
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        load_incident(path)
    assert re.search(re.escape(str(path)) + r":\d+: ", caught.value.message)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "environment: torch-2.9.0-cu128\n",
            "environment: torch-2.9.0-cu126\n",
            "environment: found 'torch-2.9.0-cu126', which matrix.yaml has not; accepted torch-2.13.0-cpu, ",
        ),
        ("cache: list_index\n", "cache: list_idx\n", "did you mean list_index?"),
        ("cache: list_index\n", "cache: sabotaged:stale_value\n", "did you mean sabotaged:stale_values?"),
    ],
)
def test_a_name_that_the_matrix_does_not_have_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = tmp_path / "incident.yaml"
    text = INCIDENT.read_text().replace(old, new)
    path.write_text(text)
    line = text.splitlines().index(new.rstrip()) + 1
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        check_names(path, load_matrix(INCIDENT.parent.parent / "matrix.yaml"))
    assert f"{path}:{line}: " in caught.value.message


def test_an_incident_that_was_written_from_data_is_read_back_the_same(tmp_path: Path) -> None:
    for shipped in sorted(INCIDENT.parent.glob("*.yaml")):
        incident = load_incident(shipped)
        path = tmp_path / shipped.name
        path.write_text(yaml.safe_dump(incident.model_dump(mode="json", by_alias=True)))
        assert load_incident(path) == incident


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("mutated inputs (*", "mutated inputs (8 instances)", True),
        ("mutated inputs (*", "no mutated inputs (8 instances)", False),
        ("*_current_idx[*] == 0", "6/7: kv_cache._current_idx[7] == 0", True),
        ("*_current_idx[*] == 0", "6/7: kv_cache._current_idx[7] == 1", False),
        ("a.c", "abc", False),
        ("ab*ba", "aba", False),
        ("*a*b*", "xbxa", False),
        ("*", "", True),
        ("", "x", False),
    ],
)
def test_a_star_stands_for_anything_and_nothing_else_is_special(pattern: str, text: str, fits: bool) -> None:
    assert is_like(pattern, text) is fits


def test_a_pattern_made_to_be_slow_is_not() -> None:
    assert not is_like("*a" * 2000 + "*c", "a" * 20_000)


def test_every_shipped_incident_carries_the_editor_hint_and_the_schema_is_what_the_command_prints() -> None:
    for path in INCIDENT.parent.glob("*.yaml"):
        assert path.read_text().splitlines()[0] == "# yaml-language-server: $schema=./incident.schema.json"
    printed = CliRunner().invoke(schema_command, ["--incident"])
    again = "write it anew: toto-compat schema --incident > incidents/incident.schema.json"
    assert (INCIDENT.parent / "incident.schema.json").read_text() == printed.output, again
    assert {"pins", "gates", "variables", "suites"} <= set(json.loads(printed.output)["properties"])


def test_a_name_that_is_too_long_for_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nnn\.yaml: cannot be read: File name too long"):
        load_incident(tmp_path / f"{'n' * 300}.yaml")


def test_a_file_that_nobody_wrote_by_hand_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "incident.yaml"
    path.write_text(f"{INCIDENT.read_text(encoding='utf-8')}# {'x' * 3_000_000}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"incident\.yaml: 3 MB, larger than any incident"):
        load_incident(path)
