"""The tables against the torch that is installed: what they say of that release is what it does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from toto_compat.environments.torch_sources.defaults import (  # noqa: E402
    Expression,
    default_releases,
    defaults_of,
    known,
    torch_defaults,
)
from toto_compat.environments.torch_sources.log_lines import known as known_lines  # noqa: E402
from toto_compat.environments.torch_sources.log_lines import log_lines_of  # noqa: E402
from toto_compat.environments.torch_sources.variables import installed_sources  # noqa: E402

pytestmark = pytest.mark.cell

RELEASE = torch.__version__.partition("+")[0]
# Run in a process without any variable of torch's: what the config modules really hold.
REAL = """
import inspect, json, torch, torch._dynamo, torch._inductor.config, torch._functorch.config
import torch.fx.experimental._config
modules = {"dynamo": torch._dynamo.config, "inductor": torch._inductor.config,
           "functorch": torch._functorch.config, "symbolic_shapes": torch.fx.experimental._config}
def plain(value):
    if isinstance(value, (set, frozenset)): return sorted((plain(one) for one in value), key=repr)
    if isinstance(value, (list, tuple)): return [plain(one) for one in value]
    if isinstance(value, dict): return {str(key): plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
held = {}
for name in json.load(open("names.json")):
    if "(" in name:
        function, _, argument = name.rstrip(")").partition("(")
        owner = torch if function.startswith("torch.") else torch._dynamo
        held[name] = plain(inspect.signature(getattr(owner, function.rpartition(".")[2])).parameters[argument].default)
        continue
    module, _, path = name.partition(".")
    value = modules[module]
    try:
        for part in path.split("."): value = getattr(value, part)
    except AttributeError: continue
    held[name] = plain(value)
print(json.dumps(held))
"""


@pytest.fixture(autouse=True)
def _known_release() -> None:
    if RELEASE not in default_releases():
        pytest.skip(f"the tables have no {RELEASE}: python -m toto_compat.environments.torch_sources {RELEASE}")


def test_every_computed_default_is_what_torch_really_has(tmp_path: Path) -> None:
    computed = {name: value for name, value in torch_defaults(RELEASE).items() if not isinstance(value, Expression)}
    (tmp_path / "names.json").write_text(json.dumps(sorted(computed)), encoding="utf-8")
    command = [sys.executable, "-I", "-c", REAL]
    variables = {"HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    assert len(real) > 0.9 * len(computed)  # a name inside a config may be none of its settings
    assert {name: computed[name] for name in real if computed[name] != real[name]} == {}
    assert real["dynamo.recompile_limit"] == 8


def test_the_tables_are_what_the_installed_sources_give() -> None:
    files = list(installed_sources(Path(torch.__file__).parent))
    assert dict(defaults_of(files)) == known()[RELEASE]
    assert log_lines_of(files) == known_lines()[RELEASE]
