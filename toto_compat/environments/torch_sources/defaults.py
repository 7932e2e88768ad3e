"""The defaults of torch's compiler, per release: settings of its config modules and of the functions that cells call.

They are computed from the sources without torch: what a setting is on Linux, outside of the company that makes torch,
with no variable set. Where that cannot be said, the expression stands in the value's place.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from packaging.version import Version

from toto_compat.environments.torch_sources import spans
from toto_compat.environments.torch_sources.expressions import Unknown, value_of

TABLE = "defaults.json"
# config module -> what its settings are called by here: 'dynamo.recompile_limit'
MODULES = {
    "torch/_dynamo/config.py": "dynamo",
    "torch/_inductor/config.py": "inductor",
    "torch/_functorch/config.py": "functorch",
    "torch/fx/experimental/_config.py": "symbolic_shapes",
}
# function -> the file that defines it; its defaults are called 'dynamo.mark_static_address(guard)'
FUNCTIONS = {
    "torch.compile": ("torch/__init__.py", "compile"),
    "dynamo.mark_static_address": ("torch/_dynamo/decorators.py", "mark_static_address"),
    "dynamo.mark_dynamic": ("torch/_dynamo/decorators.py", "mark_dynamic"),
}
FILES = frozenset({*MODULES, *(file for file, _ in FUNCTIONS.values())})
# Its value is another setting's: {"alias": ...} in the table.
_ALIAS = "alias"

Read = Mapping[str, object]


@dataclass(frozen=True)
class Expression:
    """Stands for a default that cannot be computed without torch or the machine it runs on."""

    source: str


def torch_defaults(release: str) -> dict[str, Any]:
    """Return every default of a release by its name, e.g. {"dynamo.recompile_limit": 8, ...}.

    A value is plain data, or an Expression. An older name that torch keeps has the value of the newer one. A release
    that the table lacks is a KeyError; `default_releases` lists those that it has.
    """
    release = Version(release).public
    held = _by_release()[release]
    return {name: _decoded(held, value) for name, value in held.items()}


def older_names(release: str) -> dict[str, str]:
    """Return which settings a release keeps under an older name, by the newer one; none for one the table lacks."""
    held = _by_release().get(Version(release).public, {})
    return {str(value[_ALIAS]): name for name, value in held.items() if isinstance(value, dict) and _ALIAS in value}


def default_releases() -> tuple[str, ...]:
    """Return the releases of the table, oldest first."""
    return tuple(_by_release())


def _decoded(held: Mapping[str, Any], value: Any) -> Any:
    while isinstance(value, dict) and value.keys() == {_ALIAS}:
        value = held.get(value[_ALIAS], {"expression": f"alias of {value[_ALIAS]}"})
    if isinstance(value, dict) and value.keys() == {"expression"}:
        return Expression(value["expression"])
    return value


@cache
def _by_release() -> Mapping[str, Mapping[str, Any]]:
    return known()


def known() -> dict[str, dict[str, Any]]:
    """Return the table as it was read, release by release."""
    document = spans.load(TABLE)
    releases: list[str] = document["releases"]
    read: dict[str, dict[str, Any]] = {release: {} for release in releases}
    for name, folded in document["defaults"].items():
        for release, value in spans.unfolded(folded, releases):
            read[release][name] = value
    return read


def defaults_of(files: Iterable[tuple[str, bytes]]) -> dict[str, object]:
    """Compute the defaults that these sources set."""
    found: dict[str, object] = {}
    for path, content in files:
        if path not in FILES:
            continue
        tree = ast.parse(content)
        if path in MODULES:
            prefix = MODULES[path]
            names: dict[str, Any] = {}
            found.update({f"{prefix}.{name}": value for name, value in _settings(tree.body, "", names)})
        for called, (file, function) in FUNCTIONS.items():
            if file == path:
                found.update({f"{called}({name})": value for name, value in _signature(tree, function)})
    return found


def _settings(body: list[ast.stmt], prefix: str, names: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Give the assignments of a config module or of a class in it, conditions on the machine decided for Linux."""
    for statement in body:
        match statement:
            case ast.ClassDef():
                # a group of settings; one with methods is code
                if not any(isinstance(one, ast.FunctionDef) for one in statement.body):
                    yield from _settings(statement.body, f"{prefix}{statement.name}.", dict(names))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield from _setting(name, value, prefix, names)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield from _setting(name, value, prefix, names)
            case ast.If():
                try:
                    chosen = statement.body if value_of(statement.test, names) else statement.orelse
                except Unknown:
                    chosen = []
                yield from _settings(chosen, prefix, names)
            case _:
                pass


def _setting(name: str, value: ast.expr, prefix: str, names: dict[str, Any]) -> Iterator[tuple[str, object]]:
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Config"):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        alias = given.get("alias")
        if isinstance(alias, ast.Constant) and isinstance(alias.value, str):
            yield f"{prefix}{name}", {_ALIAS: _called(alias.value)}
            return
        value = given.get("default") or (value.args[0] if value.args else ast.Constant(None))
    try:
        computed: object = value_of(value, names)
        names[name] = computed
    except Unknown:
        computed = {"expression": " ".join(ast.unparse(value).split())}
        names.pop(name, None)
    if not name.startswith("_"):
        yield f"{prefix}{name}", computed


def _called(dotted: str) -> str:
    """Say a name of torch as the table does: torch._dynamo.config.recompile_limit -> dynamo.recompile_limit."""
    for path, prefix in MODULES.items():
        module = path.removesuffix(".py").replace("/", ".")
        if dotted.startswith(f"{module}."):
            return f"{prefix}.{dotted.removeprefix(f'{module}.')}"
    return dotted


def _signature(tree: ast.Module, function: str) -> Iterator[tuple[str, object]]:
    # An overload comes before the definition: the last one counts.
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not defined:
        return
    arguments = defined[-1].args
    positional = [*arguments.posonlyargs, *arguments.args]
    given: list[tuple[ast.arg, ast.expr | None]] = list(
        zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    )
    given += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    for argument, default in given:
        if default is None:
            continue
        try:
            yield argument.arg, value_of(default, {})
        except Unknown:
            yield argument.arg, {"expression": " ".join(ast.unparse(default).split())}


def document(read: Mapping[str, Read]) -> dict[str, object]:
    """Fold what was read per release into the table."""
    releases = spans.ordered(read)
    names = sorted({name for held in read.values() for name in held})
    by_name = {name: {release: read[release][name] for release in releases if name in read[release]} for name in names}
    return {
        "schema": 1,
        "releases": releases,
        "defaults": {name: spans.spans(values, releases) for name, values in by_name.items()},
    }
