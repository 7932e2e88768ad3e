"""Releases in version order, nothing said of one that was not run, and gaps that are named."""

import pytest

from toto_compat.verdict.judge import Status
from toto_compat.verdict.ranges import release_history

P, F, I = Status.PASS, Status.FAIL, Status.INCONCLUSIVE  # noqa: E741


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ({"2.13.0": P}, "good in 2.13.0"),
        ({"2.13.0": P, "2.14.0": I}, "good in 2.13.0 (not decided: 2.14.0)"),
        ({"2.10.0": P, "2.9.0": F, "2.11.0": P}, "fails in 2.9.0, good in 2.10.0 and 2.11.0"),
        ({"2.9.0": P, "2.10.0": P, "2.11.0": F}, "good in 2.9.0 and 2.10.0, regressed in 2.11.0"),
        ({"2.9.0": P, "2.10.0": F, "2.11.0": P}, "good in 2.9.0, regressed in 2.10.0, good again in 2.11.0"),
        ({"2.9.0": P, "2.10.0": I, "2.11.0": P}, "good in 2.9.0 and 2.11.0 (not decided: 2.10.0)"),
        ({"2.9.0": P, "2.13.0": P}, "good in 2.9.0 and 2.13.0 (not tried: 2.10, 2.11, 2.12 in between)"),
        ({"2.7.0": F, "2.8.0": F}, "fails in 2.7.0 and 2.8.0"),
        ({"2.7.0": I}, "no release decided (not decided: 2.7.0)"),
        ({"2.15.0rc1": F, "2.15.0": P}, "fails in 2.15.0rc1, good in 2.15.0"),
        ({f"2.{minor}.0": P for minor in range(7, 13)}, "good in 2.7.0 to 2.12.0 (6 releases)"),
    ],
)
def test_ranges_read_as_people_say_them(verdicts: dict[str, Status], text: str) -> None:
    assert release_history({release: [status] for release, status in verdicts.items()}).text == text


@pytest.mark.parametrize("statuses", [[P], [P, P], [P, F, P]])
def test_since_is_never_said(statuses: list[Status]) -> None:
    verdicts = {f"2.{minor}.0": [status] for minor, status in enumerate(statuses, start=9)}
    assert "since" not in release_history(verdicts, all_releases=["2.7.0", "2.15.0"]).text


def test_a_release_that_cannot_be_is_not_counted_up_to() -> None:
    history = release_history({"2.9.0": [P], "2.99999999999.0": [P]})
    assert history.untried == ()


def test_releases_of_the_matrix_that_were_not_run_are_named_with_their_place() -> None:
    matrix = ["2.7.0", "2.9.0", "2.11.0", "2.13.0", "2.15.0"]
    history = release_history({"2.9.0": [P], "2.13.0": [P]}, all_releases=matrix)
    assert history.text == (
        "good in 2.9.0 and 2.13.0 (not tried: 2.7.0 before, 2.10, 2.11.0, 2.12 in between, 2.15.0 after)"
    )


def test_a_release_tried_for_others_only_is_a_gap() -> None:
    history = release_history({"2.9.0": [P], "2.11.0": [P]}, all_releases=["2.9.0", "2.10.0", "2.9.1", "2.11.0"])
    assert history.untried == ("2.9.1", "2.10.0")


def test_the_worst_environment_speaks_for_its_release() -> None:
    history = release_history({"2.9.0": [P, F], "2.10.0": [P]})
    assert history.good_since == "2.10.0"
    assert history.ranges[0].verdict is F


def test_a_regression_is_a_failure_right_after_a_pass() -> None:
    assert release_history({"2.7.0": [F], "2.8.0": [P], "2.9.0": [F]}).regressed_in == ("2.9.0",)
    assert release_history({"2.7.0": [F], "2.8.0": [F]}).regressed_in == ()
