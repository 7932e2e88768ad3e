"""What a candidate turns and puts back, and what it replaces in the harness, is named; forecasting touches nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config

from tests.cell.small_trials import TWO_LAYERS, UNLOWERED, trial_of
from toto_compat.cell import process_tree, switches
from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.suites.equivalence.candidate import another_day
from toto_compat.cell.suites.equivalence.scenarios import on_more_threads, threads_of
from toto_compat.cell.tampering import watching_the_candidate
from toto_compat.contract.request import CompileSettings
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def lower_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def more_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextmanager
def double_precision_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def tf32() -> Iterator[None]:
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def one_kernel_of_attention() -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@contextmanager
def a_raised_limit() -> Iterator[None]:
    with dynamo_config.patch(recompile_limit=1000):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        yield


@pytest.mark.parametrize(
    ("turned", "named"),
    [
        (lower_precision, "float32_matmul_precision from 'highest' to 'medium', for a time"),
        (more_threads, "threads from 1 to 2, for a time"),
        (double_precision_by_default, "default_dtype from 'torch.float32' to 'torch.float64', for a time"),
        (tf32, "tf32_cudnn from"),
        (deterministic, "deterministic_algorithms from False to True, for a time"),
        (one_kernel_of_attention, "sdpa_flash from True to False, for a time"),
        (a_raised_limit, "dynamo.recompile_limit from 8 to 1000, while it compiled"),
    ],
)
def test_a_switch_that_is_turned_and_put_back_is_named(turned: Callable[[], Any], named: str) -> None:
    with watching_the_candidate(CompileSettings()) as touched:
        with turned():
            torch.ones(2) @ torch.ones(2)
        assert any(one.startswith(named) for one in touched()), touched()


def test_the_setters_are_torchs_own_again_afterwards() -> None:
    before = torch._C._set_float32_matmul_precision, torch.set_num_threads
    with watching_the_candidate(CompileSettings()):
        assert torch.set_num_threads is not before[1]
    assert (torch._C._set_float32_matmul_precision, torch.set_num_threads) == before


@pytest.mark.parametrize("cache", ["upstream", "fixed_size"])
def test_compiling_and_forecasting_touch_nothing(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TWO_LAYERS)
    trial = trial_of(cache, settings=UNLOWERED)
    with watching_the_candidate(trial.settings) as touched, CompilerWatch():
        model = trial.compiled(batch_sizes=trial.batch_sizes)
        series = trial.series(model.patch_size, 4, 3)
        model.generate_mean(series, 3 * model.patch_size)
        model.generate_samples(series, 2 * model.patch_size, num_samples=4, samples_per_batch=4)
        assert touched() == ()


def test_lowered_code_touches_nothing() -> None:
    with watching_the_candidate(CompileSettings()) as touched, torch.no_grad():
        torch.compile(lambda x: torch.softmax(x @ x, -1))(torch.ones(4, 4))
        assert touched() == ()


def test_what_the_harness_itself_turns_is_not_held_against_a_candidate() -> None:
    trial = trial_of("upstream")
    with watching_the_candidate(CompileSettings()) as touched:
        with threads_of(on_more_threads(trial)), another_day():
            torch.ones(2).sum()
        assert touched() == ()


@pytest.mark.parametrize(
    ("module", "name"),
    [(switches, "switches"), (process_tree, "tree_own_bytes"), (time, "perf_counter"), (torch, "manual_seed")],
)
def test_a_replaced_instrument_is_named(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with watching_the_candidate(CompileSettings()) as touched:
        monkeypatch.setattr(module, name, lambda *_: {})
        assert f"{module.__name__}.{name}: replaced" in touched()


def test_a_replaced_method_and_replaced_code_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching_the_candidate(CompileSettings()) as touched:
        monkeypatch.setattr(CompilerWatch, "mark", lambda *_: None)
        monkeypatch.setattr(process_tree.own_bytes, "__code__", (lambda pid: 0 * pid).__code__)
        assert set(touched()) == {
            "toto_compat.cell.live.CompilerWatch.mark: replaced",
            "toto_compat.cell.process_tree.own_bytes: replaced",
        }
