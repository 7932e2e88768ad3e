"""The guard in a real service: eager answers what compiled lost, with the same random numbers, once and for all."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from toto.inference.forecaster import TotoForecaster  # noqa: E402

from tests.model.small_backbone import Small, agree, series_of, timeseries  # noqa: E402
from tests.production.judged_files import row, write_verdict  # noqa: E402
from toto_compat import compile_toto  # noqa: E402
from toto_compat.production import Budget, Shadow, configure, forecaster, guarded  # noqa: E402
from toto_compat.production.guard import GuardedForecaster, distance  # noqa: E402
from toto_compat.production.switched import LocalSettings  # noqa: E402
from toto_compat.production.toggle import toggle_command  # noqa: E402

pytestmark = pytest.mark.cell
OFF = Shadow(share=0)


class Candidate:
    """A forecaster whose answers are toto-ts's own, until `then` does something about it."""

    def __init__(self, backbone: Any, then: Callable[[int], None] = lambda _: None, shift: float = 0.0) -> None:
        self.model = backbone
        self.inner = TotoForecaster(backbone)
        self.then, self.shift, self.calls = then, shift, 0
        self.lock = threading.Lock()

    def forecast(self, *arguments: Any, **named: Any) -> Any:
        with self.lock:  # each call has a number of its own, whichever thread comes next
            self.calls += 1
            number = self.calls
        answer = self.inner.forecast(*arguments, **named)  # random numbers are used up before anything goes wrong
        self.then(number)
        answer.mean.add_(self.shift)
        return answer


def eager_alone(backbone: Any, seed: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    samples = TotoForecaster(backbone).forecast(timeseries(series_of()), 16, num_samples=4, samples_per_batch=2).samples
    return samples, torch.rand(3)


def ask(service: Any, seed: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    samples = service.forecast(timeseries(series_of()), 16, num_samples=4, samples_per_batch=2).samples
    return samples, torch.rand(3)


def raising(error: BaseException, at: int = 1) -> Callable[[int], None]:
    def then(call: int) -> None:
        if call == at:
            raise error

    return then


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten"), "raised"),
        (AssertionError(), "raised"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out_of_memory"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_what_compiled_code_raises_costs_no_forecast_and_no_random_number(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backbone = Small().build()
    candidate = Candidate(backbone, raising(error))
    service = guarded(candidate, shadow=OFF)
    expected = eager_alone(backbone)
    with caplog.at_level(logging.INFO, "toto_compat.guard"):
        answers = [ask(service), ask(service)]
    for samples, after in answers:
        assert torch.equal(samples, expected[0]) and torch.equal(after, expected[1])
    assert candidate.calls == 1  # for good
    assert service.fallen_back.startswith(reason)
    events = [json.loads(record.getMessage()) for record in caplog.records]
    assert [event["event"] for event in events] == ["compiled", "fallback", "eager"]
    assert f'fallbacks_total{{reason="{reason}"}} 1.0' in service.metrics_text()


def test_an_input_that_eager_refuses_too_is_the_callers_and_compiled_stays() -> None:
    backbone = Small().build()
    service = guarded(compile_toto(backbone, mode=None), shadow=OFF)
    with pytest.raises(Exception, match=r".*"):
        service.forecast(timeseries(series_of()), 16, num_samples=5, samples_per_batch=2)
    assert service.fallen_back == ""
    assert "errors_total 1.0" in service.metrics_text()
    assert agree(
        service.forecast(timeseries(series_of()), 16).mean,
        TotoForecaster(backbone).forecast(timeseries(series_of()), 16).mean,
    )


def test_an_interrupt_is_not_answered_eager() -> None:
    service = guarded(Candidate(Small().build(), raising(KeyboardInterrupt())), shadow=OFF)
    with pytest.raises(KeyboardInterrupt):
        ask(service)
    assert service.fallen_back == ""


class KillAt(TorchDispatchMode):  # type: ignore[misc]  # torch is not there where mypy runs
    """Lets so many operations through, wherever they come from, and then kills one, once."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.count = last, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.last:
            raise RuntimeError("killed")
        return func(*args, **(kwargs or {}))


def test_killed_in_the_middle_of_a_forecast_eager_answers_from_the_start() -> None:
    """The real static model dies with half a forecast written and random numbers drawn."""
    backbone = Small().build()
    series = timeseries(series_of())
    bound = compile_toto(backbone, mode=None, max_context=48, max_horizon=40, batch_sizes=(4,))

    def forecast(service: Any) -> Any:
        torch.manual_seed(3)
        return service.forecast(series, 32, num_samples=4, samples_per_batch=2).samples

    forecast(bound)
    with KillAt(0) as counted:
        forecast(bound)
    service = guarded(bound, shadow=OFF)
    with KillAt(counted.count // 2) as killer:
        samples = forecast(service)
    assert killer.count > counted.count // 2
    assert "killed" in service.fallen_back
    assert torch.equal(samples, forecast(TotoForecaster(backbone)))


def test_slow_forecasts_in_a_row_end_it_and_a_single_one_does_not() -> None:
    backbone = Small().build()
    budget = Budget(warm_up=1, latency_ms=1e-6, slow_in_a_row=2)
    service = guarded(Candidate(backbone), budget=budget, shadow=OFF)
    ask(service)
    ask(service)
    assert service.fallen_back == ""
    ask(service)
    assert service.fallen_back.startswith("latency: 2 forecasts in a row")
    patient = guarded(Candidate(backbone), budget=Budget(warm_up=0, latency_ms=1e9, slow_in_a_row=1), shadow=OFF)
    ask(patient)
    assert patient.fallen_back == ""


def recompiling(call: int) -> None:
    """A function with code of its own, so that each call compiles and none is a recompile in dynamo's log."""
    names: dict[str, Any] = {}
    exec(f"def fresh(value):\n    return value + {call}\n", names)  # noqa: S102 - this test's own text
    torch.compile(names["fresh"], backend="eager")(torch.zeros(2))


def test_compilations_after_the_warm_up_end_it_when_the_budget_is_spent(caplog: pytest.LogCaptureFixture) -> None:
    service = guarded(Candidate(Small().build(), recompiling), budget=Budget(warm_up=1, recompiles=1), shadow=OFF)
    for _ in range(2):
        ask(service)
    assert service.fallen_back == ""
    ask(service)
    assert service.fallen_back.startswith("recompiles: 2 compilations")
    assert service.metrics.value("compilations_total") == 3
    assert service.metrics.value("recompiles_total") == 2


def test_a_compilation_of_another_model_in_the_process_is_not_counted() -> None:
    def elsewhere(call: int) -> None:
        thread = threading.Thread(target=recompiling, args=(call,))
        thread.start()
        thread.join()

    service = guarded(Candidate(Small().build(), elsewhere), budget=Budget(warm_up=0, recompiles=0), shadow=OFF)
    ask(service)
    assert service.fallen_back == ""


def test_a_reset_of_dynamo_does_not_blind_the_guard() -> None:
    service = guarded(Candidate(Small().build(), recompiling), budget=Budget(warm_up=0, recompiles=9), shadow=OFF)
    torch._dynamo.reset()
    ask(service)
    assert service.metrics.value("recompiles_total") == 1


def test_dynamos_own_limit_ends_it_even_in_the_warm_up() -> None:
    def at_the_limit(_: int) -> None:
        torch._dynamo.reset()

        def grows(value: Any, number: int) -> Any:
            return value + number

        compiled = torch.compile(grows, backend="eager", dynamic=False)
        for number in range(12):
            compiled(torch.zeros(2), number)

    service = guarded(Candidate(Small().build(), at_the_limit), shadow=OFF)
    ask(service)
    assert service.fallen_back.startswith("recompile_limit")


def test_a_shadow_check_catches_a_wrong_forecast_and_answers_with_eagers(tmp_path: Path) -> None:
    backbone = Small().build()
    series = timeseries(series_of())
    right = TotoForecaster(backbone).forecast(series, 16).mean
    wrong = guarded(
        Candidate(backbone, shift=0.1), budget=Budget(warm_up=0), shadow=Shadow(1.0, history=tmp_path / "h")
    )
    assert agree(wrong.forecast(series, 16).mean, right)
    assert wrong.fallen_back.startswith("shadow")
    assert "shadow_alarms_total 1.0" in wrong.metrics_text()
    honest = guarded(Candidate(backbone), budget=Budget(warm_up=0), shadow=Shadow(1.0))
    assert agree(honest.forecast(series, 16).mean, right)
    assert honest.fallen_back == "" and honest.metrics.value("shadow_checks_total") == 1


def test_a_shadow_check_leaves_the_random_stream_alone() -> None:
    backbone = Small().build()
    service = guarded(Candidate(backbone), budget=Budget(warm_up=0), shadow=Shadow(1.0))
    samples, after = ask(service)
    expected, expected_after = eager_alone(backbone)
    assert torch.equal(samples, expected) and torch.equal(after, expected_after)


def test_other_draws_of_the_same_distribution_raise_no_alarm_and_a_shifted_one_does() -> None:
    backbone = Small().build()
    series = timeseries(series_of())
    forecasts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        forecasts.append(TotoForecaster(backbone).forecast(series, 16, num_samples=64, samples_per_batch=64))
    assert distance(forecasts[0], forecasts[1], Shadow()) < 1
    forecasts[0].mean.add_(5 * forecasts[1].samples.std())
    assert distance(forecasts[0], forecasts[1], Shadow()) > 1
    forecasts[0].mean.fill_(float("nan"))
    assert distance(forecasts[0], forecasts[1], Shadow()) == float("inf")


def test_bookkeeping_that_raises_costs_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Small().build()
    service = guarded(Candidate(backbone), shadow=OFF)
    monkeypatch.setattr(service.metrics, "timed", None)
    monkeypatch.setattr(service.metrics, "set", None)
    expected = eager_alone(backbone)
    assert torch.equal(ask(service)[0], expected[0])
    assert service.metrics.value("bookkeeping_failures_total") >= 1


def test_a_log_handler_that_raises_costs_no_forecast() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(f"disk full, {record.name} lost")

    logger, handler = logging.getLogger("toto_compat.guard"), Broken()
    logger.addHandler(handler)
    try:
        backbone = Small().build()
        service = guarded(Candidate(backbone, raising(RuntimeError("x"))), shadow=OFF)
        assert torch.equal(ask(service)[0], eager_alone(backbone)[0])
        assert service.fallen_back
    finally:
        logger.removeHandler(handler)


def test_threads_share_a_guard() -> None:
    backbone = Small().build()
    service = guarded(Candidate(backbone, raising(RuntimeError("x"), at=5)), shadow=OFF)
    right = TotoForecaster(backbone).forecast(timeseries(series_of()), 16).mean
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(5):
            if not agree(service.forecast(timeseries(series_of()), 16).mean, right):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert service.metrics.value("fallbacks_total", reason="raised") == 1
    done = [service.metrics.value("forecasts_total", path=path) for path in ("compiled", "eager")]
    assert sum(done) == 20


def test_a_guard_that_is_dropped_stops_listening() -> None:
    callbacks = torch._dynamo.callback.callback_handler.start_callbacks
    before = len(callbacks)
    service = guarded(Candidate(Small().build()), shadow=OFF)
    assert len(callbacks) == before + 1
    del service
    assert len(callbacks) == before


# forecaster(): what the verdict allows


def service_of(tmp_path: Path, environment: dict[str, str] | None = None, **row_changes: Any) -> Any:
    verdict = write_verdict(tmp_path, row(**{"mode": None, **row_changes}))
    return forecaster(Small().build(), configure(verdict=verdict, environment=environment or {}))


def test_the_verdicts_cache_is_bound_and_said(tmp_path: Path) -> None:
    made = service_of(tmp_path)
    series = timeseries(series_of())
    assert made.eager_now() == ""
    assert agree(made.forecast(series, 16).mean, made.eager.forecast(series, 16).mean)
    assert "toto_compat.caches.fixed_size:FixedSizeKVCache" in str(made.configuration)
    friendly = service_of(tmp_path, cache="compile_friendly")
    assert "CompileFriendlyKVCache" in str(friendly.configuration)


@pytest.mark.parametrize("changes", [{"torch": "2.12.0+cpu"}, {"toto_ts": "0.1.3"}, {"source_hash": "x"}], ids=str)
def test_another_stack_than_the_judged_one_is_eager_and_says_why(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = service_of(tmp_path, **changes)
    assert made.compiled is None
    assert made.eager_now()
    assert "toto.model.util:KVCache" in str(made.configuration)
    assert agree(made.forecast(timeseries(series_of()), 16).mean, made.eager.forecast(timeseries(series_of()), 16).mean)


def test_a_cache_that_cannot_be_bound_leaves_the_service_eager(tmp_path: Path) -> None:
    made = service_of(tmp_path, cache="no_such_cache")
    assert made.compiled is None and "binding the cache no_such_cache failed" in made.eager_now()


def test_what_compile_toto_does_not_take_is_the_callers_mistake(tmp_path: Path) -> None:
    verdict = write_verdict(tmp_path, row(mode=None))
    with pytest.raises(TypeError):
        forecaster(Small().build(), configure(verdict=verdict, environment={}), max_contxt=3)


def test_disable_reaches_a_running_service_at_its_next_forecast_and_enable_brings_it_back(tmp_path: Path) -> None:
    env = tmp_path / ".env.compile"
    env.write_text("# mine\nexport TOTO_DISABLE_COMPILE=0\n", encoding="utf-8")
    verdict = write_verdict(tmp_path, row(mode=None))
    made = forecaster(Small().build(), configure(env, verdict, environment={}))
    service = guarded(made, shadow=OFF)
    series = timeseries(series_of())

    def path_taken() -> str:
        before = service.metrics.value("forecasts_total", path="eager")
        service.forecast(series, 16)
        return "eager" if service.metrics.value("forecasts_total", path="eager") > before else "compiled"

    assert path_taken() == "compiled"
    CliRunner().invoke(toggle_command, ["disable", "--file", str(env)], catch_exceptions=False)
    assert path_taken() == "eager"
    env.write_text("export TOTO_DISABLE_COMPILE=0\n", encoding="utf-8")
    assert path_taken() == "compiled"
    env.unlink()
    assert path_taken() == "eager"


def test_settings_hold_while_a_forecast_runs_and_never_beside_it() -> None:
    config = torch._dynamo.config
    before = config.recompile_limit
    settings = LocalSettings({"recompile_limit": before + 5})
    with settings.applied():
        with settings.applied():
            assert config.recompile_limit == before + 5
        assert config.recompile_limit == before + 5
    assert config.recompile_limit == before


def test_compiled_for_real_and_killed_for_real(tmp_path: Path) -> None:
    """One real compilation: the verdict's mode, active, guarded, and its own graph thrown away under it."""
    backbone = Small().build()
    verdict = write_verdict(tmp_path, row())
    made = forecaster(
        backbone, configure(verdict=verdict, environment={}), max_context=48, max_horizon=24, batch_sizes=(2,)
    )
    service = guarded(made, budget=Budget(warm_up=1), shadow=Shadow(1.0))
    assert isinstance(service, GuardedForecaster)
    series = timeseries(series_of())
    right = made.eager.forecast(series, 24).mean
    for _ in range(2):
        assert agree(service.forecast(series, 24).mean, right)
    assert service.metrics.value("compilations_total") >= 1
    assert service.metrics.value("recompiles_total") == 0
    assert service.metrics.value("shadow_checks_total") == 1
    text = str(made.configuration)
    assert "mode" in text and "default" in text and "compiled" in text
