"""fixed_size compiled for real: few graphs for all lengths and horizons, and toto-ts's own forecasts out of them."""

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")

from toto_compat.cell.live import CompilerWatch, Phase  # noqa: E402
from toto_compat.contract.events import EventKind  # noqa: E402
from toto_compat.contract.request import CacheRequest, Workload  # noqa: E402
from toto_compat.model.backbone import build_backbone  # noqa: E402
from toto_compat.model.binding import bind  # noqa: E402
from toto_compat.model.bound import BoundModel, CompileSpec  # noqa: E402
from toto_compat.model.series import Series, make_series  # noqa: E402

pytestmark = pytest.mark.cell

CONTEXTS = (16, 32, 48, 64)
HORIZONS = (10, 1, 5)
RELATIVE = 1e-9
# of a decode step: scaler, position, norm, rotation, write, attention over time, activation, head, draw; of each pass:
# scaler, norm, rotation, two of attention over time, activation, the newest, head
KERNELS = 9 + 2 * 8


def models(workload: Workload, mode: str = "default") -> tuple[BoundModel, BoundModel]:
    """Upstream eager and fixed_size compiled over one backbone of twelve layers, in double precision."""
    backbone = build_backbone(workload, dtype=torch.float64, device="cpu")
    spec = CompileSpec(mode=mode)
    upstream = bind(backbone, CacheRequest(name="upstream", source="builtin"))
    fixed = bind(
        backbone,
        CacheRequest(name="fixed_size", source="builtin"),
        compile_spec=spec,
        max_patches=CONTEXTS[-1] + 10,
        max_context=CONTEXTS[-1],
    )
    return upstream, fixed


def series_of(workload: Workload, patch_size: int, context: int, horizon: int) -> Series:
    series = make_series(workload, patch_size=patch_size, context_patches=context, horizon_patches=horizon)
    return series.to(dtype=torch.float64)


def distance(forecast: Any, truth: Any) -> float:
    return float((forecast - truth).abs().max() / truth.abs().max())


def compare_at(workload: Workload, pair: tuple[BoundModel, BoundModel], context: int, horizon: int) -> float:
    upstream, fixed = pair
    series = series_of(workload, fixed.patch_size, context, horizon)
    steps = horizon * fixed.patch_size
    return distance(fixed.generate_mean(series, steps), upstream.generate_mean(series, steps))


def test_few_graphs_of_few_kernels_serve_all_lengths_and_horizons_with_upstreams_forecast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    workload = Workload()
    pair = models(workload)
    distances: dict[tuple[int, int], float] = {}
    with CompilerWatch("warm-up") as watch:
        phases: list[Phase] = [watch.mark("first")]
        distances[CONTEXTS[0], HORIZONS[0]] = compare_at(workload, pair, CONTEXTS[0], HORIZONS[0])
        phases.append(watch.mark("after"))
        for context, horizon in [*((c, HORIZONS[0]) for c in CONTEXTS[1:]), *((CONTEXTS[0], h) for h in HORIZONS[1:])]:
            distances[context, horizon] = compare_at(workload, pair, context, horizon)
    first, after = phases
    assert first.graphs == 3  # the pass over the longest context, the pass over this one, the decode step
    assert first.count(EventKind.GRAPH_BREAK) == 0
    assert (after.graphs, len(after.compile_starts), after.count(EventKind.GRAPH_BREAK)) == (0, 0, 0)
    assert max(distances.values()) < RELATIVE
    if Version(torch.__version__) >= Version("2.13"):  # each costs the C++ compiler more than a second
        assert 1 <= len(list(tmp_path.rglob("*.main.so"))) <= KERNELS


def test_variates_in_groups_and_a_mode_of_its_own_compile_too() -> None:
    workload = Workload(batch=2, variates=3, groups=2)
    pair = models(workload, mode="reduce-overhead")
    assert compare_at(workload, pair, 16, 4) < RELATIVE
