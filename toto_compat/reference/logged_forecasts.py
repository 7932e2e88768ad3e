"""Takes the forecasts of the recompile suite in a fresh process and counts nothing: torch's own log is what is left.

    TORCH_LOGS=recompiles,graph_breaks <python of an environment> logged_forecasts.py request.json

Run by an environment's interpreter. It knows nothing of the live observer, so that what is read from the log afterwards
is a second opinion on what that counted.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from toto_compat.contract.request import CellRequest, patches

BEGIN = "== forecast "  # written between torch's lines


def take(trial: Any, model: Any, planned: Any) -> None:
    """Take one forecast as the recompile suite takes it."""
    # here and not above: the host reads the top of this file without torch
    import torch

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
    # torch, see above
    from torch._dynamo import symbolic_convert

    checker = getattr(symbolic_convert, "graph_break_dup_warning_checker", None)
    if checker is not None:
        checker.add = lambda _key: True


def log_branches() -> None:
    """Up to 2.5 a branch on a tensor's value is told in dynamo's own log alone: have it written among the breaks."""
    # torch, see above
    import torch

    if torch.__version__ >= (2, 6):  # which write it there themselves
        return

    def is_branch(record: logging.LogRecord) -> bool:
        return record.getMessage() == "generic_jump triggered compile"

    breaks = logging.StreamHandler()
    breaks.setFormatter(logging.Formatter("[__graph_breaks] Graph break: %(message)s"))
    breaks.addFilter(is_branch)
    log = logging.getLogger("torch._dynamo.symbolic_convert")
    log.addFilter(lambda record: is_branch(record) or record.levelno >= logging.WARNING)  # not every instruction
    log.addHandler(breaks)
    log.setLevel(logging.DEBUG)


def main(request_file: str) -> None:
    # torch, see above
    import torch

    from toto_compat.cell.quiet import QuietLock
    from toto_compat.cell.suites.recompile_plan import plan_forecasts
    from toto_compat.cell.trial import Trial

    request = CellRequest.model_validate_json(Path(request_file).read_bytes())
    torch.set_num_threads(request.limits.threads)
    log_repeated_breaks()
    log_branches()
    trial = Trial.of(request, QuietLock(None))
    model = trial.compiled(batch_sizes=trial.batch_sizes)
    for planned in plan_forecasts(trial.workload):
        sys.stderr.write(f"{BEGIN}{planned.name}\n")
        sys.stderr.flush()
        take(trial, model, planned)


if __name__ == "__main__":
    main(sys.argv[1])
