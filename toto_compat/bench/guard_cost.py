"""What the guard adds to a forecast, in one fresh process of the torch environment: `python guard_cost.py <output>`.

Its parts are a few microseconds in a forecast of milliseconds, so they are not looked for in the difference of two
noisy times: the guard is run around a forecast that does nothing, many times, and the forecast is timed by itself.
Processor time is taken, which neighbours on the machine disturb least.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CALLS = 500  # per round
ROUNDS = 15


def run() -> dict[str, list[float]]:
    """Measure processor microseconds per call: of guard and switch alone, a tiny forecast compiled, one eager."""
    # here and not above: the host imports this module's name without torch
    import torch
    from toto.data.util.dataset import MaskedTimeseries
    from toto.inference.forecaster import Forecast, TotoForecaster

    from toto_compat.contract.request import CompileSettings, Workload
    from toto_compat.model.backbone import build_backbone
    from toto_compat.model.forecaster import compile_toto
    from toto_compat.model.series import make_series
    from toto_compat.production import Shadow, configure, guarded
    from toto_compat.production.configuration import Plan
    from toto_compat.production.switched import SwitchedForecaster

    torch.set_num_threads(1)
    workload = Workload(model="tiny")
    backbone = build_backbone(workload, dtype=torch.float32, device="cpu")
    patch = backbone.patch_embed.stride
    made = make_series(workload, patch_size=patch, context_patches=16, horizon_patches=10)
    series = MaskedTimeseries(
        made.inputs, made.padding_mask, made.id_mask, made.timestamp_seconds, made.time_interval_seconds, 0
    )
    answer = Forecast(mean=torch.zeros(1, 1, 320), samples=None)

    class Nothing:
        model = backbone

        def forecast(self, *_: Any, **__: Any) -> Forecast:
            return answer

    def microseconds(forecast: Any, calls: int) -> float:
        start = time.process_time()
        for _ in range(calls):
            forecast(series, 320)
        return (time.process_time() - start) / calls * 1e6

    with tempfile.TemporaryDirectory() as folder:
        env_file = Path(folder) / ".env.compile"
        env_file.write_text("export TOTO_DISABLE_COMPILE=0\n", encoding="ascii")
        old = time.time() - 60
        os.utime(env_file, (old, old))
        settled = configure(env_file)
        plan = Plan("fixed_size", "fixed_size", None, CompileSettings(), "bench")
        empty = SwitchedForecaster(TotoForecaster(backbone), Nothing(), settled, plan)
        service = guarded(empty, shadow=Shadow(share=0))
        compiled = compile_toto(backbone, mode="default", max_context=512, max_horizon=320, batch_sizes=(1,))
        eager = TotoForecaster(backbone)
        for one in (compiled, eager):
            microseconds(one.forecast, 2)
        times: dict[str, list[float]] = {"guard": [], "compiled": [], "eager": []}
        for _ in range(ROUNDS):
            around = microseconds(service.forecast, CALLS)
            times["guard"].append(around - microseconds(Nothing().forecast, CALLS))
            times["compiled"].append(microseconds(compiled.forecast, 5))
            times["eager"].append(microseconds(eager.forecast, 2))
        assert not service.fallen_back
        assert service.metrics.value("forecasts_total", path="compiled") == ROUNDS * CALLS
    return times


if __name__ == "__main__":
    taken = run()
    Path(sys.argv[1]).write_text(json.dumps(taken), encoding="utf-8")
    sys.stdout.write(f"{ {name: statistics.median(values) for name, values in taken.items()} }\n")
