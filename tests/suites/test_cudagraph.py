"""The CUDA graph prediction: what Inductor would refuse, on graphs made to be refused."""

from collections.abc import Iterator

import pytest
import torch

from tests.suites.small_trials import trial_of
from toto_compat.evidence.schema import Kind
from toto_compat.observe.events import EventKind
from toto_compat.suites.cudagraph import GraphChecked, checking_backend, cpu_finding_backend, predict

pytestmark = pytest.mark.cell


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def checked(function: object, *arguments: torch.Tensor) -> list[GraphChecked]:
    graphs: list[GraphChecked] = []
    with torch.no_grad():
        torch.compile(function, backend=checking_backend(graphs))(*arguments)
    return graphs


def test_a_plain_function_gives_no_reason_and_still_computes() -> None:
    graphs: list[GraphChecked] = []
    doubled = torch.compile(lambda x: x * 2 + 1, backend=checking_backend(graphs))(torch.ones(3))
    assert doubled.tolist() == [3.0, 3.0, 3.0]
    assert [graph.reasons for graph in graphs] == [[]]


def test_a_mutated_input_is_a_reason_unless_its_address_is_static() -> None:
    def write(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        buffer.copy_(value)
        return buffer + 1

    [loose] = checked(write, torch.zeros(4), torch.ones(4))
    assert loose.reasons == ["mutated inputs (1 instances)"]
    torch._dynamo.reset()
    fixed = torch.zeros(4)
    torch._dynamo.mark_static_address(fixed)
    [static] = checked(write, fixed, torch.ones(4))
    assert static.reasons == []
    assert static.mutated_inputs == 1


def test_reading_a_number_from_the_device_is_a_reason() -> None:
    def read(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return torch.zeros(length.item()) + x.sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        [graph] = checked(read, torch.ones(3), torch.tensor(2))
    assert any("_local_scalar_dense" in reason for reason in graph.reasons), graph


def test_a_tensor_left_on_the_cpu_is_found_on_meta() -> None:
    found: list[str] = []

    def stray(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(3).to(x.device)

    torch.compile(stray, backend=cpu_finding_backend(found))(torch.ones(3, device="meta"))
    assert found


def test_list_index_is_predicted_to_skip_as_production_s_log_says() -> None:
    evidence = predict(trial_of("list_index"))
    figure = evidence.figures["cudagraphs"]
    assert figure.kind is Kind.PREDICTED
    assert figure.value is not None and figure.value > 0
    assert {event.kind for event in evidence.events} == {EventKind.CUDAGRAPH_SKIP}
    assert any(event.reason == "mutated inputs (2 instances)" for event in evidence.events), evidence.events


def test_fixed_size_gives_inductor_no_reason() -> None:
    evidence = predict(trial_of("fixed_size"))
    assert evidence.figures["cudagraphs"].value == 0, evidence.details
    assert evidence.details["stray_cpu_tensors"] == []
