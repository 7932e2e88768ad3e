"""The state of an acceptance: what it is about, and how each of its steps ended. A second start goes on from it."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toto_compat.contract.files import utc_now
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import InputError
from toto_compat.evidence.files import read_model, write_model

STATE_FILE = "state.json"
REHEARSAL = "REHEARSAL ON A CPU: nothing in here was measured on a GPU"


class Ended(StrEnum):
    """Says how a step or a claim ended."""

    HELD = "held"
    BROKEN = "broken"
    NOT_SHOWN = "not shown"  # what would show it did not come about here: a rehearsal, a suite that could not finish


class StepName(StrEnum):
    """In the order in which they are taken."""

    PROBE = "probe"
    LOWERING = "lowering"
    DEVICE = "device"
    SABOTAGES = "sabotages"
    PRODUCTION_CHECK = "production-check"
    CLAIMS = "claims"


class StepRecord(StrictModel):
    """Holds how a step ended, and what it has to say, a line each."""

    ended: Ended
    lines: tuple[str, ...] = ()
    started: str = ""
    finished: str = ""


class About(StrictModel):
    """Holds what an acceptance is about: a change of any of it makes its finished steps speak of something else."""

    rehearsal: bool
    gpus: tuple[str, ...] = ()  # name and driver of each kind
    architecture: str = ""  # of the GPUs
    environments: tuple[str, ...] = Field(min_length=1)  # production's first
    source_hash: str
    matrix_hash: str


class Campaign(StrictModel):
    """state.json."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    about: About
    started: str
    left_out: dict[str, str] = Field(default={})  # environments that this machine cannot run, and why
    steps: dict[StepName, StepRecord] = Field(default={})

    @property
    def is_finished(self) -> bool:
        return all(step in self.steps for step in StepName)

    @property
    def ended(self) -> Ended:
        """The worst of its steps."""
        found = {record.ended for record in self.steps.values()}
        return next((one for one in (Ended.BROKEN, Ended.NOT_SHOWN) if one in found), Ended.HELD)


def begin_or_resume(folder: Path, about: About, left_out: Mapping[str, str]) -> Campaign:
    """Read the campaign of this folder, or begin one; one about something else is refused."""
    state = folder / STATE_FILE
    if not state.exists():
        campaign = Campaign(about=about, started=utc_now(), left_out=dict(left_out))
        write_model(state, campaign)
        return campaign
    campaign = read_model(state, Campaign)
    before, now = campaign.about.model_dump(), about.model_dump()
    changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before[name] != now[name]]
    if changed:
        raise InputError(
            f"{state}: begun with something else: {'; '.join(changed)}",
            hint="--run NAME begins another acceptance; or delete that folder",
        )
    return campaign


def recorded(folder: Path, campaign: Campaign, step: StepName, record: StepRecord) -> Campaign:
    """Write down how a step ended, before anything else happens."""
    campaign = campaign.model_copy(update={"steps": {**campaign.steps, step: record}})
    write_model(folder / STATE_FILE, campaign)
    return campaign
