"""The advice file: valid, complete, true to the parser, and the page made from it."""

import re
from pathlib import Path

import pytest

from toto_compat.cli import COMMANDS
from toto_compat.contract.events import EventKind
from toto_compat.logs.parse import parse_lines
from toto_compat.matrix.gates import Gate
from toto_compat.production.advice import Advice, advice_for, guide_page, guides

ROOT = Path(__file__).parent.parent.parent


def all_advice() -> list[Advice]:
    return [advice for guide in guides().values() for advice in guide.advice]


def test_every_kind_has_advice_and_no_advice_is_for_another() -> None:
    assert set(guides()) == set(EventKind)


@pytest.mark.parametrize("kind", list(EventKind))
def test_every_reason_of_a_kind_gets_advice_whatever_the_release(kind: EventKind) -> None:
    last = guides()[kind].advice[-1]
    assert (last.match, last.since, last.until) == ("", "", "")
    for release in ("", "2.5.1", "2.15.0"):
        assert advice_for(kind, "", release).fix
        assert advice_for(kind, "anything at all", release).cause


@pytest.mark.parametrize("kind", list(EventKind))
def test_no_advice_hides_behind_an_earlier_one(kind: EventKind) -> None:
    conditions = [(advice.match, advice.since, advice.until) for advice in guides()[kind].advice]
    assert len(set(conditions)) == len(conditions)
    assert ("", "", "") not in conditions[:-1]


@pytest.mark.parametrize("kind", list(EventKind))
def test_the_example_of_a_kind_is_read_as_that_kind(kind: EventKind) -> None:
    (event,) = parse_lines([guides()[kind].line], "log")
    assert event.kind is kind


def test_patterns_compile_and_releases_are_releases() -> None:
    for advice in all_advice():
        re.compile(advice.match)
        assert all(re.fullmatch(r"\d\.\d+", release) for release in (advice.since, advice.until) if release)


def test_advice_follows_the_release_of_the_log() -> None:
    old = advice_for(EventKind.CUDAGRAPH_SKIP, "incompatible op x", "2.7.0")
    new = advice_for(EventKind.CUDAGRAPH_SKIP, "incompatible op x", "2.9.0")
    assert (old.releases, new.releases) == ("every release", "torch 2.9 and later")


def test_advice_names_only_commands_and_gates_that_exist() -> None:
    for advice in all_advice():
        for quoted in advice.fix.split("`")[1::2]:
            program, *words = quoted.split()
            assert (
                (program, words[:2]) == ("nox", ["-s", "matrix"])
                or (program == "toto-compat" and words[0] in COMMANDS)
                or program in set(Gate)
            ), quoted


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "log-lines.md").read_text(encoding="utf-8")
    assert page == guide_page(), "toto-compat analyze --kinds > docs/log-lines.md"
