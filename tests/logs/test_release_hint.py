"""Which release a log is of."""

import pytest

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.logs.release_hint import release_candidates, release_hint


@pytest.mark.parametrize(
    ("line", "release"), [(844, "2.5.1"), (964, "2.7.0"), (1358, "2.9.0"), (1994, "2.13.0"), (2061, "2.15.0")]
)
def test_the_line_of_the_limit_warning_names_the_release(line: int, release: str) -> None:
    hint = release_hint(f"torch/_dynamo/convert_frame.py:{line}", "recompile_limit")
    assert hint is not None
    assert (hint.release, hint.exact) == (release, True)


def test_without_a_known_line_the_wording_gives_a_range() -> None:
    old, new = release_hint("", "cache_size_limit"), release_hint("torch/_dynamo/guards.py:964", "recompile_limit")
    assert old is not None
    assert new is not None
    assert (old.release, old.exact) == ("2.6 or earlier", False)
    assert (new.release, new.exact) == ("2.7 or later", False)
    assert release_hint("torch/_dynamo/guards.py:844") is None


def logged(place: str, kind: EventKind = EventKind.RECOMPILE_LIMIT, limit_name: str = "recompile_limit") -> Event:
    return Event(kind=kind, severity=Severity.ERROR, logged_from=place, limit_name=limit_name)


def test_releases_that_log_from_the_same_lines_are_all_candidates_and_the_one_that_was_run_is_first() -> None:
    limit = logged("torch/_dynamo/convert_frame.py:1358")
    shape = logged("torch/fx/experimental/symbolic_shapes.py:6833", EventKind.DYNAMIC_SHAPE, "")
    assert [one.release for one in release_candidates([limit, shape])] == ["2.9.0", "2.9.1"]
    assert all(len(one.fits) == 2 and not one.contradicts for one in release_candidates([limit, shape]))


def test_a_line_that_only_one_patch_release_has_tells_them_apart() -> None:
    recompile = logged("torch/_dynamo/guards.py:3006", EventKind.RECOMPILE, "")
    both = release_candidates([logged("torch/_dynamo/convert_frame.py:964"), recompile])
    assert [(one.release, len(one.fits)) for one in both] == [("2.7.1", 2), ("2.7.0", 1)]


def test_a_line_of_another_statement_or_of_no_release_says_nothing() -> None:
    assert release_candidates([logged("torch/_dynamo/guards.py:3006", limit_name="")]) == []  # no limit is logged there
    assert release_candidates([logged("my/own.py:1358", limit_name="")]) == []


def test_two_releases_in_one_log_contradict_each_other_and_are_both_named() -> None:
    places = ("torch/_dynamo/convert_frame.py:1358", "torch/_dynamo/convert_frame.py:1994")
    mixed = release_candidates([logged(place) for place in places])
    assert {"2.9.0", "2.13.0"} <= {one.release for one in mixed}
    assert all(one.contradicts for one in mixed)


def test_the_wording_alone_leaves_a_range() -> None:
    old = release_candidates([logged("", limit_name="cache_size_limit")])
    assert {one.release for one in old} >= {"2.4.1", "2.6.0"}
    assert "2.7.0" not in {one.release for one in old}
    assert not any(one.fits for one in old)
