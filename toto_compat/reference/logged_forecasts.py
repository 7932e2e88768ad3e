"""Takes the forecasts of the recompile suite in a fresh process and counts nothing: torch's own log is what is left.

    TORCH_LOGS=recompiles,graph_breaks <python of an environment> logged_forecasts.py request.json

Run by an environment's interpreter. It knows nothing of the live observer, so that what is read from the log afterwards
is a second opinion on what that counted.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import symbolic_convert

from toto_compat.cell.quiet import QuietLock
from toto_compat.cell.suites.recompile_plan import PlannedForecast, plan_forecasts
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CellRequest, patches

BEGIN = "== forecast "


def take(trial: Trial, model: Any, planned: PlannedForecast) -> None:
    context, horizon = (patches(points, model.patch_size) for points in (planned.context, planned.horizon))
    series = trial.series(model.patch_size, context, horizon, batch=planned.batch, variates=planned.variates)
    if planned.samples:
        torch.manual_seed(trial.workload.seed)
        model.generate_samples(
            series, planned.horizon, num_samples=planned.samples, samples_per_batch=planned.per_batch
        )
    else:
        model.generate_mean(series, planned.horizon)


def log_repeated_breaks() -> None:
    """Up to 2.5 the log leaves out a break that it had before, later ones shorten it: have every one written."""
    checker = getattr(symbolic_convert, "graph_break_dup_warning_checker", None)
    if checker is not None:
        checker.add = lambda _key: True


def main(request_file: str) -> None:
    request = CellRequest.model_validate_json(Path(request_file).read_bytes())
    torch.set_num_threads(request.limits.threads)
    log_repeated_breaks()
    trial = Trial.of(request, QuietLock(None))
    model = trial.compiled(batch_sizes=trial.batch_sizes)
    for planned in plan_forecasts(trial.workload):
        print(f"{BEGIN}{planned.name}", file=sys.stderr, flush=True)  # noqa: T201 - between torch's lines, on their stream
        take(trial, model, planned)


if __name__ == "__main__":
    main(sys.argv[1])
