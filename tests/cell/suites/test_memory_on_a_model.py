"""Memory of the real model: what hoards or leaks is red, and the twin that does not stays green."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cell.small_trials import trial_of
from toto_compat.cell.suites.memory import READ_FORECASTS, MemoryRun, hold_memory, memory_evidence, plan_forecasts
from toto_compat.contract.caches import SABOTAGES
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Workload
from toto_compat.matrix.gates import Gate
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

pytestmark = pytest.mark.cell

MB = 1 << 20
ROOT = Path(__file__).parent.parent.parent.parent
# A process of its own for each side. No code is generated: what a cache hoards is there without.
ALONE = """
import sys
from tests.cell.small_trials import UNLOWERED, trial_of
from toto_compat.cell.session import Session
from toto_compat.cell.suites import memory
from toto_compat.contract.request import CellProfile, Workload
import torch
torch.set_num_threads(1)
memory.READ_FORECASTS = 10
runner, cache = sys.argv[1:]
workload = Workload(context=(128, 2048), horizon=(64,), batches=(1,))
session = Session(trial_of(cache, settings=UNLOWERED, workload=workload), CellProfile(iterations=1))
print(getattr(memory, runner)(session).model_dump_json())
"""


def limit_of(gate: Gate) -> GateLimit:
    assert gate.rule.default is not None
    return gate.rule.default


def sabotages_of(gate: Gate) -> list[str]:
    return [f"sabotaged:{name}" for name, sabotage in SABOTAGES.items() if sabotage.gate == gate]


@cache
def run_alone(runner: str, cache_name: str) -> MemoryRun:
    finished = subprocess.run(
        [sys.executable, "-c", ALONE, runner, cache_name],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=True,
    )
    return MemoryRun.model_validate(json.loads(finished.stdout.splitlines()[-1]))


def memory_of(cache_name: str) -> float:
    reference = run_alone("run_reference", "upstream")
    figures = memory_evidence(reference, run_alone("run_compiled", cache_name), cold_peak=None).figures
    assert figures["memory"].value is not None
    return figures["memory"].value


@pytest.mark.parametrize("name", sabotages_of(Gate.MEMORY))
def test_hoarding_turns_memory_red(name: str) -> None:
    assert not limit_of(Gate.MEMORY).admits(memory_of(name))


def test_a_cache_that_keeps_its_buffers_alone_leaves_memory_green() -> None:
    assert limit_of(Gate.MEMORY).admits(memory_of("fixed_size"))


class Leaking:
    """A right model that leaves something behind, told the number of the forecast and whether it was sampled."""

    def __init__(self, model: BoundModel, leave: Callable[[int, bool], None]) -> None:
        self._model, self._leave, self._count = model, leave, 0
        self.patch_size = model.patch_size

    def generate_mean(self, *arguments: Any) -> torch.Tensor:
        return self._counted(self._model.generate_mean(*arguments), sampled=False)

    def generate_samples(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._counted(self._model.generate_samples(*arguments, **options), sampled=True)

    def _counted(self, forecast: torch.Tensor, *, sampled: bool) -> torch.Tensor:
        self._count += 1
        self._leave(self._count, sampled)
        return forecast


def growth_of(model: Any) -> float:
    return hold_memory(trial_of("fixed_size"), lambda: model, lambda planned, one: planned.run(one)).growth.value


def fixed_size() -> BoundModel:
    trial = trial_of("fixed_size")
    return trial.eager(trial.cache)


KEPT: list[object] = []


@dataclass(frozen=True)
class ShmFile:
    path: Path


def keep_tensor(megabytes: int = 1) -> None:
    KEPT.append(torch.ones(megabytes * MB, dtype=torch.uint8))


def keep_native_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    address = libc.malloc(MB)
    ctypes.memset(address, 1, MB)


def keep_memfd() -> None:
    """Memory behind a descriptor, mapped nowhere."""
    file = os.memfd_create("toto_compat_tests")
    os.write(file, b"1" * MB)
    KEPT.append(os.fdopen(file, "rb"))  # closed when it is let go


def keep_shared_memory() -> None:
    """A file in shared memory that nobody has open."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
        file.write(b"1" * MB)
    KEPT.append(ShmFile(Path(file.name)))


def keep_cycle() -> None:
    """A cycle is garbage that only a collection frees: it is no leak."""
    cycle: list[object] = [torch.ones(MB, dtype=torch.uint8)]
    cycle.append(cycle)


WARM_UP = 2 * len(plan_forecasts(trial_of("fixed_size"), 32))
LEAKS: dict[str, Callable[[int, bool], None]] = {
    "a tensor of every forecast": lambda _number, _sampled: keep_tensor(),
    "a tensor of every other forecast": lambda number, _sampled: keep_tensor() if number % 2 else None,
    "native memory of every forecast": lambda _number, _sampled: keep_native_memory(),
    "a memfd of every forecast": lambda _number, _sampled: keep_memfd(),
    "a file in shared memory": lambda _number, _sampled: keep_shared_memory(),
    "a tensor of sampled forecasts": lambda _number, sampled: keep_tensor() if sampled else None,
    "as much in one burst": lambda number, _sampled: keep_tensor(60) if number == WARM_UP + 40 else None,
}


@pytest.fixture
def nothing_kept() -> Any:
    torch.set_num_threads(1)
    yield
    for one in KEPT:
        if isinstance(one, ShmFile):
            one.path.unlink()
    KEPT.clear()


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_of_a_megabyte_turns_memory_growth_red(leak: str) -> None:
    assert not limit_of(Gate.MEMORY_GROWTH).admits(growth_of(Leaking(fixed_size(), LEAKS[leak])))


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("name", sabotages_of(Gate.MEMORY_GROWTH))
def test_a_cache_that_leaks_turns_memory_growth_red(name: str) -> None:
    trial = trial_of(name)
    assert growth_of(trial.eager(trial.cache)) == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("cache_name", ["fixed_size", "upstream"])
def test_a_cache_that_keeps_nothing_leaves_memory_growth_green(cache_name: str) -> None:
    torch.set_num_threads(1)
    trial = trial_of(cache_name)
    assert limit_of(Gate.MEMORY_GROWTH).admits(growth_of(trial.eager(trial.cache)))


@pytest.mark.usefixtures("nothing_kept")
def test_garbage_is_no_leak() -> None:
    leaving_cycles = Leaking(fixed_size(), lambda _number, _sampled: keep_cycle())
    assert limit_of(Gate.MEMORY_GROWTH).admits(growth_of(leaving_cycles))


def test_the_loop_meets_every_announced_batch_as_mean_and_samples_and_two_series_of_each() -> None:
    workload = Workload(batches=(1, 2), sampling=("8/4",))
    plan = plan_forecasts(trial_of("fixed_size", workload=workload), 32)
    rows = [planned.series.inputs.shape[0] * (planned.samples or 1) for planned in plan]
    assert set(rows) == set(trial_of("fixed_size", workload=workload).batch_sizes)
    for one, size in zip(plan, rows, strict=True):
        others = [other for other, rows_of_other in zip(plan, rows, strict=True) if rows_of_other == size]
        assert any(not torch.equal(one.series.inputs, other.series.inputs) for other in others)
    assert READ_FORECASTS >= 60


class KeepsEverySeries:
    """Keeps 1 MB of every series that it has not met before."""

    def __init__(self, model: BoundModel) -> None:
        self._model = model
        self._kept: dict[bytes, torch.Tensor] = {}
        self.patch_size = model.patch_size

    def _keep(self, series: Series) -> None:
        self._kept.setdefault(series.inputs.numpy().tobytes(), torch.ones(MB, dtype=torch.uint8))

    def generate_mean(self, series: Series, *asked: Any) -> Any:
        self._keep(series)
        return self._model.generate_mean(series, *asked)

    def generate_samples(self, series: Series, *asked: Any, **named: Any) -> Any:
        self._keep(series)
        return self._model.generate_samples(series, *asked, **named)


def test_what_is_kept_of_every_new_series_is_seen() -> None:
    assert growth_of(KeepsEverySeries(fixed_size())) == pytest.approx(1.0, rel=0.2)
