"""Small steps compiled for described GPUs: what CUDA graphs would take of them, and what not, with its line."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cell.lowering.cuda_build import needs_cuda_build
from toto_compat.cell.lowering import kernels
from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.described_gpu import CARDS, GPU, described
from toto_compat.cell.lowering.kernels import read_usage
from toto_compat.cell.lowering.lower import LoweredGraph, lower
from toto_compat.cell.lowering.strays import cpu_finding_backend

pytestmark = pytest.mark.cell


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def lowered(
    step: Callable[..., Any], *arguments: Tensor, architectures: tuple[str, ...] = ("sm_90",), strays: Any = ()
) -> list[LoweredGraph]:
    reports: list[LoweredGraph] = []

    def compiler(graph: CapturedGraph) -> BoxedRun:
        reports.extend(lower(graph, CARDS[name], strays=strays).report for name in architectures)
        return run_as_it_is(graph)

    with every_graph_goes_to(compiler):
        torch.compile(step, mode="reduce-overhead")(*arguments)
    return reports


@needs_cuda_build
def test_a_plain_step_is_one_captured_partition_on_every_architecture() -> None:
    reports = lowered(lambda x: (x.sin() * 2).sum(-1), torch.ones(8, 100), architectures=("sm_80", "sm_90", "sm_120"))
    assert [report.architecture for report in reports] == ["sm_80", "sm_90", "sm_120"]
    for report in reports:
        assert report.error == ""
        assert report.captured_whole
        assert [kernel.registers is not None and kernel.registers > 0 for kernel in report.kernels] == [True]
        assert report.kernels[0].spilled_bytes is not None


def writes_an_input(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.copy_(x)
    return buffer + 1


@needs_cuda_build
def test_a_written_input_that_is_not_static_is_named_with_its_line() -> None:
    [report] = lowered(writes_an_input, torch.zeros(4), torch.ones(4))
    assert not report.captured_whole
    [objection] = report.skipped
    assert objection.reason.startswith("mutated inputs (1 instances)")
    assert objection.line is not None and objection.line.function == "writes_an_input"


def writes_a_part(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[:, 3:5] = x
    return buffer * 2


@needs_cuda_build
def test_a_part_of_an_input_that_is_written_is_compiled_and_refused() -> None:
    [report] = lowered(writes_a_part, torch.zeros(4, 8), torch.ones(4, 2))
    assert report.error == "" and report.kernels
    assert [objection.reason for objection in report.skipped] == ["mutated inputs (1 instances)"]


@needs_cuda_build
def test_no_driver_is_asked_about_a_fake_tensor_and_wrong_shapes_are_still_found() -> None:
    """2.9's device guard did: Inductor told it as a shape error in a scatter, lowering as an error of the cache."""
    with described(CARDS["sm_90"]), FakeTensorMode():
        into, fits, too_wide = (torch.empty(*shape, device=GPU) for shape in ((4, 2), (2,), (4, 3)))
        made = [into.copy_(fits), ~(into > 0), into.t().contiguous(), into[..., None], into[1:, 0]]
        assert {value.device for value in made} == {GPU}
        with pytest.raises(RuntimeError, match="must match"):
            into.copy_(too_wide)


@pytest.mark.skipif(hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch brings such a guard itself")
@needs_cuda_build
def test_the_device_guard_is_put_back() -> None:
    for _ in range(2):
        with described(CARDS["sm_90"]):
            pass
        with FakeTensorMode(), pytest.raises(RuntimeError, match="driver"):
            torch.empty(3, device=GPU)[..., None]


@needs_cuda_build
def test_its_honest_twin_with_a_static_buffer_is_captured() -> None:
    buffer = torch.zeros(4)
    torch._dynamo.mark_static_address(buffer)
    [report] = lowered(writes_an_input, buffer, torch.ones(4))
    assert report.captured_whole, report


def reads_a_number(x: Tensor, length: Tensor) -> Tensor:
    number = length.item()
    return x * 2 + torch.full((3,), number, device=x.device)


@needs_cuda_build
def test_a_value_read_in_the_step_is_named_with_its_line() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        [report] = lowered(reads_a_number, torch.ones(3), torch.tensor(2.5))
    assert not report.captured_whole
    told = [str(one.line) for one in report.objections]
    assert any("test_lower.py" in line and "reads_a_number" in line for line in told), report


def leaves_one_on_the_cpu(x: Tensor) -> Tensor:
    return x * 2 + torch.full((), 3.0)


@needs_cuda_build
def test_a_tensor_left_on_the_cpu_is_named_with_its_line() -> None:
    found: list[Any] = []
    torch.compile(leaves_one_on_the_cpu, backend=cpu_finding_backend(found))(torch.ones(3, device="meta"))
    torch._dynamo.reset()
    [report] = lowered(leaves_one_on_the_cpu, torch.ones(3), strays={stray.line for stray in found})
    assert any("leaves_one_on_the_cpu" in value for value in report.left_on_cpu)


def goes_through_the_cpu(x: Tensor) -> Tensor:
    counted = torch.nonzero(x)
    return (x * 2).sum() + counted.sum()


@needs_cuda_build
def test_a_second_partition_is_told_with_the_operation_between_and_its_line() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        [report] = lowered(goes_through_the_cpu, torch.ones(64, 64))
    assert not report.captured_whole
    told = [f"{one.reason} {one.line}" for one in report.objections]
    assert any("nonzero" in one or "goes_through_the_cpu" in one for one in told), report


def test_cuobjdumps_lines_are_read() -> None:
    text = (
        " Function triton_poi_fused_0:\n  REG:40 STACK:0 SHARED:128 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0\n"
        " Function other:\n  REG:255 STACK:64 SHARED:0 LOCAL:16 CONSTANT[0]:568\n"
    )
    assert read_usage(text) == (255, 64, 128, 16)
    assert read_usage("cuobjdump fatal") is None


def test_a_spill_of_any_configuration_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that takes the most registers need not be the one that spills."""
    usages = {b"wide": (255, 0, 512, 0), b"narrow": (64, 48, 0, 0)}
    monkeypatch.setattr(kernels, "resource_usage", usages.get)
    [kernel] = kernels.KeptKernels({"triton_red_fused_0": list(usages)}).assembled()
    assert (kernel.configurations, kernel.registers, kernel.spilled_bytes, kernel.shared_bytes) == (2, 255, 48, 512)
