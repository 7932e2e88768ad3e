"""The search finds a real change, looks at few places, and survives those that cannot be looked at."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toto_compat.releases.search import Found, NoChange, NothingToCompare, Probe, State, Step, Unseen, next_step

SKIP = "cannot be looked at"


def search(truth: Sequence[object], known: Sequence[int] = ()) -> tuple[Step, list[int]]:
    """Run the search against a row that answers; `known` places were looked at before it began."""
    states: list[State] = [Unseen.UNKNOWN] * len(truth)
    for place in known:
        states[place] = Unseen.SKIPPED if truth[place] == SKIP else truth[place]
    looked: list[int] = []
    while isinstance(step := next_step(states), Probe):
        assert states[step.at] is Unseen.UNKNOWN, "no place is looked at twice"
        looked.append(step.at)
        states[step.at] = Unseen.SKIPPED if truth[step.at] == SKIP else truth[step.at]
    return step, looked


def brute_force(truth: Sequence[object]) -> set[tuple[int, int]]:
    """Every pair of places that differ with nothing but skipped ones between them."""
    seen = [place for place, state in enumerate(truth) if state != SKIP]
    return {pair for pair in pairwise(seen) if truth[pair[0]] != truth[pair[1]]}


@given(length=st.integers(2, 200), data=st.data())
def test_one_flip_is_found_in_about_log2_looks(length: int, data: st.DataObject) -> None:
    flip = data.draw(st.integers(1, length - 1))
    step, looked = search(["good"] * flip + ["bad"] * (length - flip))
    assert step == Found(flip - 1, flip)
    assert len(looked) <= 2 + math.ceil(math.log2(length))


@given(truth=st.lists(st.sampled_from(["good", "bad", SKIP]), min_size=0, max_size=40), data=st.data())
def test_whatever_the_row_is_like_the_answer_is_one_that_a_look_at_every_place_confirms(
    truth: list[str], data: st.DataObject
) -> None:
    known = data.draw(st.sets(st.sampled_from(range(len(truth))))) if truth else set()
    step, looked = search(truth, sorted(known))
    assert not set(looked) & known
    seen = [place for place, state in enumerate(truth) if state != SKIP]
    match step:
        case Found(before, after, skipped, others):
            assert (before, after) in brute_force(truth)
            assert list(skipped) == list(range(before + 1, after))
            assert all(truth[place] == SKIP for place in skipped)
            assert all(truth[first] != truth[second] for first, second in others)
        case NoChange(first, last, unseen):
            assert (first, last) == (seen[0], seen[-1])
            assert truth[first] == truth[last]
            # what it did not look at is named: a change and its undoing can hide only there
            hidden = {place for pair in brute_force(truth) for place in pair} - {first, last}
            assert hidden <= set(unseen) | set(looked) | known
            assert all(truth[place] == truth[first] for place in {*looked, *known} if truth[place] != SKIP)
        case NothingToCompare():
            assert len(seen) < 2


@given(values=st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_a_figure_with_several_values_ends_at_two_neighbours_that_differ(values: list[int]) -> None:
    step, _ = search(values)
    if values[0] != values[-1]:
        assert isinstance(step, Found)
        assert step.after == step.before + 1 and values[step.before] != values[step.after]


@given(length=st.integers(3, 60), data=st.data())
def test_skipped_places_cost_two_looks_each_at_most_and_never_the_answer(length: int, data: st.DataObject) -> None:
    flip = data.draw(st.integers(1, length - 1))
    truth = ["good"] * flip + ["bad"] * (length - flip)
    broken = data.draw(st.sets(st.integers(0, length - 1), max_size=length))
    for place in broken:
        truth[place] = SKIP
    step, looked = search(truth)
    tried_in_vain = sum(truth[place] == SKIP for place in looked)
    # the look itself, and that the place beside it halves what is left less evenly
    assert len(looked) <= 2 + math.ceil(math.log2(length)) + 2 * tried_in_vain
    sides = {"good", "bad"} <= set(truth)
    assert isinstance(step, Found) is sides


def test_known_places_that_differ_spare_the_ends() -> None:
    step, looked = search(["good"] * 5 + ["bad"] * 5, known=[3, 6])
    assert step == Found(4, 5)
    assert set(looked) <= {4, 5}


def test_everything_known_needs_no_look_at_all() -> None:
    assert search(["good", "good", "bad"], known=[0, 1, 2]) == (Found(1, 2), [])


def test_evidence_of_one_side_alone_makes_it_look_at_the_other() -> None:
    step, looked = search(["good", "good", "bad", "bad"], known=[0])
    assert step == Found(1, 2)
    assert looked[0] == 3


def test_a_second_change_that_is_known_of_is_told() -> None:
    step, _ = search(["good", "bad", "bad", "good"], known=[0, 1, 3])
    assert isinstance(step, Found)
    assert (step.before, step.after, step.others) == (0, 1, ((1, 3),))


def test_places_that_could_not_be_looked_at_are_named_with_the_change() -> None:
    assert search(["good", SKIP, SKIP, "bad"])[0] == Found(0, 3, (1, 2))


@pytest.mark.parametrize("truth", [[], ["good"], [SKIP, SKIP], [SKIP, "bad", SKIP]])
def test_fewer_than_two_places_say_nothing(truth: list[str]) -> None:
    assert isinstance(search(truth)[0], NothingToCompare)
