"""A service's process for `test_kept_across_processes.py`: its first forecasts, and what it had to compile for them.

Run as a file: FOLDER, then where to write the answer.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from toto.data.util.dataset import MaskedTimeseries

from tests.model.small_backbone import Small
from toto_compat.model.forecaster import compile_toto

FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main(folder: str, answer: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    before = dict(os.environ)
    forecaster = compile_toto(
        Small().build(torch.float32), mode="default", max_context=40, max_horizon=16, batch_sizes=(4,), cache_dir=folder
    )
    values = torch.sin(torch.arange(40.0)).view(1, 40)
    series = MaskedTimeseries(
        values,
        torch.ones_like(values, dtype=torch.bool),
        torch.zeros_like(values, dtype=torch.int),
        torch.zeros_like(values, dtype=torch.int),
        torch.ones(1, dtype=torch.int),
        0,
    )
    torch.manual_seed(7)
    mean = forecaster.forecast(series, 16).mean
    samples = forecaster.forecast(series, 16, num_samples=8, samples_per_batch=4).samples
    found = {
        "buckets": sorted(str(shape) for shape in forecaster._static._buckets),
        "graphs compiled": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
        "graphs found": counters["inductor"]["fxgraph_cache_hit"],
        "folders changed": [name for name in FOLDERS if os.environ.get(name) != before.get(name)],
        "forecasts": [mean.flatten().tolist(), samples.flatten().tolist()],
        "stepped aside": forecaster.stepped_aside,
    }
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
