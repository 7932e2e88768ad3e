"""What a compiler did, as data: the one vocabulary of the suites, the log analyzer and incident reproduction."""

from enum import StrEnum

from toto_compat.contract.strict_model import StrictModel


class EventKind(StrEnum):
    RECOMPILE = "recompile"  # a guard failed and dynamo compiled the function again
    GRAPH_BREAK = "graph_break"  # dynamo stopped capturing and went back to Python
    RECOMPILE_LIMIT = "recompile_limit"  # dynamo gave up on a function: it runs eager from here on
    CUDAGRAPH_SKIP = "cudagraph_skip"  # inductor did not use CUDA graphs for a graph
    CUDAGRAPH_PARTITION = "cudagraph_partition"  # inductor split a graph around an op (torch 2.9 and later)
    DYNAMIC_SHAPE = "dynamic_shape"  # symbolic-shape trouble: a guard that could not be expressed
    COMPILE_SETTING = "compile_setting"  # the application said how it compiles
    BUCKET_COMPILE = "bucket_compile"  # fixed_size compiles its step for a shape: dynamo's log shows no recompile
    BUCKET_DROP = "bucket_drop"  # fixed_size holds too many shapes and forgot one: it compiles again if it comes back
    # From here on only logs tell: inside a cell the exception itself arrives.
    CUDAGRAPH_OVERWRITTEN = "cudagraph_overwritten"  # a tensor was read after a later replay wrote over it
    OUT_OF_MEMORY = "out_of_memory"  # of the GPU, or killed by the kernel
    BACKEND_ERROR = "backend_error"  # inductor, or another backend, could not compile a graph
    TRITON_ERROR = "triton_error"  # a kernel did not compile, load or run
    DYNAMO_ERROR = "dynamo_error"  # dynamo could not capture what it had to
    NOT_A_NUMBER = "not_a_number"  # NaN where a forecast or its parameters should be


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Event(StrictModel):
    """One thing the compiler did. Empty string or None: the source did not say."""

    kind: EventKind
    severity: Severity
    function: str = ""  # 'positional_embedding'
    file: str = ""  # shortened to the part from the package on: 'toto/model/attention.py'
    line: int | None = None
    compile_id: str = ""  # '6/8': frame 6, compilation 8 of it
    reason: str = ""  # as torch said it: '6/7: kv_cache._current_idx[7] == 0'
    reasons: tuple[str, ...] = ()  # every failed guard of a recompile, the first of which is `reason`
    normalised_reason: str = ""  # numbers, names and paths replaced: 'kv_cache._current_idx[N] == N'
    limit: int | None = None  # of a limit hit
    limit_name: str = ""  # 'recompile_limit', before torch 2.7 'cache_size_limit', or accumulated_...
    count: int = 1  # 'mutated inputs (8 instances)'
    stack: tuple[str, ...] = ()  # user frames 'file:line in function', where torch gave them
    source: str = ""  # '<log file>:<line>' or 'live'
    time: str = ""  # as the log has it, see logs/times.py
    logged_from: str = ""  # the torch source line in the logging prefix: 'torch/_dynamo/convert_frame.py:1358'
