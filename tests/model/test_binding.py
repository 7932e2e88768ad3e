"""A cache of the user's own, with globals and files of its own, bound and compiled."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.cell

import torch  # noqa: E402

from tests.cell.small_trials import UNLOWERED  # noqa: E402
from toto_compat.contract.request import CacheRequest, Workload  # noqa: E402
from toto_compat.errors import InputError  # noqa: E402
from toto_compat.model.backbone import build_backbone  # noqa: E402
from toto_compat.model.binding import bind, load_user_cache  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.series import make_series  # noqa: E402

WORKLOAD = Workload()

CACHE = """
from toto.model.util import KVCache

import rounding_of_mine
from parts.scaling import SCALE

OFFSET = 0

def unchanged(tensor):
    return tensor * SCALE + OFFSET

class Mine(KVCache):
    def append(self, layer_idx, kv):
        keys, values = kv
        super().append(layer_idx, (unchanged(keys), rounding_of_mine.unrounded(values)))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").touch()
    (tmp_path / "parts" / "scaling.py").write_text("SCALE = 1\n", encoding="utf-8")
    (tmp_path / "rounding_of_mine.py").write_text("def unrounded(tensor):\n    return tensor + 0\n", encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text(CACHE, encoding="utf-8")
    return path


def test_a_users_cache_with_globals_and_helpers_compiles_and_forecasts_as_eager_does(mine: Path) -> None:
    torch._dynamo.reset()
    series = make_series(WORKLOAD, patch_size=32, context_patches=4, horizon_patches=2)
    cache = CacheRequest(name="mine", source=f"{mine}:Mine")
    backbone = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    compiled = bind(backbone, cache, compile_spec=CompileSpec(settings=UNLOWERED))
    eager = bind(backbone, CacheRequest(name="upstream", source="builtin"))
    torch.testing.assert_close(compiled.generate_mean(series, 64), eager.generate_mean(series, 64))
    assert compiled.cache_class.endswith(":Mine")


def test_a_file_that_does_not_import_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import a_module_that_nobody_has\n", encoding="utf-8")
    with pytest.raises(InputError, match="importing it failed"):
        load_user_cache(f"{path}:Mine")


def test_a_class_that_is_not_in_the_file_is_told(mine: Path) -> None:
    with pytest.raises(InputError, match="no class 'Yours'"):
        load_user_cache(f"{mine}:Yours")
