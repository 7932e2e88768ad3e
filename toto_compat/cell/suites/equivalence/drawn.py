"""The candidate's draws, judged where the candidate was never imported: by eager's distributions, and seed for seed."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from toto.inference.forecaster import Forecast

from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import (
    SAID_OF_SAMPLES,
    UNSEEDED,
    UNSEEDED_HELD,
    UNSEEDED_NEXT,
    CandidateAsked,
    drawn_by,
    samples_file,
    steps_drawn,
)
from toto_compat.cell.suites.equivalence.comparison import Comparison
from toto_compat.cell.suites.equivalence.exchange import load_tensors
from toto_compat.cell.suites.equivalence.samples import (
    Finding,
    drawn_closer,
    findings,
    findings_over_all,
    number_of_tests,
    places,
    seen_from,
)
from toto_compat.cell.suites.equivalence.scenarios import Drawing, series_of
from toto_compat.cell.trial import Trial
from toto_compat.contract.result import Figure, Kind
from toto_compat.contract.statistics import ratio_to_limit
from toto_compat.model.bound import WholeModel

CONTROL_MISSED = 1e-6  # of the positive control: eager's own draws, so much closer that chance hides it no more
MOST_SEED_FOR_SEED = 512  # samples that are also held against eager's own seed for seed, if they are said to be
_SAME_BY_CHANCE = 0.5  # of points drawn twice: in half precision many values are the same
_SAME_DRAWS = 0.9  # of the first patch, where a binding says that its seeds are toto-ts's: few draws flip by rounding


def compare_samples(
    session: Session,
    first_eager: WholeModel,
    asked: CandidateAsked,
    all_drawings: Sequence[Drawing],
    *,
    own_of_the_first: Mapping[str, Tensor],
    other_eager: WholeModel | None = None,
) -> tuple[list[Comparison], list[Comparison], dict[str, Figure]]:
    """Judge the candidate's draws by eager, and eager's own of the first drawing, a little closer, as the control that
    must not pass; those of a second model by eager of its weights, `other_eager`.

    The figures say how small a fault would have been seen.
    """
    trial = session.trial
    drawn = load_tensors(samples_file(session.work))
    drawings = [drawing for drawing in all_drawings if asked.has_forecaster or not drawing.scenario.through_forecast]
    families = len(drawings) + 1  # all of them together are one more
    compared: list[Comparison] = []
    control: list[Comparison] = []
    all_below: list[Tensor] = []
    for drawing in drawings:
        name = drawing.scenario.name
        eager = other_eager if drawing.scenario.other_weights and other_eager is not None else first_eager
        theirs = drawn.get(name, {})
        below = places_of(trial, drawing, eager, theirs)
        if drawing.scenario.other_weights and not _can_be_judged(trial, drawing, eager, families):
            continue
        compared += judged_draws(drawing, eager.patch_size, below, drawings=families)
        if below is not None:
            all_below.append(below)
        is_first = drawing is drawings[0]
        if _comes_seed_for_seed(drawing, asked) and below is not None:
            own = own_of_the_first if is_first else eagers_own(trial, drawing, eager)
            compared += [_seed_for_seed(name, theirs[seed], own[seed], eager.patch_size) for seed in own]
        if is_first:
            compared += compare_unseeded(name, theirs)
            control = _drawn_closer(trial, drawing, eager, own_of_the_first, families)
        if drawing.scenario.through_forecast and below is not None:
            compared += [one for seed in drawing.seeds for one in said_of_samples(trial, name, theirs, str(seed))]
        trial.quiet.give_way()
    figures = dict.fromkeys(
        ("samples_spread_seen", "samples_shift_seen"), Figure(value=None, missing="there are no samples to test")
    )
    if all_below:
        over_all = findings_over_all(all_below, drawings=families)
        points = sum(one.numel() for one in all_below)
        compared += _as_comparisons("all samples", over_all, points)
        figures = seen_figures(points, families)
    return compared, control, figures


def _can_be_judged(trial: Trial, drawing: Drawing, eager: WholeModel, families: int) -> bool:
    """Say whether eager's own draws of weights that nobody trained raise no alarm: they may be too large to be fed
    back in the model's precision."""
    own = places_of(trial, drawing, eager, eagers_own(trial, drawing, eager))
    return max(one.ratio for one in judged_draws(drawing, eager.patch_size, own, drawings=families)) <= 1.0


def compare_unseeded(scenario: str, drawn: Mapping[str, Tensor]) -> list[Comparison]:
    """Two draws without a seed between them: the second must be others, and the first must stay what it was."""
    then, held, following = (drawn.get(name) for name in (UNSEEDED, UNSEEDED_HELD, UNSEEDED_NEXT))
    if then is None or held is None or following is None or then.shape != following.shape:
        return [Comparison(scenario, "samples: without a seed", math.inf, 0.0, math.inf, told="no answer")]
    same = float((then == following).double().mean())
    moved = float((then - held).abs().max())
    return [
        Comparison(scenario, "samples: without a seed", same, _SAME_BY_CHANCE, ratio_to_limit(same, _SAME_BY_CHANCE)),
        Comparison(scenario, "samples: held", moved, 0.0, ratio_to_limit(moved, 0.0)),
    ]


def _comes_seed_for_seed(drawing: Drawing, asked: CandidateAsked) -> bool:
    """3,072 samples take upstream eager more than a minute, and their places need none of it."""
    return asked.draws == "toto-ts" and drawing.samples <= MOST_SEED_FOR_SEED


def eagers_own(trial: Trial, drawing: Drawing, eager: WholeModel) -> dict[str, Tensor]:
    """Upstream eager's own draws, by seed."""
    return {str(seed): drawn_by(eager, trial, drawing, seed=seed)[str(seed)].cpu() for seed in drawing.seeds}


def _drawn_closer(
    trial: Trial, drawing: Drawing, eager: WholeModel, own: Mapping[str, Tensor], families: int
) -> list[Comparison]:
    """Eager's draws, closer by a little more than what is always seen of so many."""
    below = places_of(trial, drawing, eager, own)
    assert below is not None
    share, _ = seen_from(below.numel(), number_of_tests(families), missed=CONTROL_MISSED)
    found = findings_over_all([drawn_closer(below, share)], drawings=families)
    return _as_comparisons(f"{drawing.scenario.name}, {share:.1%} closer", found, below.numel())


def places_of(trial: Trial, drawing: Drawing, eager: WholeModel, drawn: Mapping[str, Tensor]) -> Tensor | None:
    """The drawn points' places over all seeds; None of draws of another shape or not finite, which are no draws."""
    series = series_of(trial, drawing.scenario, eager.patch_size)
    shape = (*series.inputs.shape[:2], steps_drawn(trial, drawing, eager.patch_size), drawing.samples)
    found = []
    for seed in drawing.seeds:
        samples = drawn.get(str(seed))
        if samples is None or samples.shape != shape or not samples.isfinite().all():
            return None
        found.append(places(eager, series, samples.to(series.inputs.device), most_rows=drawing.judged_rows))
    return torch.cat(found)


def judged_draws(drawing: Drawing, patch_size: int, below: Tensor | None, *, drawings: int) -> list[Comparison]:
    """Every test of the draws' places, as comparisons."""
    name = drawing.scenario.name
    if below is None:
        return [Comparison(name, "samples", math.inf, 1.0, math.inf, told="no samples, or not finite ones")]
    batch = drawing.scenario.batch
    all_rows = below.shape[0] == drawing.samples * batch * len(drawing.seeds)
    tested = findings(
        below,
        patch_size=patch_size,
        series=batch,
        round_rows=drawing.per_batch * batch if all_rows else 0,
        drawings=drawings,
    )
    return _as_comparisons(name, tested, below.numel())


def _as_comparisons(scenario: str, tested: Sequence[Finding], points: int) -> list[Comparison]:
    return [
        Comparison(scenario, f"samples: {one.test}", one.ratio, 1.0, one.ratio, elements=points, told=one.told)
        for one in tested
    ]


def seen_figures(points: int, families: int) -> dict[str, Figure]:
    """How small a fault of the samples would have been seen: what a PASS says of them."""
    spread, shift = seen_from(points, number_of_tests(families))
    method = (
        f"over all {points} drawn points' normal scores, missed once in a thousand; by the number of tests and points, "
        "one false alarm in a million cells"
    )
    return {
        "samples_spread_seen": Figure(value=spread, unit="of the spread", kind=Kind.PREDICTED, method=method),
        "samples_shift_seen": Figure(value=shift, unit="of the spread", kind=Kind.PREDICTED, method=method),
    }


def said_of_samples(trial: Trial, scenario: str, drawn: Mapping[str, Tensor], seed: str) -> list[Comparison]:
    """Hold what a `Forecast` says of its samples, their mean for one, against the samples themselves."""
    samples = drawn[seed]
    rounding = samples.shape[-1] * torch.finfo(trial.dtype).eps * samples.abs().amax(dim=-1)
    limit = rounding.clamp_min(torch.finfo(torch.float32).tiny)
    themselves = Forecast(samples.mean(dim=-1), samples)
    compared = []
    for name, said in SAID_OF_SAMPLES.items():
        told, right = drawn.get(f"{seed}.{name}"), said(themselves)
        fits = told is not None and told.shape == right.shape
        ratio = float(((told - right).abs() / limit).max()) if fits else math.inf
        compared.append(Comparison(scenario, f"samples: {name}", ratio, 1.0, ratio_to_limit(ratio, 1.0)))
    return compared


def _seed_for_seed(scenario: str, samples: Tensor, own: Tensor, patch_size: int) -> Comparison:
    """The share of the first patch's draws that are toto-ts's own under the same seed."""
    first, theirs = samples[:, :, :patch_size], own[:, :, :patch_size]
    spread = theirs.std(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    share = float((((first - theirs).abs() / spread) < 1e-2).double().mean())
    error, limit = 1.0 - share, 1.0 - _SAME_DRAWS
    return Comparison(
        scenario, "samples: seed for seed", error, limit, ratio_to_limit(error, limit), elements=first.numel()
    )
