"""Tensors between the processes of a cell: files that hold numbers and nothing that could be run."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

_BETWEEN = "\t"  # in no name of a scenario or quantity

Tensors = dict[str, dict[str, Tensor]]  # of what -> name -> values


def save_tensors(path: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = {
        f"{of_what}{_BETWEEN}{name}": values.detach().to("cpu").contiguous()
        for of_what, named in tensors.items()
        for name, values in named.items()
    }
    save_file(flat, path)


def load_tensors(path: Path) -> Tensors:
    tensors: Tensors = {}
    for key, values in load_file(path).items():
        of_what, _, name = key.partition(_BETWEEN)
        tensors.setdefault(of_what, {})[name] = values
    return tensors
