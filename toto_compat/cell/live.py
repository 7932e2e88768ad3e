"""What the compiler does in this process, as it happens: events, compilations started, graphs."""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, TracebackType
from typing import Any, Self
from unittest import mock

import torch
import torch._dynamo

# An artifact logger exists once its module is imported.
import torch._inductor.cudagraph_trees
import torch._inductor.cudagraph_utils
import torch._inductor.scheduler
import torch._logging._internal as torch_logging
from torch._dynamo import convert_frame, symbolic_convert
from torch._dynamo.exc import SkipFrame
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

from toto_compat.contract.bucket_messages import BUCKET_LOGGER
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.log_line import LONGEST_LINE, LogLine, normalise_reason, printable, shorten_path
from toto_compat.contract.torch_messages import LIVE, SEVERITIES, parse_messages

# Turned on for us alone. Which of the last two carries cudagraph skips depends on the release; both exist on all.
_ARTIFACTS = ("recompiles", "graph_breaks", "perf_hints", "cudagraphs")


WITHOUT_DYNAMO = "without dynamo/0"  # in place of a compile id: a first compilation, as of a code object of its own


@dataclass(frozen=True)
class CompileStart:
    """Dynamo began to compile a frame: a recompile, a new frame, a new code object, or an attempt over the limit."""

    compile_id: str
    function: str
    file: str
    line: int


@dataclass
class _Compilation:
    """A frame that is being compiled; tracing it may begin anew several times."""

    start: CompileStart
    breaks_logged: int = 0


@dataclass
class Phase:
    """Holds what happened between two marks."""

    name: str
    events: list[Event] = field(default_factory=list)
    compile_starts: list[CompileStart] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)  # torch's own, as differences: 'stats.unique_graphs'

    @property
    def graphs(self) -> int:
        """Graphs that dynamo handed to the backend."""
        return self.counters["stats.unique_graphs"]

    @property
    def cudagraph_skips(self) -> int:
        """Graphs that Inductor ran without CUDA graphs although the mode asked for them, by its own counter."""
        return self.counters["inductor.cudagraph_skips"]

    def of_kind(self, kind: EventKind) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind is kind]

    def count(self, kind: EventKind) -> int:
        """Tell how many events of one kind."""
        return len(self.of_kind(kind))


class CompilerWatch:
    """Watches the compiler of this process while it is entered. `mark` begins a phase with counts of its own.

    Torch's records come here and not to the console; what was logged before still is, and all is put back at the end.
    """

    def __init__(self, first_phase: str = "watch") -> None:
        self.phases: list[Phase] = [Phase(first_phase)]
        self._counters_before: Counter[str] = Counter()
        self._compilations: list[_Compilation] = []  # under way, the innermost last
        self._undo = ExitStack()
        self._watching = False

    def __enter__(self) -> Self:
        self._counters_before = _flat_counters()
        with ExitStack() as undo:
            undo.enter_context(_torch_records_to(self._record))
            undo.enter_context(_bucket_records_to(self._record))
            undo.enter_context(_every_graph_break_logged())
            undo.enter_context(_compilations_within(self._compilation))
            undo.enter_context(_inductor_compilations_to(self._inductor_started))
            undo.enter_context(_graph_breaks_to(self._graph_broke))
            self._undo = undo.pop_all()
        self._watching = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._settle_counters()
        self._watching = False
        self._undo.close()

    def mark(self, name: str) -> Phase:
        """End the current phase and begin one called `name`."""
        self._settle_counters()
        phase = Phase(name)
        self.phases.append(phase)
        return phase

    def phase(self, name: str) -> Phase:
        """Everything that happened under this name, summed if it was marked more than once."""
        return self._sum(name, [phase for phase in self.phases if phase.name == name])

    @property
    def total(self) -> Phase:
        """Everything since the watch began."""
        return self._sum("total", self.phases)

    @property
    def events(self) -> list[Event]:
        """Every event since the watch began, in order."""
        return self.total.events

    @property
    def compile_starts(self) -> list[CompileStart]:
        """Every compilation started since the watch began, whether or not the recompile log knows of it."""
        return self.total.compile_starts

    @property
    def graphs(self) -> int:
        """Graphs compiled since the watch began."""
        return self.total.graphs

    def _sum(self, name: str, phases: list[Phase]) -> Phase:
        self._settle_counters()
        whole = Phase(name)
        for phase in phases:
            whole.events += phase.events
            whole.compile_starts += phase.compile_starts
            whole.counters += phase.counters
        return whole

    def _settle_counters(self) -> None:
        if not self._watching:
            return
        now = _flat_counters()
        # Something cleared torch's counters: then all they hold is new. Counter's own minus drops what fell.
        self.phases[-1].counters += Counter(
            {
                name: value - before if value >= (before := self._counters_before[name]) else value
                for name, value in now.items()
            }
        )
        self._counters_before = now

    def _record(self, record: logging.LogRecord) -> None:
        events = _events_of(record)
        self.phases[-1].events += events
        if self._compilations:
            self._compilations[-1].breaks_logged += sum(event.kind is EventKind.GRAPH_BREAK for event in events)

    @contextmanager
    def _compilation(self, start: CompileStart) -> Iterator[None]:
        self.phases[-1].compile_starts.append(start)
        self._compilations.append(_Compilation(start))
        try:
            yield
        finally:
            self._compilations.pop()

    def _inductor_started(self, graph: Any) -> None:
        """Count what is compiled without dynamo: what dynamo compiles is counted there."""
        if not self._compilations:
            self.phases[-1].compile_starts.append(_without_dynamo(graph))

    def _graph_broke(self, reason: str, stack: Sequence[FrameSummary]) -> None:
        if self._compilations and not self._compilations[-1].breaks_logged:
            self.phases[-1].events.append(_unlogged_break(self._compilations[-1].start, reason, stack))


def _without_dynamo(graph: Any) -> CompileStart:
    """Name a graph that somebody gave to Inductor by hand by where that was done: the frame that is nearest to it."""
    torchs = str(Path(torch.__file__).parent)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((torchs, __file__)):
        frame = frame.f_back
    if frame is None:
        return CompileStart(WITHOUT_DYNAMO, str(type(graph).__name__), "", 0)
    code = frame.f_code
    return CompileStart(WITHOUT_DYNAMO, code.co_name, shorten_path(code.co_filename), frame.f_lineno)


def _flat_counters() -> Counter[str]:
    return Counter(
        {f"{group}.{name}": value for group, values in list(counters.items()) for name, value in list(values.items())}
    )


def _events_of(record: logging.LogRecord) -> list[Event]:
    """A record as the lines a log would have, through the log's own grammar."""
    artifact = getattr(logging.getLogger(record.name), "artifact_name", None)
    message = record.getMessage()
    if record.exc_info:
        message += "\n" + logging.Formatter().formatException(record.exc_info)
    compile_id = torch._guards.CompileContext.current_compile_id()
    said = LogLine(
        number=0,
        text="",
        process=str(record.process or 0),
        torch_prefix=True,
        logged_from=f"{shorten_path(record.pathname)}:{record.lineno}",
        compile_id=str(compile_id) if compile_id is not None else "",
    )
    lines = (replace(said, text=printable(line[:LONGEST_LINE])) for line in message.splitlines())
    events = parse_messages(lines, LIVE)
    # Torch's advice on Tensor.item() is a warning of its own beside the graph break that it is about.
    return [event for event in events if event.kind is not EventKind.GRAPH_BREAK or artifact == "graph_breaks"]


def _unlogged_break(start: CompileStart, reason: str, stack: Sequence[FrameSummary]) -> Event:
    frames = [(shorten_path(frame.filename), frame.lineno, frame.name) for frame in stack]
    file, line, function = frames[-1] if frames else (start.file, start.line, start.function)
    return Event(
        kind=EventKind.GRAPH_BREAK,
        severity=SEVERITIES[EventKind.GRAPH_BREAK],
        function=function,
        file=file,
        line=line,
        compile_id=start.compile_id,
        reason=reason,
        normalised_reason=normalise_reason(reason),
        stack=tuple(f"{file}:{line} in {function}" for file, line, function in frames),
        source=LIVE,
    )


class _RecordHandler(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], None], *, artifacts: bool) -> None:
        super().__init__(logging.DEBUG)
        self._take = take
        self._artifacts = artifacts

    def emit(self, record: logging.LogRecord) -> None:
        # An artifact's record may propagate to the handler of its parent as well: each handler takes only its kind.
        if ("__" in record.name.rpartition(".")[2]) is self._artifacts:
            self._take(record)


@contextmanager
def _torch_records_to(take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Send what torch logs about compilation to `take`.

    Not through torch._logging.set_logs: it prints to the console, and does nothing at all when TORCH_LOGS is set.
    """
    registry, state = torch_logging.log_registry, torch_logging.log_state
    artifacts = [name for name in _ARTIFACTS if name in registry.artifact_names]
    artifact_loggers = [
        logging.getLogger(qualified_name)
        for qualified_name in sorted(registry.get_artifact_log_qnames())
        if qualified_name.rpartition("__")[2] in artifacts
    ]
    parents = [logging.getLogger(qualified_name) for qualified_name in sorted(registry.get_log_qnames())]
    already_on = {name for name in artifacts if state.is_artifact_enabled(name)}
    artifact_handler, parent_handler = _RecordHandler(take, artifacts=True), _RecordHandler(take, artifacts=False)
    before = [(logger, logger.level, logger.propagate) for logger in artifact_loggers]
    try:
        for logger in artifact_loggers:
            if logger.artifact_name not in already_on:  # type: ignore[attr-defined]
                logger.propagate = False
            logger.setLevel(logging.DEBUG)
            logger.addHandler(artifact_handler)
        for logger in parents:
            logger.addHandler(parent_handler)
        # Dynamo asks this state, not the logger, whether it should work out why it recompiles.
        for name in artifacts:
            state.enable_artifact(name)
        yield
    finally:
        for name in set(artifacts) - already_on:
            state.artifact_names.discard(name)
        for logger, level, propagate in before:
            logger.removeHandler(artifact_handler)
            logger.setLevel(level)
            logger.propagate = propagate
        for logger in parents:
            logger.removeHandler(parent_handler)


@contextmanager
def _bucket_records_to(take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Send what fixed_size says about its buckets to `take`, also below the level that the application listens at."""
    logger = logging.getLogger(BUCKET_LOGGER)
    level, propagate, handler = logger.level, logger.propagate, _RecordHandler(take, artifacts=False)
    if not logger.isEnabledFor(logging.INFO):
        logger.propagate = False
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def _every_graph_break_logged() -> Iterator[None]:
    """Dynamo logs a graph break in full once per place, up to 2.5 not at all after that: make every one the first."""
    checker = getattr(symbolic_convert, "graph_break_dup_warning_checker", None)
    if checker is None:
        yield
        return
    with mock.patch.object(checker, "add", lambda _key: True):
        yield


@contextmanager
def _graph_breaks_to(take: Callable[[str, Sequence[FrameSummary]], None]) -> Iterator[None]:
    """Report every frame whose tracing ended in a graph break, logged or not.

    The log is not enough: 2.5 does not write a branch on a tensor's value there, nor an attribute that cannot be set,
    and 2.9 does not yet write a break that cannot be resumed, as in a try block.
    """

    def run_and_report(translator: Any) -> None:
        try:
            original(translator)
        except SkipFrame as skipped:
            reason, *_ = str(skipped).splitlines() or [""]
            if "graph break" in reason:  # in a loop: the whole function is left to Python
                take(reason, [translator.frame_summary()])
            raise
        ended = getattr(translator.output, "compile_subgraph_reason", None)
        if ended is not None and ended.graph_break:
            take(ended.reason, ended.user_stack)

    original = symbolic_convert.InstructionTranslator.run
    with mock.patch.object(symbolic_convert.InstructionTranslator, "run", run_and_report):
        yield


@contextmanager
def noting_graph_breaks() -> Iterator[list[Event]]:
    """Collect graph breaks alone, with their lines, and leave torch's logs as they are."""
    found: list[Event] = []
    anywhere = CompileStart("", "", "", 0)
    with _graph_breaks_to(lambda reason, stack: found.append(_unlogged_break(anywhere, reason, stack))):
        yield found


@contextmanager
def _inductor_compilations_to(take: Callable[[Any], None]) -> Iterator[None]:
    """Report every graph that Inductor begins to compile or to look up, whoever hands it over."""
    original = getattr(compile_fx, "_compile_fx_inner", None)
    if original is None:  # torch 2.4
        yield
        return

    def report_and_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        take(graph)
        return original(graph, *args, **kwargs)

    # looked up by its name at each call, unlike `compile_fx_inner`, which is the default of an argument
    with mock.patch.object(compile_fx, "_compile_fx_inner", report_and_compile):
        yield


@contextmanager
def _compilations_within(around: Callable[[CompileStart], AbstractContextManager[None]]) -> Iterator[None]:
    """Put `around` around every call of dynamo's one function that compiles a frame.

    The recompile log is not enough: a fresh code object per step is a first compilation each time. The compile-start
    callbacks are not either: they fire for the outermost of nested compilations only.
    """
    original = convert_frame._compile

    def compile_and_report(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        start = CompileStart(
            str(kwargs.get("compile_id", "")), code.co_name, shorten_path(code.co_filename), code.co_firstlineno
        )
        with around(start):
            return original(code, *args, **kwargs)

    convert_frame._compile = compile_and_report
    try:
        yield
    finally:
        convert_frame._compile = original
