"""Tensors that a forecast leaves on the CPU when the model and the series are elsewhere, and the lines that make them.

A run on the CPU cannot show them, so the forecast is traced once more on `meta`, where a value on the CPU is a stray.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from toto_compat.cell.lowering.capture import boxed, emptied
from toto_compat.cell.lowering.source_lines import SourceLine, line_of, line_of_error
from toto_compat.cell.trial import Trial, blaming_the_candidate, telling_line


@dataclass(frozen=True)
class Stray:
    """A value on the CPU that something uses."""

    name: str
    line: SourceLine | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.line}" if self.line else self.name


def stray_tensors(trial: Trial) -> tuple[list[Stray] | None, str]:
    """Trace a mean forecast on `meta`: the strays, or None and why it cannot be traced."""
    strays: list[Stray] = []
    torch._dynamo.reset()
    # without autocast, which torch does not have for meta: it changes precisions, not where a value is made
    elsewhere = replace(trial, device="meta", workload=trial.workload.model_copy(update={"autocast": None}))
    try:
        with _meta_tensors_are_true():
            model = elsewhere.compiled(backend=cpu_finding_backend(strays))
            workload = trial.workload
            series = elsewhere.series(model.patch_size, workload.context_patches[0], workload.horizon_patches[0])
            with blaming_the_candidate():
                model.generate_mean(series, series.truth.shape[-1])
    except Exception as error:  # a step that reads values cannot run on meta at all: that is an answer, not a fault
        cause = getattr(error, "cause", error)
        line = line_of_error(cause)
        told = f"{telling_line(cause)[:200]}{f', {line}' if line else ''}"
        return None, f"the forecast cannot be traced on meta ({told})"
    finally:
        torch._dynamo.reset()
    return strays, ""


@contextmanager
def _meta_tensors_are_true() -> Iterator[None]:
    """toto-ts asserts on tensors outside the compiled step; without values every assertion holds."""
    original = torch.Tensor.__bool__
    torch.Tensor.__bool__ = lambda tensor: tensor.is_meta or original(tensor)
    try:
        yield
    finally:
        torch.Tensor.__bool__ = original


def cpu_finding_backend(strays: list[Stray]) -> Callable[..., Any]:
    """AOTAutograd alone: Inductor's own passes throw away what is computed on meta, and then trip over it."""

    def compiler(graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        strays.extend(values_on_cpu(graph_module))
        return boxed(lambda arguments: graph_module.forward(*emptied(arguments)))

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compiler)
    return backend


def values_on_cpu(module: torch.fx.GraphModule) -> list[Stray]:
    """Find the values on the CPU that something uses, in the graph and in the regions it calls, each once."""
    return [
        Stray(node.name, line_of(node))
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.device.type == "cpu" and node.users
    ]
