"""Graphs of a run on the CPU, moved to CUDA: on a CPU build too, since nothing is compiled."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.retarget import RetargetedGraph, retargeted
from toto_compat.cell.lowering.source_lines import SourceLine, line_in, line_of, line_of_error
from toto_compat.cell.lowering.strays import cpu_finding_backend

pytestmark = pytest.mark.cell

TABLE = torch.arange(12.0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@contextmanager
def moved_graphs(strays: Callable[[CapturedGraph], set[SourceLine]] = lambda _: set()) -> Iterator[list[Any]]:
    """Move every graph that is compiled within, and run it on the CPU as it was."""
    found: list[tuple[CapturedGraph, RetargetedGraph]] = []

    def compiler(graph: CapturedGraph) -> BoxedRun:
        found.append((graph, retargeted(graph, strays(graph))))
        return run_as_it_is(graph)

    with every_graph_goes_to(compiler):
        yield found


def devices(module: torch.fx.GraphModule) -> set[str]:
    return {
        str(value.device)
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
    }


def test_every_value_is_on_cuda_and_the_run_goes_on_beside_it() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.arange(3, device=x.device) + torch.ones(3)

    with moved_graphs() as found:
        result = torch.compile(function)(torch.ones(3))
    [(graph, moved)] = found
    assert result.tolist() == [1.0, 2.0, 3.0]
    assert devices(moved.module) == {"cuda:0"}
    assert devices(graph.module) == {"cpu"}  # the real run's own
    assert moved.left_on_cpu == ()


def test_constants_become_inputs_that_keep_their_place() -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0])

    with moved_graphs() as found:
        torch.compile(function)(torch.zeros(12))
    [(graph, moved)] = found
    assert len(moved.inputs) == len(graph.inputs) + len(moved.constants)
    assert len(moved.constants) == 1
    assert moved.constants[0].tolist() == list(range(1, 13))
    assert moved.static_inputs[-1] == len(moved.inputs) - 1
    assert devices(moved.module) == {"cuda:0"}


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no regions")
def test_regions_are_moved_with_the_metadata_that_inductor_takes_their_inputs_from() -> None:
    @torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
    def region(x: Tensor) -> Tensor:
        return (x + torch.zeros(3, device=x.device)).sin()

    with moved_graphs() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torch.compile(lambda x: region(region(x)))(torch.ones(3))
    [(_, moved)] = found
    assert torch.allclose(result, torch.ones(3).sin().sin())
    assert devices(moved.module) == {"cuda:0"}
    calls = [node for node in moved.module.graph.nodes if "eager_input_vals" in node.meta]
    given = [value for node in calls for value in node.meta["eager_input_vals"][0] if isinstance(value, Tensor)]
    assert {value.device.type for value in given} <= {"cuda"}
    if Version(torch.__version__) >= Version("2.13"):
        assert given


def test_attention_for_the_cpu_becomes_cudas_own() -> None:
    def attend(query: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask) * 2

    with moved_graphs() as found:
        torch.compile(attend)(torch.ones(1, 2, 4, 8), torch.zeros(1, 1, 4, 4))
    [(_, moved)] = found
    targets = [str(node.target) for node in moved.module.graph.nodes]
    assert not any("for_cpu" in target for target in targets)
    assert devices(moved.module) == {"cuda:0"}


def stray_step(x: Tensor) -> Tensor:
    return x + torch.full((), 3.0)  # no device named: on a GPU it stays on the CPU


def test_a_tensor_that_strays_stays_on_the_cpu_and_is_named_with_its_line() -> None:
    found_on_meta: list[Any] = []
    torch.compile(stray_step, backend=cpu_finding_backend(found_on_meta))(torch.ones(3, device="meta"))
    torch._dynamo.reset()
    lines = {stray.line for stray in found_on_meta if stray.line}
    assert [line.function for line in lines] == ["stray_step"]
    with moved_graphs(lambda _: lines) as found:
        torch.compile(stray_step)(torch.ones(3))
    [(_, moved)] = found
    assert devices(moved.module) == {"cuda:0", "cpu"}
    assert any("test_retarget.py" in value and "stray_step" in value for value in moved.left_on_cpu)


def reads_a_number(x: Tensor) -> Tensor:
    return x * 2 + x.sum().item()


def test_a_value_that_cannot_be_read_on_meta_is_named_with_the_line_that_reads_it() -> None:
    """Torch's message names none."""
    with pytest.raises(RuntimeError, match="meta") as caught:
        torch.compile(reads_a_number, backend=cpu_finding_backend([]))(torch.ones(3, device="meta"))
    assert line_in(str(caught.value)) is None
    line = line_of_error(caught.value)
    assert line is not None and line.function == "reads_a_number"
    assert line.file.endswith("test_retarget.py")


def test_the_honest_twin_of_a_stray_is_moved_whole() -> None:
    def step(x: Tensor) -> Tensor:
        return x + torch.full((), 3.0, device=x.device)

    found_on_meta: list[Any] = []
    torch.compile(step, backend=cpu_finding_backend(found_on_meta))(torch.ones(3, device="meta"))
    assert found_on_meta == []


def test_the_line_is_the_innermost_frame_of_what_torch_kept() -> None:
    text = '  File "/x/site-packages/toto/model/a.py", line 3, in forward\n  File "/y/step.py", line 14, in step,\n x'
    assert line_in(text) == SourceLine("step.py", 14, "step")
    assert line_in("nothing") is None
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    assert line_of(next(iter(graph.nodes))) is None
