"""What torch's checks refuse in half precision is asked without them: of eager in a cell, and by the first check."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toto.inference.forecaster import TotoForecaster
from toto.model.util import KVCache

from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, Workload
from toto_compat.model.backbone import build_backbone
from toto_compat.model.bound import WholeModel, unchecked_distributions
from toto_compat.model.context_pass import Context
from toto_compat.model.first_check import first_difference
from toto_compat.model.series import Series
from toto_compat.model.static_model import StaticModel

pytestmark = pytest.mark.cell
ROOT = Path(__file__).parent.parent.parent
UNDER = Workload(model="base", context=(256, 512), horizon=(64,), batches=(1,), sampling=("1/1",), autocast="float16")
TRIAL = Trial(UNDER, CacheRequest(name="upstream", source="builtin"))


@pytest.fixture(scope="module", autouse=True)
def checked() -> Iterator[None]:
    """As in a process where nothing was compiled before: dynamo switches the distributions' own checks off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributions.Distribution, "_validate_args", True)
        yield


@pytest.fixture(scope="module")
def refused() -> tuple[WholeModel, Series]:
    """toto-ts as it is, and a series on which torch refuses the weights of its mixture."""
    model = WholeModel(build_backbone(UNDER, dtype=torch.float32, device="cpu"), KVCache, None)
    for seed in range(20):
        series = TRIAL.series(model.patch_size, 4, 1, seed_offset=seed)
        try:
            with torch.autocast("cpu", dtype=torch.float16):
                model.generate_mean(series, model.patch_size)
        except ValueError as error:
            assert "Simplex" in str(error)
            return model, series
    pytest.skip("this torch refuses none of twenty series; 2.13.0 does: `nox -s tests`")


def test_eager_in_a_cell_answers_what_torchs_check_refuses(refused: tuple[WholeModel, Series]) -> None:
    model, series = refused
    eager = TRIAL.eager()
    forecast = eager.generate_mean(series, model.patch_size)
    assert forecast.isfinite().all()
    with torch.autocast("cpu", dtype=torch.float16), unchecked_distributions():
        assert torch.equal(forecast, model.generate_mean(series, model.patch_size))
    assert torch.distributions.Distribution._validate_args


def test_the_first_check_of_a_service_does_not_raise_what_the_forecast_did_not(
    refused: tuple[WholeModel, Series],
) -> None:
    model, series = refused
    static = StaticModel(model.model, None)
    context = Context(series.inputs, series.padding_mask, series.id_mask)
    with torch.autocast("cpu", dtype=torch.float16):
        forecast = static.mean(context, static.patch_size)
        assert first_difference(static, context, forecast) is None
    assert torch.distributions.Distribution._validate_args


FORKED_AFTER_IT = """
import os
import torch
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, Workload

torch.set_num_threads(2)
trial = Trial(Workload(model="tiny", autocast="float16"), CacheRequest(name="upstream", source="builtin"))
assert trial.why_upstream_cannot_draw()
assert torch.get_num_threads() == 2
child = os.fork()
if not child:
    torch.ones(1 << 22).mul_(2.0)  # enough for both threads
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_that_has_asked_whether_upstream_can_draw_can_still_be_forked() -> None:
    # what has used OpenMP's threads leaves a fork of it waiting for them
    subprocess.run(
        [sys.executable, "-c", FORKED_AFTER_IT], check=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def test_single_precision_keeps_torchs_checks() -> None:
    eager = Trial(UNDER.model_copy(update={"model": "tiny", "autocast": None}), TRIAL.cache).eager()
    assert isinstance(eager, WholeModel) and isinstance(eager.forecaster, TotoForecaster)
    series = TRIAL.series(eager.patch_size, 8, 1)
    series.inputs[..., 0] = torch.nan
    with pytest.raises(ValueError, match="Expected parameter"):
        eager.generate_mean(series, eager.patch_size)
