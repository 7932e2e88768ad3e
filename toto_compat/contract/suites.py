"""The suites of a cell, one row each. The host knows them by name, the cell by where their code is.

A new suite is a module in `cell/suites/` and a row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from toto_compat.contract.table import Table


@dataclass(frozen=True)
class GroupRule:
    """Says how the process of a group is started."""

    variables: Mapping[str, str] = field(default_factory=dict)  # what torch reads at import, in a cell on the CPU
    repeated: bool = False  # once per `repeats` of the profile, but only once in a cell that cannot PASS any more
    pointless_if_forecast_raised: bool = False  # a forecast that cannot be compiled has no speed
    only_while_it_can_pass: bool = False  # skipped once a measured figure breaks a limit
    after: tuple[str, ...] = ()  # groups whose files it works on: pointless without them
    imports_the_candidate: bool = True  # else what it leaves behind is hidden from those that do
    beside: str = ""  # the group whose process it runs next to, where a core is free: both are the candidate's, untimed


class Group(Table):
    """Holds what runs together in one fresh process, in the order of the cell.

    The first group meets empty compiler caches and shows the cold compile; the CUDA-graph predictor, which may rely on
    what was compiled for CUDA, comes last, unless it runs beside another.
    """

    rule: GroupRule

    OBSERVE = "observe", GroupRule()
    REFERENCE = "reference", GroupRule(imports_the_candidate=False)
    CANDIDATE = "candidate", GroupRule(after=("reference",))
    COMPARE = "compare", GroupRule(after=("reference", "candidate"), imports_the_candidate=False)
    SPEED = "speed", GroupRule(repeated=True, pointless_if_forecast_raised=True)
    SYMBOLS = "symbols", GroupRule(pointless_if_forecast_raised=True)
    MEMORY = "memory", GroupRule(pointless_if_forecast_raised=True, only_while_it_can_pass=True)
    MEMORY_REFERENCE = (
        "memory_reference",
        GroupRule(pointless_if_forecast_raised=True, only_while_it_can_pass=True, imports_the_candidate=False),
    )
    # without the GPU, if there is one: what is compiled for a described GPU must not ask it
    CUDA_LOWERING = "cuda_lowering", GroupRule(variables={"CUDA_VISIBLE_DEVICES": ""})
    # Triton chooses its interpreter when it is imported
    CUDA_EQUIVALENCE = (
        "cuda_equivalence",
        GroupRule(variables={"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}, pointless_if_forecast_raised=True),
    )
    # a process of its own: its backend compiles with inductor's caches switched off
    CUDAGRAPH = "cudagraph", GroupRule(beside="candidate")


@dataclass(frozen=True)
class SuiteRule:
    """Says where a suite's code is and which processes it takes part in.

    A runner is `module:function` below `toto_compat.cell.suites`; it takes the group's session and returns evidence, or
    a measurement that `combine` turns into evidence together with those of the suite's other processes.
    """

    version: int  # raised when what is measured changes: stored results of another version are stale
    runners: Mapping[Group, str]
    combine: str = ""
    needs_symbols: bool = False  # runs where the user gave series of their own, and only there
    over_repeats: bool = False  # takes every repeat of a repeated group; the others are told by the first
    without_gpu: bool = False  # works on CUDA code where there is no GPU: in a CUDA build that runs on the CPU, only
    by_default: bool = True  # else a profile has to name it: it takes minutes


class Suite(Table):
    """In the order in which a group runs them; a suite may rely on the evidence of those before it."""

    rule: SuiteRule

    EQUIVALENCE = (
        "equivalence",
        SuiteRule(
            version=7,
            runners={
                Group.REFERENCE: "equivalence.reference:run_reference",
                Group.CANDIDATE: "equivalence.candidate:run_candidate",
                Group.COMPARE: "equivalence.compare:run_compare",
            },
        ),
    )
    DETERMINISM = (
        "determinism",
        SuiteRule(
            version=2,
            runners={
                Group.REFERENCE: "equivalence.reference:run_reference_once",
                Group.CANDIDATE: "equivalence.candidate:run_candidate_once",
                Group.COMPARE: "equivalence.determinism:run_determinism",
            },
        ),
    )
    RECOMPILE = "recompile", SuiteRule(version=5, runners={Group.OBSERVE: "recompile:run_recompile"})
    CUDA_LOWERING = (
        "cuda_lowering",
        SuiteRule(version=1, runners={Group.CUDA_LOWERING: "cuda_lowering:run_cuda_lowering"}, without_gpu=True),
    )
    CUDA_EQUIVALENCE = (
        "cuda_equivalence",
        SuiteRule(
            version=2,
            runners={Group.CUDA_EQUIVALENCE: "cuda_equivalence:run_cuda_equivalence"},
            without_gpu=True,
            by_default=False,
        ),
    )
    CUDAGRAPH = "cudagraph", SuiteRule(version=1, runners={Group.CUDAGRAPH: "cudagraph:run_cudagraph"})
    # in processes of its own: all batches, mean and samples, would make a cache that recompiles slower to time, and
    # what the eager contestants of the speed suite leave behind would count as the candidate's
    MEMORY = (
        "memory",
        SuiteRule(
            version=3,
            runners={Group.MEMORY: "memory:run_compiled", Group.MEMORY_REFERENCE: "memory:run_reference"},
            combine="memory:combine",
        ),
    )
    SPEED = (
        "speed",
        SuiteRule(
            version=5, runners={Group.SPEED: "speed:run_speed"}, combine="speed_figures:combine", over_repeats=True
        ),
    )
    SYMBOLS = "symbols", SuiteRule(version=2, runners={Group.SYMBOLS: "symbols:run_symbols"}, needs_symbols=True)


WITHOUT_GPU = tuple(suite for suite in Suite if suite.rule.without_gpu)
BY_DEFAULT = tuple(suite for suite in Suite if suite.rule.by_default and not suite.rule.needs_symbols)
SUITE_LINE = "::suite "  # what a cell prints when a suite begins or ends: '::suite recompile start'


def suites_of(group: Group) -> tuple[Suite, ...]:
    """The suites that run in a group's process, in order."""
    return tuple(suite for suite in Suite if group in suite.rule.runners)
