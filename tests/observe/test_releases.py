"""The table of what torch renamed."""

import pytest

from toto_compat.observe.releases import (
    compile_start_argument,
    config_name,
    cudagraph_skip_artifact,
    graph_break_text,
    limit_exception,
    limit_text,
    release_hint,
    resume_counter,
)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.4.1", "cache_size_limit"),
        ("2.6.0+cu124", "cache_size_limit"),
        ("2.7.0", "recompile_limit"),
        ("2.13.0+cpu", "recompile_limit"),
        ("2.15.0.dev20260101", "recompile_limit"),
    ],
)
def test_the_recompile_limit_has_the_name_of_its_release(version: str, name: str) -> None:
    assert config_name("recompile_limit", version) == name
    assert limit_text(version).endswith(name)


def test_a_setting_that_a_release_lacks_has_no_name() -> None:
    assert config_name("fail_on_recompile_limit_hit", "2.5.1") == ""


def test_releases_compare_as_numbers_not_as_text() -> None:
    assert resume_counter("2.9.1") == "inline_call"
    assert resume_counter("2.11.0") == "resumes"
    assert compile_start_argument("2.7.1") == ""
    assert compile_start_argument("2.10.0") == "CallbackArgs"


def test_wordings_change_at_their_release() -> None:
    assert graph_break_text("2.5.1") == "Graph break: from user code at:"
    assert graph_break_text("2.6.0") == "Graph break in user code at"
    assert limit_exception("2.6.0") == "RecompileLimitExceeded"
    assert cudagraph_skip_artifact("2.9.0") == "perf_hints"


def test_an_unreadable_version_is_refused() -> None:
    with pytest.raises(ValueError, match="nightly"):
        config_name("recompile_limit", "nightly")


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
