"""The gates, one row each: which figure of which suite decides, by which limit, and how it is shown and compared.

All of it is host side: a cell measures figures and knows no gate, only which of its figures must keep a limit for it to
PASS. A new gate is a row here and its test; judging, the
table's columns, the comparison of runs, the schema of matrix.yaml and docs/gates.md read the rows.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from toto_compat.contract.events import EventKind
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.suites import Suite
from toto_compat.contract.table import Table


class Comparison(StrEnum):
    """Says how two runs of one gate are told apart from noise."""

    STATUS = "status"  # only a change of PASS or FAIL counts
    COUNT = "count"  # repeats exactly on the same code, so any change is real
    INTERVAL = "interval"  # has an interval: a change is one that both intervals agree on
    MARGIN = "margin"  # differs a little between two processes of the same code: `margin` says how much
    SPREAD = "spread"  # is itself a spread: one outlier doubles it


@dataclass(frozen=True)
class Column:
    """Places a figure in the tables. Gates with the same `short` heading share a column, joined by a slash."""

    title: str  # in Markdown
    short: str = ""  # in the terminal, which has room for few; empty: not there
    pattern: str = "{:g}"  # empty: PASS or FAIL instead of the number
    shown_if_not_applicable: bool = False  # a prediction is worth a look


@dataclass(frozen=True)
class GateRule:
    """Holds what a gate is."""

    suite: Suite
    meaning: str  # one sentence for the docs
    default: GateLimit | None  # None: off unless matrix.yaml sets a limit
    figure: str = ""  # its name in the suite's evidence; empty: the gate's own
    larger_is_better: bool = False
    comparison: Comparison = Comparison.STATUS
    margin: float = 0.10  # the smallest change that counts: 20 % must be seen, a few per cent come from memory layout
    reference: str = ""  # the same figure of upstream eager: where that breaks the limit too, nothing is decided
    is_a_time: bool = False  # decides nothing where the machine was disturbed while it was taken
    has_to_be_shown: bool = False  # that it is past its limit: by its whole interval, else nothing is decided
    nan_is_a_fault: bool = False  # of the forecast; else NaN means that nothing was measured
    explained_by: tuple[EventKind, ...] = ()  # events that say why it failed
    only_on: Device | None = None  # elsewhere it is not applicable, and `elsewhere` says why
    elsewhere: str = ""
    not_in_modes: tuple[Literal["default", "reduce-overhead", "max-autotune"], ...] = ()
    in_those_modes: str = ""  # why it is not applicable there
    prediction: str = "{:g}"  # how a figure reads that is shown and decides nothing
    prediction_of_none: str = "0"
    column: Column | None = None  # None: on the page and in compatibility.json only


class Gate(Table):
    """Lists the gates in the order in which they decide: the first FAIL (else INCONCLUSIVE) names the verdict."""

    rule: GateRule

    @property
    def figure(self) -> str:
        """Return the name of its figure in the evidence."""
        return self.rule.figure or self.value

    EQUIVALENCE = (
        "equivalence",
        GateRule(
            suite=Suite.EQUIVALENCE,
            meaning="Worst error of the forecast against eager over what eager's own noise allows.",
            default=GateLimit(max=1.0),
            comparison=Comparison.MARGIN,
            # rounding differs between machines and releases; half as much again is a drift, also below the limit
            margin=0.5,
            nan_is_a_fault=True,
            column=Column("equivalence", "equiv", pattern=""),
        ),
    )
    DETERMINISM = (
        "determinism",
        GateRule(
            suite=Suite.DETERMINISM,
            meaning="Largest difference between two runs with one seed in one process.",
            default=GateLimit(max=0),
            nan_is_a_fault=True,
        ),
    )
    MAE_SIGMA = (
        "mae_sigma",
        GateRule(
            suite=Suite.EQUIVALENCE,
            meaning="Spread of the sampled forecast's MAE over seeds (sigma / mean), beyond eager's own.",
            default=GateLimit(max=0.01),
            nan_is_a_fault=True,
        ),
    )
    MAE_DELTA = (
        "mae_delta",
        GateRule(
            suite=Suite.EQUIVALENCE,
            meaning="Difference between compiled's and eager's MAE on held-out data, over eager's.",
            default=None,
            nan_is_a_fault=True,
        ),
    )
    MAE_TO_EAGER = (
        "mae_to_eager",
        GateRule(
            suite=Suite.EQUIVALENCE,
            meaning="Mean absolute difference between the compiled and the eager mean forecast.",
            default=None,
            nan_is_a_fault=True,
        ),
    )
    RECOMPILE_LIMIT = (
        "recompile_limit",
        GateRule(
            suite=Suite.RECOMPILE,
            meaning="How often dynamo gave a function up, warm-up included.",
            default=GateLimit(max=0),
            comparison=Comparison.COUNT,
            explained_by=(EventKind.RECOMPILE_LIMIT,),
        ),
    )
    COMPILE_ACTIVE = (
        "compile_active",
        GateRule(
            suite=Suite.RECOMPILE,
            meaning="Share of eager's operations that compiled code took over, in the decode step with the least, and "
            "in the pass over the context where a forecast of one patch has nothing else.",
            default=GateLimit(min=0.8),
            larger_is_better=True,
            comparison=Comparison.COUNT,
        ),
    )
    RECOMPILES = (
        "recompiles",
        GateRule(
            suite=Suite.RECOMPILE,
            meaning="Compilations started after warm-up.",
            default=GateLimit(max=0),
            comparison=Comparison.COUNT,
            explained_by=(EventKind.RECOMPILE,),
            column=Column("recompiles after warm-up", "recomp."),
        ),
    )
    RECOMPILES_TOTAL = (
        "recompiles_total",
        GateRule(
            suite=Suite.RECOMPILE,
            meaning="Recompiles in warm-up and after it, without the one that each announced batch needs.",
            default=GateLimit(max=9),
            comparison=Comparison.COUNT,
            explained_by=(EventKind.RECOMPILE,),
            column=Column("total", "recomp."),
        ),
    )
    GRAPH_BREAKS = (
        "graph_breaks",
        GateRule(
            suite=Suite.RECOMPILE,
            meaning="Graph breaks in the forecast.",
            default=GateLimit(max=0),
            comparison=Comparison.COUNT,
            explained_by=(EventKind.GRAPH_BREAK,),
            column=Column("graph breaks", "breaks"),
        ),
    )
    CUDAGRAPHS = (
        "cudagraphs",
        GateRule(
            suite=Suite.CUDAGRAPH,
            meaning="Graphs, parts of graphs and steps that ran without CUDA graphs.",
            default=GateLimit(max=0),
            comparison=Comparison.COUNT,
            explained_by=(EventKind.CUDAGRAPH_SKIP, EventKind.CUDAGRAPH_PARTITION),
            only_on=Device.CUDA,
            elsewhere="no CUDA graphs on a CPU",
            not_in_modes=("default",),
            in_those_modes="mode default does not use CUDA graphs",
            prediction="{:g} skipped or split",
            prediction_of_none="no reason to skip them",
            column=Column("CUDA graphs", shown_if_not_applicable=True),
        ),
    )
    TIMED_FORECASTS = (
        "timed_forecasts",
        GateRule(
            suite=Suite.SPEED,
            meaning="Error of the forecasts that were timed, over what eager's own noise allows.",
            default=GateLimit(max=1.0),
            nan_is_a_fault=True,
        ),
    )
    SPEEDUP = (
        "speedup",
        GateRule(
            suite=Suite.SPEED,
            meaning="Time of upstream eager over this cell's, lower end of the interval, of the timed forecast that "
            "gains least.",
            default=GateLimit(min=2.0),
            is_a_time=True,
            larger_is_better=True,
            comparison=Comparison.INTERVAL,
            column=Column("speedup", "speedup", pattern="{:.2f}x"),
        ),
    )
    SYMBOL_EQUIVALENCE = (
        "symbol_equivalence",
        GateRule(
            suite=Suite.SYMBOLS,
            meaning="Worst error of a forecast of your own series against eager, over what eager's own noise allows.",
            default=GateLimit(max=1.0),
            comparison=Comparison.MARGIN,
            margin=0.5,
            nan_is_a_fault=True,
        ),
    )
    SYMBOL_MAE = (
        "symbol_mae",
        GateRule(
            suite=Suite.SYMBOLS,
            meaning="Difference between compiled's and eager's MAE on held-out values of your series, over eager's.",
            default=GateLimit(max=0.01),
            nan_is_a_fault=True,
        ),
    )
    SYMBOL_RECOMPILES = (
        "symbol_recompiles",
        GateRule(
            suite=Suite.SYMBOLS,
            meaning="Compilations started while one of your series was forecast, after warm-up.",
            default=GateLimit(max=0),
            comparison=Comparison.COUNT,
        ),
    )
    SYMBOL_SPEEDUP = (
        "symbol_speedup",
        GateRule(
            suite=Suite.SYMBOLS,
            meaning="Time of upstream eager over this cell's on your series.",
            default=GateLimit(min=1.0),
            is_a_time=True,
            larger_is_better=True,
            comparison=Comparison.INTERVAL,
        ),
    )
    LATENCY_STABILITY = (
        "latency_stability",
        GateRule(
            suite=Suite.SPEED,
            meaning="How much more warm latency varies than upstream eager's in the same run, in milliseconds. Past "
            "its limit it is FAIL if the whole 95 % interval is, else INCONCLUSIVE.",
            default=GateLimit(max=2.0),
            is_a_time=True,
            has_to_be_shown=True,
            comparison=Comparison.SPREAD,
        ),
    )
    MEMORY = (
        "memory",
        GateRule(
            suite=Suite.MEMORY,
            meaning="Memory held beyond the imports, over upstream eager's plus 16 MB for every announced batch.",
            default=GateLimit(max=1.5),
            comparison=Comparison.MARGIN,
            column=Column("memory", pattern="{:.2f}x"),
        ),
    )
    MEMORY_GROWTH = (
        "memory_growth",
        GateRule(
            suite=Suite.MEMORY,
            meaning="Memory in MB that each warm forecast leaves behind.",
            default=GateLimit(max=0.05),
            reference="reference_memory_growth",
        ),
    )
