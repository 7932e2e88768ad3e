"""The comparison, where the candidate was never imported: its answers against upstream eager's, each with a limit.

A limit is what eager itself does: its distance to a float64 reference, on the inputs and on inputs moved by one unit in
the last place. The figure is the worst error over its limit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from scipy import stats
from torch import Tensor

from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import (
    AGAIN,
    BESIDE_ANOTHER_MODEL,
    HALF_A_PATCH_LESS,
    MANY,
    TOLD_NOTHING,
    TWO_AT_ONCE,
    WRITTEN_OVER,
    CandidateAsked,
    answers_file,
    samples_file,
)
from toto_compat.cell.suites.equivalence.comparison import Comparison, Errors, sizes_of
from toto_compat.cell.suites.equivalence.drawn import compare_samples, eagers_own
from toto_compat.cell.suites.equivalence.exchange import load_tensors
from toto_compat.cell.suites.equivalence.other_weights import OtherWeights
from toto_compat.cell.suites.equivalence.reference import Reference, load_references, quantities
from toto_compat.cell.suites.equivalence.scenarios import (
    Scenario,
    asked_of_nan,
    drawings_of,
    not_masked,
    of_other_weights,
    pair_of,
    series_of,
    what_is_asked,
)
from toto_compat.cell.switches import numerics
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest
from toto_compat.contract.result import Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.statistics import ratio_to_limit, relative_spread
from toto_compat.contract.suites import Group, Suite
from toto_compat.model.bound import BoundModel, WholeModel, unchecked_distributions

METHOD = (
    "distribution parameters under teacher forcing (upstream eager's own forecast fed to all) and the free-running "
    "mean forecast (each series and variate over its own size), RMSE to a float64 upstream-eager reference over twice "
    "the largest of eager's own, on these inputs and on inputs moved by one ulp (four times where these differ by more "
    "than a fifth: luck); one series again after another, after other shapes, after an exception, after a break, "
    "after and during a drawn number of forecasts, with the clocks a year on, after sampling, in a second thread, in "
    "the tensors of another, beside a second model, and as handed out before another was forecast, exactly; samples, "
    "then a mean of that second model, whose weights are others; in two threads at once; the "
    "caller's series and random state left alone; also with one thread more, with nothing announced, and by "
    "forecast() with its defaults; past the announced lengths an error is an answer, a wrong number is not; of NaN "
    "under the mask an answer is an error, NaN, eager's forecast with zeros there, or what eager makes of it without "
    "torch's checks; of NaN that is not masked an error, NaN, or what eager makes of it without these checks; "
    "samples by their places in the distributions that eager gives them, with one false alarm in a million cells, "
    "and without a seed never the same twice; worst ratio; NaN is "
    "infinite"
)
# Of what eager makes of NaN without torch's checks, over its size: rounding is far below, any other forecast far above.
ALIKE, ALIKE_IN_HALF_PRECISION = 1e-3, 0.1
# A compiled kernel adds in another order than eager does, which is as right as eager's: its error is one more draw of
# what eager's own errors are draws of. Over hundreds of roundings these agree to a few hundredths, and twice the
# largest is out of reach. Where a few roundings decide (one point of a level far from zero, a forecast of eight points)
# each is luck, and they differ: four times the largest of six is then exceeded by chance once in 1,500 comparisons of a
# single rounding, once in 50,000 of two (simulated; a test does it again). Wrong caches are hundreds of times off.
EAGERS_OWN_ERRORS, EAGERS_OWN_BY_LUCK = 2.0, 4.0
ALIKE_ERRORS = 1.2
# In the series' own units, each in those of its own series and variate; parameters are those of scaled values.
IN_UNITS_OF_THE_SERIES = ("mean_forecast", "forecast().mean")
CONTROL = CacheRequest(name="sabotaged:position_off_by_one", source="builtin")


def run_compare(session: Session) -> SuiteEvidence:
    """Compare all that the candidate answered, and prove on a sabotage that a wrong answer would have shown."""
    trial = session.trial
    asked = CandidateAsked.model_validate(session.measured(Suite.EQUIVALENCE, Group.CANDIDATE))
    references, answers = load_references(session.work), load_tensors(answers_file(session.work))
    first, other = pair_of(trial.workload)
    worth_asking = what_is_asked(session)
    scenarios = worth_asking.scenarios
    required = {scenario.name for scenario in scenarios if not scenario.may_lack_a_reference}
    missing = sorted(required - set(references))
    comparisons: list[Comparison] = []
    control: list[Comparison] = []
    for scenario in scenarios:
        if scenario.name in references:
            comparisons += compare_scenario(scenario, answers.get(scenario.name, {}), references[scenario.name], asked)
    if first.name in references:
        reference = references[first.name]
        own = answers.get(first.name, {})
        comparisons += compare_again(first, own, reference, asked)
        if any(one.other_weights and one.name in references for one in scenarios):
            shown = own.get("mean_forecast"), own.get(BESIDE_ANOTHER_MODEL)
            comparisons.append(_compare_repeated(first, BESIDE_ANOTHER_MODEL, *shown, reference))
        comparisons.append(_compared(first.name, "mean_forecast", own.get(TOLD_NOTHING), reference, asked=TOLD_NOTHING))
        control = compare_control(trial, first, reference)
    if other.name in references:
        theirs = answers.get(other.name, {})
        shown = theirs.get("mean_forecast"), theirs.get(WRITTEN_OVER)
        comparisons.append(_compare_repeated(other, WRITTEN_OVER, *shown, references[other.name]))
    eager = _whole(trial)
    comparisons += compare_not_masked(trial, eager, first, answers, asked)
    drawings, other_eager = worth_asking.drawings, None
    if of_other_weights(trial.workload).name in references and worth_asking.second_model:
        drawings, other_eager = (*drawings, *worth_asking.second_model), _whole(OtherWeights.of_trial(trial))
    own_draws = eagers_own(trial, drawings[0], eager) if drawings else {}
    drawn, draws_control, seen = compare_samples(
        session, eager, asked, drawings, own_of_the_first=own_draws, other_eager=other_eager
    )
    controls = [control] if session.no_samples else [control, draws_control]
    return SuiteEvidence(
        suite=Suite.EQUIVALENCE,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures={
            "equivalence": equivalence_figure([*comparisons, *drawn], controls, missing, session.no_samples),
            "equivalence_control": _control_figure(control, CONTROL.name, missing),
            "samples_control": _not_drawn(session.no_samples)
            if session.no_samples
            else _control_figure(draws_control, "eager's own draws, a little closer", []),
            **seen,
            **mae_figures(session, eager, answers.get(first.name, {}), own_draws, asked.draws),
        },
        details={
            "comparisons": [asdict(comparison) for comparison in (*comparisons, *drawn)],
            "control": [asdict(comparison) for comparison in (*control, *draws_control)],
            "without_a_reference": sorted({scenario.name for scenario in scenarios} - set(references)),
            "thread_refused": asked.thread_refused,
            "two_at_once_refused": asked.two_at_once_refused,
            "refused": asked.refused,
            "nan_refused": asked.nan_refused,
            "forecast_entry_point": "tried" if asked.has_forecaster else "the binding has no forecaster of toto-ts's",
            "draws": asked.draws,
            "samples": session.no_samples or "compared",
            "numerics": numerics(),
        },
        skipped=worth_asking.left_out,
    )


def _whole(trial: Trial) -> WholeModel:
    eager = trial.eager()
    assert isinstance(eager, WholeModel)
    return eager


# --- parameters and means ---------------------------------------------------------------------------------------------


def compare_scenario(
    scenario: Scenario, candidate: Mapping[str, Tensor], reference: Reference, asked: CandidateAsked
) -> list[Comparison]:
    """Compare what was answered; nothing of what was refused where that is allowed."""
    if scenario.through_forecast and not asked.has_forecaster:
        return []
    refused = scenario.may_be_refused and scenario.name in asked.refused
    answered = [name for name in reference.exact if name in candidate or not refused]
    if reference.unchecked is None:
        return [_compared(scenario.name, name, candidate.get(name), reference) for name in answered]
    return [compared_under_nan(scenario.name, name, candidate.get(name), reference) for name in answered]


def compare(scenario: str, candidate: Mapping[str, Tensor], reference: Reference) -> list[Comparison]:
    """Hold each quantity's error to the float64 reference against what eager's own noise allows."""
    return [_compared(scenario, name, candidate.get(name), reference) for name in reference.exact]


def _compared(
    scenario: str, name: str, candidate: Tensor | None, reference: Reference, *, asked: str = ""
) -> Comparison:
    error = _distance(name, candidate, reference) if candidate is not None else math.inf
    limit = _limit(name, reference)
    return Comparison(
        scenario=scenario,
        quantity=asked or name,
        error=error,
        limit=limit,
        ratio=ratio_to_limit(error, limit),
        to_eager=errors_between(candidate, reference.eager[name]) if candidate is not None else None,
        elements=reference.exact[name].numel(),
        told="" if candidate is not None else "the candidate gave no answer",
    )


def _distance(name: str, values: Tensor, reference: Reference) -> float:
    """RMSE to the float64 reference.

    The largest of thousands of rounding errors swings by itself, and a wrong value shows in RMSE all the same.
    """
    exact = reference.exact[name]
    if values.shape != exact.shape:
        return math.inf
    sizes = _sizes(name, exact)
    return errors_between(values.double() / sizes, exact / sizes).rmse


def _sizes(name: str, exact: Tensor) -> Tensor:
    """What errors are divided by before they are pooled: a variate of 1e7 would hide whatever is wrong in one of 1."""
    return sizes_of(exact) if name in IN_UNITS_OF_THE_SERIES else torch.ones_like(exact)


def _limit(name: str, reference: Reference) -> float:
    return allowed_beside([_distance(name, other[name], reference) for other in (reference.eager, *reference.nudged)])


def allowed_beside(eagers_own: Sequence[float]) -> float:
    """How far a right forecast may be off where eager is off by these."""
    largest = max(eagers_own)
    alike = largest <= ALIKE_ERRORS * min(eagers_own)
    return largest * (EAGERS_OWN_ERRORS if alike else EAGERS_OWN_BY_LUCK)


def compared_under_nan(scenario: str, name: str, candidate: Tensor | None, reference: Reference) -> Comparison:
    """NaN is as good as the error that eager raises. A number has to be eager's, of zeros there or unchecked."""
    assert reference.unchecked is not None
    exact, unchecked = reference.exact[name], reference.unchecked[name]
    limit = _limit(name, reference)
    if candidate is None or candidate.shape != exact.shape:
        error = math.inf
    else:
        numbers, sizes = candidate.isfinite(), _sizes(name, exact)
        allowed = [exact, unchecked] if torch.equal(numbers, unchecked.isfinite()) else [exact]
        scaled = (candidate / sizes)[numbers]
        error = min(errors_between(scaled, (one / sizes)[numbers]).rmse for one in allowed) if len(scaled) else 0.0
    return Comparison(scenario, name, error, limit, ratio_to_limit(error, limit), elements=exact.numel())


def compare_not_masked(
    trial: Trial, eager: BoundModel, first: Scenario, answers: Mapping[str, Mapping[str, Tensor]], asked: CandidateAsked
) -> list[Comparison]:
    """Judge what was answered to NaN that no mask hides, which upstream eager refuses: any other number is made up."""
    series = series_of(trial, first, eager.patch_size)
    limit = ALIKE_IN_HALF_PRECISION if trial.workload.in_half_precision else ALIKE
    compared = []
    for name, broken in not_masked(series, eager.patch_size).items():
        for what, ask in asked_of_nan(trial, broken, eager.patch_size).items():
            answer = answers.get(name, {}).get(what)
            if answer is None:
                error = 0.0 if f"{name}, {what}" in asked.nan_refused else math.inf
            elif not answer.isfinite().any():
                error = 0.0
            else:
                error = made_up(answer, _eagers_own_of_nan(eager, ask), broken.inputs.isnan().any(-1).cpu())
            compared.append(Comparison(name, what, error, limit, ratio_to_limit(error, limit)))
    return compared


def _eagers_own_of_nan(eager: BoundModel, ask: Callable[[BoundModel], Tensor]) -> Tensor | None:
    """Return what eager says once torch's checks are off, as compiling turns them off; None where it raises even so."""
    with unchecked_distributions():
        try:
            return ask(eager).double().cpu()
        except (RuntimeError, ValueError):
            return None


def made_up(answer: Tensor, own: Tensor | None, holds_nan: Tensor) -> float:
    """How far the numbers of an answer are from eager's own, over its size; infinite where eager has no number.

    Where eager raised, a series and variate that hold no NaN are let off: they have a right forecast.
    """
    numbers = answer.isfinite()
    if own is None:
        fits = answer.shape[:2] == holds_nan.shape
        return math.inf if not fits or bool((numbers.flatten(2).any(-1) & holds_nan).any()) else 0.0
    if answer.shape != own.shape or bool((numbers & ~own.isfinite()).any()):
        return math.inf
    return float(((answer - own).abs() / sizes_of(own.nan_to_num()))[numbers].max())


def compare_again(
    first: Scenario, answers: Mapping[str, Tensor], reference: Reference, asked: CandidateAsked
) -> list[Comparison]:
    """Hold later forecasts of the first series against its first one: nothing that came between may show.

    A second thread may be refused with an error. Where devices do not repeat exactly, the reference's limit holds.
    """
    forecast = answers.get("mean_forecast")
    compared = []
    for how in AGAIN:
        again = answers.get(how)
        if again is None and how == "again_in_a_thread" and asked.thread_refused:
            continue
        shown = forecast
        if how == HALF_A_PATCH_LESS and forecast is not None:
            shown = forecast[..., : forecast.shape[-1] - forecast.shape[-1] // first.horizon // 2]
        compared.append(_compare_repeated(first, how, shown, again, reference))
    compared.append(_compare_many(first, answers.get(MANY), reference))
    return [*compared, *_compare_at_once(first, answers.get(TWO_AT_ONCE), reference, asked)]


def _compare_repeated(
    scenario: Scenario, how: str, forecast: Tensor | None, again: Tensor | None, reference: Reference
) -> Comparison:
    """Hold a forecast against an earlier one that it must repeat exactly; where a device does not, to its limit."""
    if forecast is None or again is None:
        return Comparison(scenario.name, how, math.inf, 0.0, math.inf, told="no answer")
    error = errors_between(again, forecast).max
    if error and forecast.device.type != "cpu" and forecast.shape == reference.exact["mean_forecast"].shape:
        return _compared(scenario.name, "mean_forecast", again, reference)
    return Comparison(scenario.name, how, error, 0.0, ratio_to_limit(error, 0.0))


def _compare_at_once(
    first: Scenario, far: Tensor | None, reference: Reference, asked: CandidateAsked
) -> list[Comparison]:
    """Hold what two threads were answered at the same time against the same forecasts alone; both may be refused.

    Dynamo may run a function eager for one thread while it compiles for the other: both may round as far as is allowed.
    """
    if far is None or not len(far):
        refused = bool(asked.two_at_once_refused)
        return [] if refused else [Comparison(first.name, TWO_AT_ONCE, math.inf, 0.0, math.inf, told="no answer")]
    error = float(far.max()) if far.isfinite().all() else math.inf
    limit = 2.0 * _limit("mean_forecast", reference)
    return [Comparison(first.name, TWO_AT_ONCE, error, limit, ratio_to_limit(error, limit), told=f"{len(far)} of them")]


def _compare_many(first: Scenario, many: Tensor | None, reference: Reference) -> Comparison:
    """Hold every one of many forecasts of two series in turn against the first of its series."""
    if many is None or len(many) < 4 or not many.isfinite().all():
        return Comparison(first.name, MANY, math.inf, 0.0, math.inf, told="no answer, or not a finite one")
    series = many.unflatten(0, (-1, 2))
    error = float(((series[1:] - series[:1]) / sizes_of(series[:1])).abs().max())
    # a device that does not repeat exactly: eager's own noise
    limit = 0.0 if many.device.type == "cpu" else _limit("mean_forecast", reference)
    return Comparison(first.name, MANY, error, limit, ratio_to_limit(error, limit), told=f"{len(many)} forecasts")


def compare_control(trial: Trial, first: Scenario, reference: Reference) -> list[Comparison]:
    """The same for a cache that is wrong on purpose, eager: it must not pass."""
    model = trial.eager(CONTROL)
    series = series_of(trial, first, model.patch_size)
    truth = reference.truth.to(series.inputs.device)
    return compare(first.name, quantities(model, first, series, truth), reference)


def errors_between(values: Tensor, reference: Tensor) -> Errors:
    """Not a number anywhere is not a number everywhere, and counts as infinite later."""
    if values.shape != reference.shape:
        return Errors(math.inf, math.inf, math.inf, math.inf)
    difference = (values.double() - reference.double()).abs()
    magnitude = reference.double().abs().clamp_min(torch.finfo(torch.float32).tiny)
    return Errors(
        mae=float(difference.mean()),
        rmse=float(difference.square().mean().sqrt()),
        mape=float((difference / magnitude).mean()),
        max=float(difference.max()),
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def equivalence_figure(
    comparisons: Sequence[Comparison],
    controls: Sequence[Sequence[Comparison]],
    missing: Sequence[str] = (),
    no_samples: str = "",
) -> Figure:
    """The worst ratio; nothing without a reference, nor when a sabotage passed: then the comparison cannot see."""
    if missing:
        return missing_reference(missing)
    for control in controls:
        ratio = worst_ratio(control)
        if not ratio > 1.0:
            return Figure(
                value=None,
                missing=f"a positive control stayed within the limit ({ratio:.3g}): this comparison cannot tell a "
                "wrong forecast from a right one here",
            )
    worst = max(comparisons, key=lambda comparison: comparison.ratio)
    return Figure(
        value=worst.ratio,
        method=f"worst of {len(comparisons)} comparisons: {worst.quantity}, {worst.scenario}; "
        f"error {worst.error:.3g}, limit {worst.limit:.3g}{'; ' + worst.told if worst.told else ''}"
        + (f"; no samples among them: upstream eager cannot draw here ({no_samples})" if no_samples else ""),
    )


def _not_drawn(no_samples: str) -> Figure:
    """Nobody can be held to what upstream eager itself cannot do."""
    told = f"upstream eager cannot draw here: {no_samples}"
    return Figure(value=None, missing=told, does_not_apply=told)


def worst_ratio(comparisons: Sequence[Comparison]) -> float:
    return max((comparison.ratio for comparison in comparisons), default=0.0)


def _control_figure(control: Sequence[Comparison], name: str, missing: Sequence[str]) -> Figure:
    if not control:
        return missing_reference(missing or ["the first scenario"])
    return Figure(value=worst_ratio(control), kind=Kind.MEASURED, method=f"the same for {name}: must exceed 1")


def missing_reference(scenarios: Sequence[str]) -> Figure:
    return Figure(value=None, missing=f"upstream eager is not finite on {'; '.join(scenarios)}")


def mae_figures(
    session: Session, eager: WholeModel, answers: Mapping[str, Tensor], own_draws: Mapping[str, Tensor], draws: str
) -> dict[str, Figure]:
    """The user's own criteria: errors on held-out data, compiled against eager, and their spread over seeds."""
    trial = session.trial
    first = pair_of(trial.workload)[0]
    series = series_of(trial, first, eager.patch_size)
    held_out = series.truth.double().cpu()
    forecast = answers.get("mean_forecast")
    own = eager.generate_mean(series, held_out.shape[-1]).double().cpu()
    own_mae = float((own - held_out).abs().mean())
    if forecast is None or not math.isfinite(own_mae):
        return dict.fromkeys(("mae", "mae_delta", "mae_to_eager", "mae_sigma"), missing_reference([first.name]))
    mae = float((forecast - held_out).abs().mean())
    return {
        "mae": Figure(value=mae, method="of the mean forecast against the held-out truth"),
        "mae_delta": Figure(
            value=abs(mae - own_mae) / own_mae if own_mae else math.inf,
            method="difference of compiled's and eager's MAE on held-out data over eager's",
        ),
        "mae_to_eager": Figure(
            value=float((forecast - own).abs().mean()), method="mean absolute difference to eager's mean forecast"
        ),
        "mae_sigma": _mae_sigma(session, eager.patch_size, own_draws, draws),
    }


def _mae_sigma(session: Session, patch_size: int, own_draws: Mapping[str, Tensor], draws: str) -> Figure:
    """How much more the error of sampled forecasts swings over seeds than eager's does.

    Seed for seed eager's draws swing as eager's do. Draws of a stream of their own swing otherwise by chance alone, the
    more the fewer seeds there are: what one honest cell in a thousand would exceed is left out.
    """
    trial = session.trial
    if session.no_samples:
        return _not_drawn(session.no_samples)
    first = drawings_of(trial, session.profile.iterations)[0]
    drawn = load_tensors(samples_file(session.work)).get(first.scenario.name, {})
    series = series_of(trial, first.scenario, patch_size)
    held_out = series.truth[..., : trial.workload.horizon[0]].double().cpu()

    def mae(samples: Tensor) -> float:
        return float((samples.cpu().median(dim=-1).values - held_out).abs().mean())

    seeds = first.seeds
    if any(str(seed) not in drawn for seed in seeds):
        return Figure(value=None, missing="the candidate left no samples")
    theirs = relative_spread([mae(drawn[str(seed)]) for seed in seeds])
    own = relative_spread([mae(own_draws[str(seed)]) for seed in seeds])
    freedom = len(seeds) - 1
    chance = 1.0 if draws == "toto-ts" else math.sqrt(float(stats.f.ppf(0.999, freedom, freedom)))
    return Figure(
        value=max(0.0, theirs - chance * own) if math.isfinite(theirs) else math.inf,
        method=f"sigma / mean of the sampled forecast's MAE over {len(seeds)} seeds ({theirs:.3g}), beyond eager's own "
        f"({own:.3g}){f', {chance:.3g} times by chance' if chance > 1.0 else ''}",
    )
