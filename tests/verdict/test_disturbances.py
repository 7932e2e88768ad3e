"""A disturbed timing decides nothing; what the cell does itself, and what nobody recorded, disturbs nothing."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verdict.sample_cells import GATES, good_result, production_incident, with_figures
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.conditions import conditions as conditions_of_record
from toto_compat.verdict.decision import DecisionRules, decide
from toto_compat.verdict.disturbances import disturbances, disturbed_by
from toto_compat.verdict.judge import Status, judge

SECONDS = 20.0
BEFORE: dict[str, Any] = {
    "clock_s": 1000.0,
    "load_average": [0.3, 0.2, 0.1],
    "runnable": 1,
    "cores": 2,
    "busy_s": 5000.0,
    "stolen_s": 3.0,
    "own_cpu_s": 60.0,
    "waited_for_a_core_s": 0.2,
    "cpu_mhz": 3600.0,
    "too_hot_s": 1.0,
    "throttled_s": 0.0,
    "pressure_s": {"cpu": 10.0, "io": 2.0, "memory": 0.1},
    "swap_used_mb": 0.0,
    "swapped_in_mb": 0.0,
}
# what a quiet machine adds in twenty seconds: the cell's own thread, a few ticks of everything else
QUIET = {"busy_s": SECONDS + 0.3, "own_cpu_s": SECONDS, "waited_for_a_core_s": 0.05}


def timed(gpu: Any = None, gpu_processes: Any = None, memory_pressure: float = 0.0, **spent: float) -> dict[str, Any]:
    """The conditions around one timing loop in which these counters went on by so much."""
    after = {**BEFORE, "clock_s": BEFORE["clock_s"] + SECONDS, "load_average": [2.4, 1.0, 0.5]}
    for name, value in {**QUIET, **spent}.items():
        after[name] = BEFORE[name] + value
    after["pressure_s"] = {**BEFORE["pressure_s"], "memory": BEFORE["pressure_s"]["memory"] + memory_pressure}
    if gpu is not None:
        after["gpu"] = gpu
    if gpu_processes is not None:
        after["gpu_processes"] = gpu_processes
    return {"before": BEFORE, "after": after}


def process(percent: int | None, *, own: bool = False) -> dict[str, Any]:
    return {"pid": 41, "name": "trading bot", "gpu_percent": percent, "own": own}


def under(result: CellResult, conditions: Any) -> CellResult:
    speed = result.evidence[Suite.SPEED]
    changed = speed.model_copy(update={"details": {**speed.details, "conditions": conditions}})
    return result.model_copy(update={"evidence": {**result.evidence, Suite.SPEED: changed}})


DISTURBED = {
    "foreign processes": (timed(busy_s=SECONDS + 7), "foreign processes used 35 % of a core"),
    "more than one": (timed(busy_s=SECONDS * 2.2), "foreign processes used 1.2 cores"),
    "waiting": (timed(busy_s=SECONDS + 3, waited_for_a_core_s=3.0), "waited 15% of the time for a core"),
    "steal": (timed(stolen_s=4.0), "the hypervisor kept 16% of the CPU time"),
    "quota": (timed(throttled_s=2.0), "a CPU quota held its control group back for 10% of the time"),
    "heat": (timed(too_hot_s=5.0), "the CPU was too hot for 25% of the time"),
    "memory": (timed(memory_pressure=3.0), "15% of the time something stood still for want of memory"),
    "swap": (timed(swapped_in_mb=90.0), "4.5 MB/s were swapped in"),
    "a hot GPU": (timed(gpu={"throttled_by": ["hw_thermal_slowdown"]}), "held its clocks back (hw_thermal_slowdown)"),
    "a shared GPU": (timed(gpu_processes=[process(60, own=True), process(45)]), "trading bot (pid 41) used 45 %"),
}
UNDISTURBED = {
    "a quiet machine": timed(),
    "four threads of its own that wait for each other": timed(
        busy_s=SECONDS * 2, own_cpu_s=SECONDS * 2, waited_for_a_core_s=SECONDS
    ),
    "a daemon now and then": timed(busy_s=SECONDS * 1.1),
    "own time that the kernel counted before": timed(busy_s=SECONDS, own_cpu_s=SECONDS + 0.2),
    "a GPU at its power cap": timed(gpu={"throttled_by": ["gpu_idle", "sw_power_cap"]}),
    "a GPU that shows a picture": timed(gpu_processes=[process(60, own=True), process(None), process(2)]),
    "a GPU that tells the numbers of another namespace": timed(gpu_processes=[process(60)]),
    "a loop too short to tell": {
        "before": {**BEFORE, "clock_s": 1019.9},
        "after": timed(busy_s=SECONDS * 2)["after"],
    },
}


@pytest.mark.parametrize("name", DISTURBED)
def test_a_disturbed_timing_is_inconclusive_and_says_what_to_do(name: str) -> None:
    conditions, told = DISTURBED[name]
    judged = judge(under(good_result(), [conditions]), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.SPEEDUP)
    for gate in (Gate.SPEEDUP, Gate.LATENCY_STABILITY):
        assert told in judged.gates[gate].reason
        assert "while it was timed: " in judged.gates[gate].reason
        assert judged.gates[gate].next_command.endswith("--fresh")
        assert judged.gates[gate].value is not None
    assert judged.gates[Gate.MEMORY].status is Status.PASS


@pytest.mark.parametrize("name", UNDISTURBED)
def test_what_the_cell_does_itself_and_what_is_usual_disturb_nothing(name: str) -> None:
    assert disturbances([UNDISTURBED[name]]) == ()
    assert judge(under(good_result(), [UNDISTURBED[name]]), GATES).verdict is Status.PASS


def test_a_disturbed_timing_fails_nothing_either() -> None:
    slow = with_figures(good_result(), {Gate.SPEEDUP: 0.5})
    assert judge(slow, GATES).gates[Gate.SPEEDUP].status is Status.FAIL
    assert judge(under(slow, [DISTURBED["steal"][0]]), GATES).gates[Gate.SPEEDUP].status is Status.INCONCLUSIVE


def test_a_measured_fail_of_another_gate_stands() -> None:
    judged = judge(under(production_incident(), [DISTURBED["steal"][0]]), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.RECOMPILE_LIMIT)


def test_one_disturbed_process_of_three_is_enough_and_told_once() -> None:
    disturbed = DISTURBED["foreign processes"][0]
    assert len(disturbances([timed(), disturbed, disturbed])) == 1


def test_a_disturbed_timing_ticks_no_condition_of_the_record() -> None:
    judged = judge(under(good_result(), [DISTURBED["quota"][0]]), GATES)
    decision = decide([judged], DecisionRules()).devices[judged.result.request.device]
    speed = conditions_of_record(decision)[-1]
    assert speed.met is None and "CPU quota" in speed.evidence


def test_results_of_before_are_judged_as_before() -> None:
    old = {"load_average": [9.0, 9.0, 9.0], "cpu_mhz": 800.0, "gpu": "210 MHz, 405 MHz, 0x40, 91, 99 %"}
    conditions = [{"before": old, "after": {**old, "foreign_gpu_processes": ["12, python, 900 MiB"]}}]
    assert disturbances(conditions) == ()
    assert judge(under(good_result(), conditions), GATES).verdict is Status.PASS


@pytest.mark.parametrize("missing", sorted(BEFORE))
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_counter_that_was_not_read_disturbs_nothing(missing: str, where: str) -> None:
    conditions = timed()
    conditions[where] = {name: value for name, value in conditions[where].items() if name != missing}
    assert disturbances([conditions]) == ()


@pytest.mark.parametrize("value", [None, "much", [], {}, True, -1.0, math.nan, math.inf, 10**400, {"memory": "x"}])
@pytest.mark.parametrize("name", [*BEFORE, "gpu", "gpu_processes"])
def test_garbage_disturbs_nothing(name: str, value: Any) -> None:
    conditions = timed()
    conditions["before"] = {**conditions["before"], name: value}
    conditions["after"] = {**conditions["after"], name: value}
    assert disturbances([conditions]) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*BEFORE, "before", "after", "gpu", "own"]) | st.text(), inner, max_size=6)
    ),
)


@given(JSON)
def test_nothing_that_a_file_may_hold_raises(conditions: Any) -> None:
    assert bool(disturbances(conditions)) is bool(disturbed_by(conditions))
