"""A service's process for `test_kept_across_processes.py`: one bucket, and what it had to compile for it.

Run as a file: FOLDER, then where to write the answer.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from tests.model.small_backbone import Small
from toto_compat.model.buckets import DrawShape
from toto_compat.model.forecaster import compile_toto

FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main(folder: str, answer: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    before = dict(os.environ)
    forecaster = compile_toto(
        Small().build(torch.float32), mode="default", max_context=40, max_horizon=8, cache_dir=folder
    )
    draws = forecaster._static._take(DrawShape(variates=1), announced=True)
    ones = torch.ones(1, 8, draws.module.df.shape[-1])
    draws.module.begin((5 * ones, ones, ones, ones / ones.shape[-1]), torch.ones(1, 8), torch.ones(1, 8), points=8)
    draws.module.uniforms.fill_(0.25)
    found = {
        "graphs compiled": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
        "graphs found": counters["inductor"]["fxgraph_cache_hit"],
        "folders changed": [name for name in FOLDERS if os.environ.get(name) != before.get(name)],
        "draws": draws.run()[:8].tolist(),
    }
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
