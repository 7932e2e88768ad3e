"""Two runs of one seed in one process: what differs between them is no forecast but chance."""

import math
from collections.abc import Sequence

from torch import Tensor

from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import answers_file, drawn_by, samples_file
from toto_compat.cell.suites.equivalence.compare import missing_reference
from toto_compat.cell.suites.equivalence.exchange import load_tensors
from toto_compat.cell.suites.equivalence.scenarios import Drawing, Scenario, drawings_of, pair_of, series_of
from toto_compat.cell.trial import Trial
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel


def run_determinism(session: Session) -> SuiteEvidence:
    """Find the largest difference between two runs of one seed in one process; nothing where eager differs itself."""
    trial = session.trial
    drawing = next(iter(drawings_of(trial, session.profile.iterations)), None)
    first = pair_of(trial.workload)[0]
    answers = load_tensors(answers_file(session.work)).get(first.name, {})
    drawn = load_tensors(samples_file(session.work)).get(first.name, {})
    eager = _eager_twice(trial, trial.eager(), first, drawing)
    twice = [(answers.get("mean_forecast"), answers.get("again"))]
    if drawing is not None:
        twice.append((drawn.get(str(drawing.seeds[0])), drawn.get("again")))
    compiled = _largest(twice)
    if not math.isfinite(eager):
        figure = missing_reference([first.name])
    elif eager != 0.0:
        figure = Figure(value=None, missing=f"upstream eager differs from itself by {eager:.3g} on this device")
    else:
        samples = "and samples" if drawing is not None else f"(no samples: {session.no_samples})"
        method = f"largest absolute difference, mean forecast {samples}, two runs with one seed"
        figure = Figure(value=compiled, method=method)
    return SuiteEvidence(
        suite=Suite.DETERMINISM,
        outcome=Outcome.MEASURED,
        method="two runs, one seed, one process",
        figures={"determinism": figure},
        details={"largest_difference": {"eager": eager, "compiled": compiled}},
    )


def _eager_twice(trial: Trial, model: BoundModel, first: Scenario, drawing: Drawing | None) -> float:
    series = series_of(trial, first, model.patch_size)
    means = [model.generate_mean(series, first.horizon * model.patch_size) for _ in range(2)]
    twice: list[tuple[Tensor | None, Tensor | None]] = [(means[0], means[1])]
    if drawing is not None:
        seed = drawing.seeds[0]
        samples = [drawn_by(model, trial, drawing, seed=seed)[str(seed)] for _ in range(2)]
        twice.append((samples[0], samples[1]))
    return _largest(twice)


def _largest(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> float:
    differences = [
        float((one - other).abs().max()) if one is not None and other is not None else math.inf for one, other in pairs
    ]
    return math.inf if any(map(math.isnan, differences)) else max(differences)
