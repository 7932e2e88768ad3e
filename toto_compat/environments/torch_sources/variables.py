"""The environment variables that torch reads, per release. What torch's C++ libraries read is not in the table."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toto_compat.environments.torch_sources import spans

TABLE = "variables.json"
_NAME = re.compile(r"^(TORCH|PYTORCH|AOT|INDUCTOR)[A-Z0-9_]+$")
_READERS = frozenset({"get", "getenv", "setdefault", "pop"})
# Where a setting of a config module names its variable.
_KEYWORDS = frozenset({"env_name_force", "env_name_default", "env_name"})


@dataclass(frozen=True)
class Variable:
    """One variable: the releases that read it, and what its value is compared with, if with anything."""

    name: str
    releases: tuple[str, ...]
    compared_with: tuple[str, ...]
    read_in: str


@dataclass(frozen=True)
class Table:
    releases: tuple[str, ...]  # oldest first
    variables: Mapping[str, Variable]

    def nearest(self, torch: str) -> str:
        """Find the release of the table that speaks for a torch: the same, else the newest that is not newer."""
        return spans.nearest(torch, self.releases)


@cache
def load_table() -> Table:
    document = spans.load(TABLE)
    releases = tuple(document["releases"])
    variables = {
        name: Variable(
            name,
            tuple(release for release, _ in spans.unfolded([(*span, None) for span in held["read_by"]], releases)),
            tuple(held.get("compared_with", ())),
            held["in"],
        )
        for name, held in document["variables"].items()
    }
    return Table(releases, variables)


# per variable: the files that read it, and what they compare it with
Read = Mapping[str, tuple[set[str], set[str]]]


def known() -> dict[str, Read]:
    """Return the table as it was read, release by release."""
    table = load_table()
    return {
        release: {
            name: ({one.read_in}, set(one.compared_with))
            for name, one in table.variables.items()
            if release in one.releases
        }
        for release in table.releases
    }


def variables_of(files: Iterable[tuple[str, bytes]]) -> dict[str, tuple[set[str], set[str]]]:
    """Find every variable that these sources read: name -> (files, what it is compared with)."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path, content in files:
        if b"env" not in content:
            continue
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError):
            continue  # a template
        for name, compared in _read_in(tree):
            where, values = found.setdefault(name, (set(), set()))
            where.add(path)
            values.update(compared)
    return found


class _Resolved(ast.NodeTransformer):
    """Puts a module's own string constants in the place of their names: LOG_ENV_VAR = "TORCH_LOGS"."""

    def __init__(self, tree: ast.Module) -> None:
        self._values = {
            target.id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
            for target in statement.targets
            if isinstance(target, ast.Name) and _constants(statement.value)
        }

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _read_in(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    tree = _Resolved(tree).visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            name = _name_read(node.left)
            if name and isinstance(node.ops[0], ast.Eq) and isinstance(node.comparators[0], ast.Constant):
                yield name, {str(node.comparators[0].value)}
            elif isinstance(node.ops[0], ast.In | ast.NotIn) and "environ" in ast.dump(node.comparators[0]):
                yield from ((text, set()) for text in _constants(node.left))
        elif isinstance(node, ast.Call | ast.Subscript):
            name = _name_read(node)
            if name:
                yield name, set()
            for keyword in getattr(node, "keywords", ()):
                if keyword.arg in _KEYWORDS:
                    yield from ((text, set()) for text in _constants(keyword.value))


def _name_read(node: ast.AST) -> str:
    """Name the variable that an expression reads: os.environ.get("X"), os.getenv("X"), os.environ["X"]."""
    argument: ast.AST | None = None
    if isinstance(node, ast.Call) and node.args:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _READERS and "env" in ast.dump(called):
            argument = node.args[0]
        elif isinstance(called, ast.Name) and "env" in called.id.lower():
            argument = node.args[0]  # a reader of torch's own
    elif isinstance(node, ast.Subscript) and "environ" in ast.dump(node.value):
        argument = node.slice
    return next(iter(_constants(argument)), "") if argument is not None else ""


def _constants(node: ast.AST) -> list[str]:
    values = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [value for value in values if _NAME.match(value)]


def is_source(name: str) -> bool:
    return (
        name.startswith("torch/") and name.endswith(".py") and not name.startswith(("torch/testing/", "torch/include/"))
    )


def installed_sources(torch_folder: Path) -> Iterator[tuple[str, bytes]]:
    """Read the same files of an installed torch."""
    for path in sorted(torch_folder.rglob("*.py")):
        name = f"torch/{path.relative_to(torch_folder).as_posix()}"
        if is_source(name):
            yield name, path.read_bytes()


def document(read: Mapping[str, Read]) -> dict[str, object]:
    """Fold what was read per release into the table."""
    releases = spans.ordered(read)
    variables = {}
    for name in sorted({name for found in read.values() for name in found}):
        reading = {release: None for release in releases if name in read[release]}
        newest = read[list(reading)[-1]][name]
        held: dict[str, object] = {
            "read_by": [[first, last] for first, last, _ in spans.spans(reading, releases)],
            "in": min(newest[0]),
        }
        if newest[1]:
            held["compared_with"] = sorted(newest[1])
        variables[name] = held
    return {"schema": 1, "releases": releases, "variables": variables}
