"""The table of variables against the torch that is installed: what it says of that release is what the sources read."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from toto_compat.environments.torch_sources.variables import installed_sources, load_table, variables_of  # noqa: E402
from toto_compat.production.lint_env import INSTEAD  # noqa: E402

pytestmark = pytest.mark.cell


def test_the_table_is_what_the_installed_release_reads() -> None:
    release = torch.__version__.partition("+")[0]
    table = load_table()
    if release not in table.releases:
        pytest.skip(f"the table has no {release}: python -m toto_compat.environments.torch_sources.variables {release}")
    read = variables_of(installed_sources(Path(torch.__file__).parent))
    assert {name for name, one in table.variables.items() if release in one.releases} == set(read)
    assert "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS" in read  # else both are empty


def test_a_variable_is_really_read_and_a_no_op_really_is_one() -> None:
    """Asked of torch itself: the setting follows the one, and no Python source holds the other."""
    config = Path(torch._dynamo.config.__file__).read_text(encoding="utf-8")
    assert "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS" in config
    sources = b"".join(content for _, content in installed_sources(Path(torch.__file__).parent))
    for name in INSTEAD:
        assert name.encode() not in sources
