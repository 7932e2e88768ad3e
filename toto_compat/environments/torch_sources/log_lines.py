"""Where torch's compiler logs from, per release: the source lines that stand in the prefixes of a log.

`torch/_dynamo/convert_frame.py:1358]` before the warning that dynamo gave up on a function is torch 2.9.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from toto_compat.environments.torch_sources import spans

TABLE = "log_lines.json"
# Those whose lines production logs hold: limits, recompiles, graph breaks, shapes, CUDA graphs, failures of a compile.
FILES = frozenset(
    {
        "torch/_dynamo/convert_frame.py",
        "torch/_dynamo/guards.py",
        "torch/_dynamo/output_graph.py",
        "torch/_dynamo/symbolic_convert.py",
        "torch/_dynamo/variables/tensor.py",
        "torch/_inductor/compile_fx.py",
        "torch/_inductor/cudagraph_trees.py",
        "torch/_inductor/cudagraph_utils.py",
        "torch/_inductor/output_code.py",
        "torch/_inductor/scheduler.py",
        "torch/_inductor/utils.py",
        "torch/fx/experimental/symbolic_shapes.py",
    }
)
_METHODS = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "log"})
_LONGEST = 60  # of a statement's text: enough to know it by

# per file and statement: the lines it stands at
Read = Mapping[str, Mapping[str, list[int]]]


@dataclass(frozen=True)
class Statement:
    """A log statement: what it says, as far as that is constant, else its source."""

    says: str
    releases: tuple[str, ...]


@dataclass(frozen=True)
class LogLines:
    """The table, by place: a file from the package on, and a line."""

    releases: tuple[str, ...]  # oldest first
    places: Mapping[tuple[str, int], tuple[Statement, ...]]

    def statements(self, file: str, line: int) -> tuple[Statement, ...]:
        return self.places.get((file, line), ())


@cache
def load_log_lines() -> LogLines:
    document = spans.load(TABLE)
    found: dict[tuple[str, int], list[Statement]] = {}
    for file, statements in document["files"].items():
        for says, lines in statements.items():
            for line, releases in _by_line(lines).items():
                found.setdefault((file, line), []).append(Statement(says, tuple(releases)))
    return LogLines(tuple(document["releases"]), {place: tuple(held) for place, held in found.items()})


def _by_line(lines: Mapping[str, list[int]]) -> dict[int, list[str]]:
    by_line: dict[int, list[str]] = {}
    for release, stands_at in lines.items():
        for line in stands_at:
            by_line.setdefault(line, []).append(release)
    return by_line


def log_lines_of(files: Iterable[tuple[str, bytes]]) -> dict[str, dict[str, list[int]]]:
    """Find every log statement in those of these sources that the table is about."""
    found: dict[str, dict[str, list[int]]] = {}
    for path, content in files:
        if path not in FILES:
            continue
        for says, line in _statements(ast.parse(content)):
            found.setdefault(path, {}).setdefault(says, []).append(line)
    return found


def _statements(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr in _METHODS and "log" in ast.unparse(node.func.value).lower():
            # Python names the line of the method's name, also where the call goes over several lines.
            yield _says(node), node.func.end_lineno or node.lineno


def _says(call: ast.Call) -> str:
    """Give the constant beginning of a message, or the call's source where it has none."""
    message = call.args[0]
    if isinstance(message, ast.JoinedStr):
        first = message.values[0] if message.values else None
        constant = first.value if isinstance(first, ast.Constant) else ""
    else:
        constant = message.value if isinstance(message, ast.Constant) else ""
    text = constant if isinstance(constant, str) else ""
    beginning = text.partition("\n")[0].partition("%")[0].strip()
    return (beginning if len(beginning) >= 8 else f"= {' '.join(ast.unparse(call).split())}")[:_LONGEST]


def known() -> dict[str, Read]:
    """Return the table as it was read, release by release."""
    document = spans.load(TABLE)
    read: dict[str, dict[str, dict[str, list[int]]]] = {release: {} for release in document["releases"]}
    for file, statements in document["files"].items():
        for says, lines in statements.items():
            for release, stands_at in lines.items():
                read[release].setdefault(file, {})[says] = stands_at
    return dict(read)


def document(read: Mapping[str, Read]) -> dict[str, object]:
    """Fold what was read per release into the table."""
    releases = spans.ordered(read)
    files: dict[str, dict[str, dict[str, list[int]]]] = {}
    for release in releases:
        for file, statements in read[release].items():
            for says, lines in statements.items():
                files.setdefault(file, {}).setdefault(says, {})[release] = lines
    return {
        "schema": 1,
        "releases": releases,
        "files": {file: dict(sorted(files[file].items())) for file in sorted(files)},
    }
