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


def test_the_readmes_model_of_ones_own_compiles_and_forecasts_as_eager_does(tmp_path: Path) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    blocks = readme.read_text(encoding="utf-8").split("```python\n")[1:]
    (example,) = [block.split("```")[0] for block in blocks if "def bind(" in block]
    path = tmp_path / "from_readme.py"
    path.write_text(example, encoding="utf-8")
    torch._dynamo.reset()
    series = make_series(WORKLOAD, patch_size=32, context_patches=4, horizon_patches=2)
    cache = CacheRequest(name="mine", source=f"{path}:MyModel")
    backbone = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    eager = bind(backbone, CacheRequest(name="upstream", source="builtin"))
    for spec in (None, CompileSpec(settings=UNLOWERED)):
        own = bind(backbone, cache, compile_spec=spec, max_patches=6, batch_sizes=(1,))
        assert own.compiled is (spec is not None)
        torch.testing.assert_close(own.generate_mean(series, 64), eager.generate_mean(series, 64))


def test_what_a_bound_model_lacks_is_named_before_a_suite_stumbles_over_it(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text(
        "class Half:\n"
        "    patch_size, cache_class, compiled, observer = 32, 'half', False, None\n"
        "    @classmethod\n"
        "    def bind(cls, backbone, **announced):\n"
        "        return cls()\n",
        encoding="utf-8",
    )
    backbone = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    lacking = "no draws, generate_mean, generate_samples, teacher_forced"
    with pytest.raises(InputError, match=lacking) as caught:
        bind(backbone, CacheRequest(name="half", source=f"{path}:Half"))
    assert caught.value.hint is not None and "README.md" in caught.value.hint
