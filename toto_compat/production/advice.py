"""What a kind of compiler event means for a Toto forecast, and what to do about it: read from advice.toml."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import Field

from toto_compat.contract.events import EventKind
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.torch_messages import SEVERITIES


class Advice(StrictModel):
    """Says why events of a kind with such a reason happen, and what to do."""

    match: str = ""  # searched for in the normalised reason
    since: str = ""  # the first torch release it holds for, '' for all before `until`
    until: str = ""  # the last one
    cause: str = Field(min_length=1)
    fix: str = Field(min_length=1)

    @property
    def releases(self) -> str:
        """Say in words which releases it holds for."""
        if self.since and self.until:
            return f"torch {self.since} to {self.until}"
        if self.since:
            return f"torch {self.since} and later"
        return f"torch up to {self.until}" if self.until else "every release"

    def holds_for(self, release: str) -> bool:
        """Tell whether it may hold for a release, '' being one that is not known."""
        if not release:
            return True
        version = _minor(release)
        return (not self.since or _minor(self.since) <= version) and (not self.until or version <= _minor(self.until))


class KindGuide(StrictModel):
    """Says how to read one kind of line."""

    title: str = Field(min_length=1)
    line: str = Field(min_length=1)  # as a log has it
    read: str = Field(min_length=1)
    advice: tuple[Advice, ...] = Field(min_length=1)


@cache
def guides() -> Mapping[EventKind, KindGuide]:
    """Read everything that advice.toml says, by kind."""
    document = tomllib.loads(files("toto_compat.production").joinpath("advice.toml").read_text(encoding="utf-8"))
    return {EventKind(kind): KindGuide.model_validate(guide) for kind, guide in document.items()}


def advice_for(kind: EventKind, normalised_reason: str, release: str = "") -> Advice:
    """Find the advice for a group of events, in a log of a torch release where that is known."""
    return next(
        advice
        for advice in guides()[kind].advice
        if advice.holds_for(release) and re.search(advice.match, normalised_reason)
    )


def guide_page() -> str:
    """Write how to read each kind of line, as Markdown: docs/log-lines.md."""
    parts = [
        "# How to read each kind of log line\n\n"
        "`toto-compat analyze LOG...` finds these lines under any logging prefix, groups them by function and reason, "
        "and prints the advice that fits. This page is made from the same file, "
        "`toto_compat/production/advice.toml`:\n`toto-compat analyze --kinds > docs/log-lines.md`."
    ]
    for kind, guide in guides().items():
        parts.append(f"## {guide.title} (`{kind}`, {SEVERITIES[kind]})\n\n```\n{guide.line}\n```\n\n{guide.read}")
        rows = [
            f"| {_cell(f'`{one.match}`') if one.match else 'any other'} | {one.releases} | {_cell(one.cause)} "
            f"| {_cell(one.fix)} |"
            for one in guide.advice
        ]
        parts.append("\n".join(["| reason | holds for | cause | what to do |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _minor(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)
