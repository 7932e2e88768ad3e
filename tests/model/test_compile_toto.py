"""`compile_toto` as a user calls it: compiled for real, behind toto-ts's own forecaster."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toto.inference.forecaster import TotoForecaster  # noqa: E402

from tests.model.small_backbone import Small, agree, series_of, timeseries  # noqa: E402
from toto_compat import compile_toto  # noqa: E402
from toto_compat.contract.request import CompileSettings  # noqa: E402
from toto_compat.errors import InputError  # noqa: E402

pytestmark = pytest.mark.cell


class Wrapped:
    """What a Toto is to compile_toto: something whose `model` is the backbone."""

    def __init__(self, backbone: Any) -> None:
        self.model = backbone


def test_one_line_changed_gives_the_same_forecasts_compiled() -> None:
    backbone = Small().build()
    theirs = TotoForecaster(backbone)
    ours = compile_toto(theirs, mode="default", draws="toto-ts", max_context=48, max_horizon=40, batch_sizes=(2,))
    series = timeseries(series_of())
    assert ours.eager_because == ""
    means = [ours.forecast(series, 21).mean, ours.forecast(timeseries(series_of(context=6)), 40).mean]
    assert agree(means[0], theirs.forecast(series, 21).mean)
    assert agree(means[1], theirs.forecast(timeseries(series_of(context=6)), 40).mean)
    drawn = []
    for forecaster in (ours, theirs):
        torch.manual_seed(0)
        drawn.append(forecaster.forecast(series, 21, num_samples=4, samples_per_batch=1).samples)
    assert agree(*drawn)
    assert agree(means[0], theirs.forecast(series, 21).mean)  # still what it was: no replay wrote into it
    # 48 steps are 6 patches of 8, in a pass of 8; with 40 more they are 11, in a bucket of 16; the announced batch,
    # which the samples use as well; and toto-ts's random stream wants every patch of the context predicted
    assert sorted(map(str, ours._static._buckets)) == [
        "context pass for 8 patches, variates 2, series 1",
        "context pass for 8 patches, variates 2, series 1, predicting all",
        "decode step for batch 2, variates 2, capacity 16",
    ]


def test_a_toto_and_its_backbone_are_taken_alike() -> None:
    backbone = Small().build()
    assert compile_toto(Wrapped(backbone)).model is compile_toto(backbone).model is backbone


@pytest.mark.parametrize("cache", ["fixed_size", "compile_friendly"])
def test_without_a_mode_the_cache_is_used_eager(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)  # whoever calls it fails
    backbone = Small().build()
    series = timeseries(series_of())
    ours = compile_toto(backbone, cache=cache, mode=None)
    assert agree(ours.forecast(series, 16).mean, TotoForecaster(backbone).forecast(series, 16).mean)


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs torch 2.6 or later")
def test_other_caches_get_what_their_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marking is what counts here: it is watched, and the compiled call runs eager."""
    marked: list[int] = []
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda _tensor, dimension: marked.append(dimension))
    backbone = Small().build()
    forecaster = compile_toto(backbone, cache="upstream", mode="default", settings=CompileSettings(mark_dynamic=True))
    series = timeseries(series_of())
    with torch.compiler.set_stance("force_eager"):
        assert agree(forecaster.forecast(series, 16).mean, TotoForecaster(backbone).forecast(series, 16).mean)
    assert set(marked) == {2}


def test_only_fixed_size_takes_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cache_dir is of no use to cache upstream"):
        compile_toto(Small().build(), cache="upstream", cache_dir=tmp_path)


def test_a_folder_that_others_can_write_to_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(InputError, match="others can write to the folder"):
        compile_toto(Small().build(), cache_dir=tmp_path)
