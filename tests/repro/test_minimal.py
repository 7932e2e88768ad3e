"""The minimal script of a cell: whole, readable, and of torch and toto-ts alone."""

import ast
from pathlib import Path

import pytest

from tests.verdict.sample_cells import cell_request
from toto_compat.contract.request import CacheRequest, CompileSettings, CsvSeries, Device, Limits, Workload
from toto_compat.matrix.request import cell_variables
from toto_compat.repro.minimal import NoMinimalScript, differences, minimal_script, planned_forecasts

SMALL = Workload(context=(128, 256), horizon=(96, 64), batches=(1,), sampling=("2/1",))


def script_of(cache: str, *, source: str = "builtin", settings: CompileSettings | None = None) -> str:
    request = cell_request(cache=cache, settings=settings).model_copy(
        update={"workload": SMALL, "cache": CacheRequest(name=cache, source=source)}
    )
    return minimal_script(request, title="what happened", python="3.11.7", toto_ts="0.2.0", expected=["a limit"])


def imported(script: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        (node.module or "").partition(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
        for node in nodes
        for alias in node.names
    }


@pytest.mark.parametrize("cache", ["upstream", "list_index", "compile_friendly"])
def test_it_imports_torch_and_toto_and_nothing_of_this_package(cache: str) -> None:
    script = script_of(cache)
    assert imported(script) == {"contextlib", "math", "time", "torch", "toto"} | (
        set() if cache == "upstream" else {"typing"}
    )
    assert "toto_compat" not in script
    assert "torch==2.13.0" in script
    assert "It shows: a limit" in script
    assert ("class ListIndexKVCache" in script) is (cache == "list_index")


def test_a_cache_that_is_a_model_of_its_own_says_what_it_is_and_what_to_do() -> None:
    with pytest.raises(NoMinimalScript, match=r"model\.static_model:bind_static.*replay the bundle instead"):
        script_of("fixed_size")


def test_settings_are_in_it_under_the_names_of_both_ages() -> None:
    settings = CompileSettings(capture_scalar_outputs=True, recompile_limit=256, mark_dynamic=True, backend="eager")
    script = script_of("compile_friendly", settings=settings)
    assert "capture_scalar_outputs = True" in script
    assert '"cache_size_limit"' in script and "256" in script
    assert "mark_dynamic(named[name], 2)" in script
    assert "'backend': 'eager'" in script


def test_what_the_cell_has_of_its_own_is_in_it_and_what_cannot_be_is_told() -> None:
    workload = SMALL.model_copy(update={"variates": 4, "groups": 2, "missing": 0.3})
    limits = Limits(threads=3)
    usual = cell_variables(limits, Device.CPU)
    plain = cell_request(cache="upstream").model_copy(
        update={"workload": workload, "variables": usual, "limits": limits}
    )
    script = minimal_script(plain, title="t", python="", toto_ts="")
    for line in ("GROUPS = 2", "MISSING = 0.3", "torch.set_num_threads(3)"):
        assert line in script
    assert "environ" not in script and differences(plain) == []

    series = CsvSeries(path="/srv/prices.csv", time_column="t", value_columns=("close",))
    own = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TOTO_API_TOKEN": "hunter2"}
    cell = plain.model_copy(
        update={
            "variables": usual | own,
            "csv": series,
            "workload": workload.model_copy(update={"checkpoint": "Datadog/Toto-Open-Base-1.0@1"}),
        }
    )
    script = minimal_script(cell, title="t", python="", toto_ts="")
    assert "os.environ.update({'TORCHINDUCTOR_MAX_AUTOTUNE': '1'})\n\nimport torch" in script
    assert imported(script) >= {"os"} and "hunter2" not in script
    head = " ".join((ast.get_docstring(ast.parse(script)) or "").split())
    assert len(differences(cell)) == 3
    assert "python -m torch.utils.collect_env" in head  # the first thing that an issue is asked for
    for told in ("drawn from a seed", "its series is a walk", "without the variables TOTO_API_TOKEN"):
        assert told in head
        assert any(told in one for one in differences(cell))


def test_a_users_own_cache_is_put_in_if_it_stands_alone(tmp_path: Path) -> None:
    alone, entangled = tmp_path / "alone.py", tmp_path / "entangled.py"
    alone.write_text("from toto.model.util import KVCache\n\nclass Mine(KVCache):\n    pass\n", encoding="utf-8")
    entangled.write_text("from beside import base\n\nclass Mine(base):\n    pass\n", encoding="utf-8")
    assert "class Mine(KVCache)" in script_of("mine", source=f"{alone}:Mine")
    with pytest.raises(NoMinimalScript, match="imports beside"):
        script_of("mine", source=f"{entangled}:Mine")


@pytest.mark.parametrize("title", ['""" + __import__("os").system("x") + """', 'ends in "', "\\", "a\nb", "x" * 5000])
def test_a_title_cannot_become_code(title: str) -> None:
    request = cell_request(cache="upstream").model_copy(
        update={"workload": SMALL, "cache": CacheRequest(name="upstream", source="builtin")}
    )
    script = minimal_script(request, title=title, python="", toto_ts="", expected=[title])
    assert [type(node).__name__ for node in ast.parse(script).body].count("Expr") == 1  # the docstring
    assert "__import__" not in {getattr(node, "id", "") for node in ast.walk(ast.parse(script))}


def test_the_forecasts_are_those_of_the_recompile_suite() -> None:
    assert planned_forecasts(SMALL)[:4] == [
        (128, 96, 1, 0, 0),
        (128, 96, 1, 0, 0),
        (256, 96, 1, 0, 0),
        (256, 96, 1, 0, 0),
    ]
    assert (128, 96, 1, 2, 1) in planned_forecasts(SMALL)
    assert (128, 64, 1, 0, 0) in planned_forecasts(SMALL)
