"""What a kind of compiler event means for a Toto forecast, and the next thing to do about it."""

import re
from dataclasses import dataclass

from toto_compat.contract.events import EventKind

_TRY_FIXED_SIZE = (
    "`nox -s matrix -- '*/fixed_size/*'` measures a cache without this; the table says where it can be used."
)
_LOG_REASONS = "run once with TORCH_LOGS=recompiles,graph_breaks and analyze that log: it names the failing guards."


@dataclass(frozen=True)
class Advice:
    meaning: str
    next_step: str


# First match wins; the empty pattern at the end of a kind matches what is left.
_ADVICE: tuple[tuple[EventKind, str, Advice], ...] = (
    (
        EventKind.RECOMPILE_LIMIT,
        r"_current_idx\[",
        Advice(
            "The KV cache keeps its position as Python ints, which dynamo takes for constants: each new value "
            "in each layer "
            "compiled the function again until the limit was reached. From then on it runs eager in this process.",
            _TRY_FIXED_SIZE + " A higher limit only buys more compilations.",
        ),
    ),
    (
        EventKind.RECOMPILE_LIMIT,
        r"size mismatch|stride mismatch|rank mismatch",
        Advice(
            "Input shapes kept changing until dynamo gave up on the function; from then on it runs eager in "
            "this process.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.RECOMPILE_LIMIT,
        r"^$",
        Advice(
            "Dynamo compiled a function too often and gave up on it: it runs eager from here on, and later recompile "
            "counts of 0 say nothing. The log does not say which guard failed.",
            _LOG_REASONS,
        ),
    ),
    (
        EventKind.RECOMPILE_LIMIT,
        "",
        Advice(
            "Dynamo compiled this function too often and gave up on it: it runs eager from here on, and later "
            "recompile "
            "counts of 0 say nothing.",
            "make the guarded value constant or a tensor; " + _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.RECOMPILE,
        r"size mismatch|stride mismatch|rank mismatch|\.size\(\)|\.stride\(\)",
        Advice(
            "An input came with another shape or stride than the one compiled for. Harmless while lengths are "
            "first seen; "
            "a recompile in every forecast costs seconds each.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.RECOMPILE,
        r"_current_idx\[|layer_idx|_idx == N",
        Advice(
            "A Python int that changes from layer to layer or from step to step is a constant to dynamo, so "
            "that every "
            "new value compiles again.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.RECOMPILE,
        "",
        Advice(
            "A guard failed and the function was compiled again. In warm-up that is expected; after it, each "
            "one stalls "
            "a forecast.",
            "make the guarded value constant, or keep it in a tensor; `nox -s matrix` counts the recompiles "
            "after warm-up.",
        ),
    ),
    (
        EventKind.GRAPH_BREAK,
        r"Tensor\.item|_local_scalar_dense|scalar_outputs",
        Advice(
            "The code reads a tensor's value back into Python, so the graph is cut there, and on a GPU the host "
            "waits for it.",
            _TRY_FIXED_SIZE + " capture_scalar_outputs removes the cut but keeps CUDA graphs off.",
        ),
    ),
    (
        EventKind.GRAPH_BREAK,
        r"graph_break",
        Advice(
            "The code asks for this graph break itself (torch._dynamo.graph_break()), as caches do that change "
            "Python state.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.GRAPH_BREAK,
        "",
        Advice(
            "Dynamo could not capture this place and went back to Python. Each one costs time in every step and "
            "is a place "
            "where more guards can fail.",
            "see the user stack in the log for the line; `nox -s matrix` counts the breaks of each cache.",
        ),
    ),
    (
        EventKind.CUDAGRAPH_SKIP,
        r"mutated inputs",
        Advice(
            "The graph writes into its inputs (the KV buffers), and Inductor does not know them to stay at one "
            "address, so it "
            "ran without CUDA graphs: reduce-overhead then gives little over default.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.CUDAGRAPH_SKIP,
        r"incompatible op",
        Advice(
            "The graph holds an operation that CUDA graphs cannot record, such as reading a scalar back to the host.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.CUDAGRAPH_SKIP,
        r"cpu device|multiple devices",
        Advice(
            "A tensor on the CPU takes part in the graph, so Inductor ran it without CUDA graphs.",
            "move it to the GPU before the compiled call; `nox -s matrix` shows the reason for each cache.",
        ),
    ),
    (
        EventKind.CUDAGRAPH_SKIP,
        "",
        Advice(
            "Inductor ran this graph without CUDA graphs. The forecast is right, but reduce-overhead gives "
            "little over default.",
            "`nox -s matrix` shows the reasons for each cache and release.",
        ),
    ),
    (
        EventKind.CUDAGRAPH_PARTITION,
        "",
        Advice(
            "Inductor (torch 2.9 and later) split the graph and left this part out of CUDA graphs; the rest "
            "still uses them.",
            "nothing, unless latency is short of the goal; then move the named operation out of the compiled step.",
        ),
    ),
    (
        EventKind.DYNAMIC_SHAPE,
        "",
        Advice(
            "A symbolic size met a condition that dynamo cannot express as a guard. It is a warning about "
            "dynamic shapes, "
            "not an error of the forecast.",
            _TRY_FIXED_SIZE,
        ),
    ),
    (
        EventKind.COMPILE_SETTING,
        "",
        Advice(
            "The application said how it compiles.",
            "nothing; the mode and backend are those to look up in the table of `nox -s matrix`.",
        ),
    ),
    (
        EventKind.BUCKET_COMPILE,
        r"not announced",
        Advice(
            "fixed_size met a shape that nobody announced and compiled its step for it: that forecast stalled for "
            "seconds. Dynamo's recompile log does not show it.",
            "announce it to compile_toto: batch_sizes (series times samples per batch), max_context and max_horizon; "
            "one forecast per number of variates belongs to the warm-up of the service.",
        ),
    ),
    (
        EventKind.BUCKET_COMPILE,
        "",
        Advice(
            "fixed_size compiled its step for a shape that was announced, or for the first forecast.",
            "nothing, if it is once per process and shape; more often means that the model is bound anew.",
        ),
    ),
    (
        EventKind.BUCKET_DROP,
        "",
        Advice(
            "fixed_size holds as many shapes as it may and forgot the one that was not used for longest. If that "
            "shape comes back, it is compiled again and stalls a forecast.",
            "bring the shapes down (pad batches to few sizes) or raise max_buckets of compile_toto; every bucket "
            "holds buffers and compiled code.",
        ),
    ),
)


def advice_for(kind: EventKind, normalised_reason: str) -> Advice:
    """The advice for a group of events."""
    return next(
        advice for of_kind, pattern, advice in _ADVICE if of_kind is kind and re.search(pattern, normalised_reason)
    )
