"""Which release a log is of."""

import pytest

from toto_compat.logs.release_hint import release_hint


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
