"""Upstream eager's own answers: what a right forecast is, and how far eager itself strays from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from toto_compat.cell.kept import ANSWERS_PLACE, TRUTHS_PLACE
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.exchange import Tensors, load_tensors, save_tensors
from toto_compat.cell.suites.equivalence.kinds import NAN_UNDER_THE_MASK
from toto_compat.cell.suites.equivalence.other_weights import OtherWeights
from toto_compat.cell.suites.equivalence.scenarios import (
    Scenario,
    all_scenarios,
    as_a_user_gives_it,
    series_of,
    steps_a_user_asks_for,
    threads_of,
    with_zeros_under_the_mask,
)
from toto_compat.cell.trial import Trial
from toto_compat.contract.strict_model import StrictModel
from toto_compat.model.bound import BoundModel, unchecked_distributions
from toto_compat.model.forecaster import forecaster_of
from toto_compat.model.series import Series

Part = Callable[[BoundModel, Scenario, Series, Tensor], dict[str, Tensor]]

# Another seed each: a null of one draw would be as good as luck. Many rows hang on many roundings, and three do, unless
# one row is far larger than the rest: then four times the largest of four is exceeded once in 260 of one rounding.
NUDGES = (0, 1, 2, 3, 4)
_NUDGES_OF_MANY_ROWS = 3
_FEW_ROWS = 16


class ReferenceMade(StrictModel):
    """Says which scenarios have a reference; upstream eager itself is not finite on the others."""

    scenarios: tuple[str, ...]
    not_finite: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    """Upstream eager on one scenario: its float64 truth, its own forecast, and itself on nudged inputs."""

    truth: Tensor  # eager's own mean forecast: the values fed to everybody under teacher forcing
    exact: Mapping[str, Tensor]
    eager: Mapping[str, Tensor]
    nudged: tuple[Mapping[str, Tensor], ...]
    # of NaN under the mask: what eager makes of it without torch's checks of distributions, which compiling turns off
    unchecked: Mapping[str, Tensor] | None = None

    @property
    def finite(self) -> bool:
        """Tell whether there is something to compare with: a limit that is not finite would decide by itself."""
        return all(
            bool(tensor.isfinite().all())
            for tensors in (self.exact, self.eager, *self.nudged)
            for tensor in tensors.values()
        )


class NotFiniteError(Exception):
    """Upstream eager itself is not finite there: no fault of the candidate, and nothing to compare it with."""


def truths_file(work: Path) -> Path:
    """Name the file of what is fed under teacher forcing; the candidate may read it."""
    return work / TRUTHS_PLACE


def references_file(work: Path) -> Path:
    """Name the file of the right answers; it is not there while the candidate runs."""
    return work / ANSWERS_PLACE


def run_reference(session: Session) -> ReferenceMade:
    """Ask upstream eager every scenario and leave its answers in two files."""
    trial = session.trial
    eager, exact = trial.eager(), trial.eager(dtype=torch.float64)
    truths: Tensors = {}
    answers: Tensors = {}
    not_finite: list[str] = []
    for scenario in all_scenarios(trial):
        if scenario.other_weights:  # the last one
            other = OtherWeights.of_trial(trial)
            eager, exact = other.eager(), other.eager(dtype=torch.float64)
        try:
            reference = reference_on(trial, eager, exact, scenario)
        except NotFiniteError:
            not_finite.append(scenario.name)
            continue
        truths[scenario.name] = {"truth": reference.truth}
        parts = {"exact": reference.exact, "eager": reference.eager}
        parts |= {f"nudged{number}": nudged for number, nudged in enumerate(reference.nudged)}
        parts |= {"unchecked": reference.unchecked} if reference.unchecked is not None else {}
        answers[scenario.name] = {
            f"{part}:{name}": _as_short(values) for part, named in parts.items() for name, values in named.items()
        }
        trial.quiet.give_way()
    save_tensors(truths_file(session.work), truths)
    save_tensors(references_file(session.work), answers)
    return ReferenceMade(scenarios=tuple(truths), not_finite=tuple(not_finite))


def run_reference_once(session: Session) -> ReferenceMade:
    """Do the same for a suite that shares the process with the one before it."""
    if references_file(session.work).exists():
        return ReferenceMade(scenarios=(), not_finite=())
    return run_reference(session)


def load_references(work: Path) -> dict[str, Reference]:
    """Read back what `run_reference` left."""
    truths = load_tensors(truths_file(work))
    references = {}
    for scenario, named in load_tensors(references_file(work)).items():
        parts: dict[str, dict[str, Tensor]] = {}
        for key, values in named.items():
            part, _, name = key.partition(":")
            parts.setdefault(part, {})[name] = values.double()
        nudged = tuple(parts[name] for name in sorted(parts) if name.startswith("nudged"))
        truth = truths[scenario]["truth"]
        references[scenario] = Reference(truth, parts["exact"], parts["eager"], nudged, parts.get("unchecked"))
    return references


def _as_short(values: Tensor) -> Tensor:
    """Single precision where that loses nothing: what a float32 model said takes half the room."""
    single = values.float()
    return single if single.double().equal(values) else values


def reference_on(trial: Trial, eager: BoundModel, exact: BoundModel, scenario: Scenario) -> Reference:
    """Upstream eager on a scenario; of NaN under the mask, on the same series with zeros there."""
    asked = series_of(trial, scenario, eager.patch_size)
    series = with_zeros_under_the_mask(asked) if scenario.kind == NAN_UNDER_THE_MASK else asked
    with threads_of(scenario):
        truth = eager.generate_mean(series, scenario.horizon * eager.patch_size)
        if not truth.isfinite().all():  # fed back, it would make torch's distributions raise
            raise NotFiniteError(scenario.name)
        reference = Reference(
            truth=truth,
            exact=quantities(exact, scenario, series.to(dtype=torch.float64), truth.double()),
            eager=quantities(eager, scenario, series, truth, mean=truth),
            nudged=_nudged(eager, scenario, series, truth),
        )
        if not reference.finite:
            raise NotFiniteError(scenario.name)
        if series is asked:
            return reference
        with unchecked_distributions():
            return replace(reference, unchecked=quantities(eager, scenario, asked, truth))


def _nudged(eager: BoundModel, scenario: Scenario, series: Series, truth: Tensor) -> tuple[dict[str, Tensor], ...]:
    """Upstream eager on nudged inputs. Few rows take as long as one: then all nudges are rows of one batch."""
    rows = len(series.inputs)
    many = rows * len(NUDGES) > _FEW_ROWS
    moved = [series.nudged(1, seed=seed) for seed in (NUDGES[:_NUDGES_OF_MANY_ROWS] if many else NUDGES)]
    if scenario.through_forecast or many:
        return tuple(quantities(eager, scenario, one, truth) for one in moved)
    joined = Series(**{name: torch.cat([getattr(one, name) for one in moved]) for name in vars(series)})
    answers = quantities(eager, scenario, joined, truth.repeat(len(NUDGES), 1, 1))
    return tuple(
        {
            # what was gathered over decode steps has them before its rows
            name: values.narrow(int(name.startswith("decode.")), number * rows, rows).contiguous()
            for name, values in answers.items()
        }
        for number in range(len(NUDGES))
    )


def quantities(
    model: BoundModel, scenario: Scenario, series: Series, truth: Tensor, *, mean: Tensor | None = None
) -> dict[str, Tensor]:
    """All that is compared on one scenario; a mean forecast of whole patches that is known is not asked for again."""
    asked = parts_of(scenario)
    answers: dict[str, Tensor] = {}
    if mean is not None and _mean_forecast in asked and scenario.points(model.patch_size) == mean.shape[-1]:
        asked, answers = asked[1:], {"mean_forecast": mean.double()}
    return answers | {name: values for part in asked for name, values in part(model, scenario, series, truth).items()}


def parts_of(scenario: Scenario) -> tuple[Part, ...]:
    """How a scenario is asked: each on its own, since one may be refused and another answered.

    The mean first: what is fed under teacher forcing is eager's, and would be a right answer to it.
    """
    if scenario.other_weights:
        return (_mean_forecast,)
    return (_by_forecast,) if scenario.through_forecast else (_mean_forecast, _parameters)


def _parameters(model: BoundModel, _scenario: Scenario, series: Series, truth: Tensor) -> dict[str, Tensor]:
    """Parameters of the first forward and of the decode steps."""
    steps = model.teacher_forced(series, truth)
    compared: dict[str, Tensor] = {}
    for name in steps[0]:
        compared[f"forward.{name}"] = steps[0][name].double()
        if len(steps) > 1:
            compared[f"decode.{name}"] = torch.stack([step[name] for step in steps[1:]]).double()
    return compared


def _mean_forecast(model: BoundModel, scenario: Scenario, series: Series, _truth: Tensor) -> dict[str, Tensor]:
    return {"mean_forecast": model.generate_mean(series, scenario.points(model.patch_size)).double()}


def _by_forecast(model: BoundModel, scenario: Scenario, series: Series, _truth: Tensor) -> dict[str, Tensor]:
    """The mean that `forecast()` returns by default."""
    given, steps = as_a_user_gives_it(series, model.patch_size), steps_a_user_asks_for(scenario, model.patch_size)
    forecast = forecaster_of(model).forecast(given, steps)
    return {"forecast().mean": forecast.mean.double()}
