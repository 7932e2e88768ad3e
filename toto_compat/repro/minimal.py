"""The minimal script of a cell: what it compiles and forecasts, with torch and toto-ts alone, for a PyTorch issue."""

import ast
import pprint
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from toto_compat.contract.caches import CACHES
from toto_compat.contract.request import CellRequest, Workload
from toto_compat.environments.requirements import requirements_of
from toto_compat.matrix.request import cell_variables
from toto_compat.matrix.toto_source import is_release
from toto_compat.matrix.user_cache import decoded_code, split_source
from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.text import redact_variables

NAME = "minimal.py"
_PACKAGE = "toto_compat"
# What a cache of the user's may import and still stand in a script of its own.
_STANDALONE = frozenset({"torch", "toto", "typing", "math", "dataclasses", "functools", "collections", "abc", "enum"})


class NoMinimalScript(Exception):  # noqa: N818 - told in a bundle, not a failure
    """This cell's cache cannot stand in a script without this package; the message says what it needs."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; replay the bundle instead")


def minimal_script(request: CellRequest, *, title: str, python: str, toto_ts: str, expected: Iterable[str] = ()) -> str:
    """Write the script for a cell. NoMinimalScript: the cache is more than a class that can be put into it."""
    workload, settings = request.workload, request.settings
    arguments = {"backend": settings.backend, "mode": None if request.cell.mode == "default" else request.cell.mode}
    template = Template((resources.files("toto_compat.repro") / "minimal_script.txt").read_text(encoding="utf-8"))
    torch = request.environment.torch
    release = toto_ts or request.environment.toto_ts
    wanted, code = requirements_of(request.environment), cache_code(request)
    variables = own_variables(request)
    told = [*differences(request), "that also takes series of other kinds, and looks into its steps"]
    text = template.substitute(
        title=_plain(title),
        needs="torch and toto-ts",
        # toto-ts pins another torch: it goes in without its dependencies, after what it imports
        install=" ".join(f"'{one}'" if "<" in one or ">" in one else one for one in (wanted.torch, *wanted.others)),
        bare=_plain(f"toto-ts=={release}"),
        typing="from typing import Any\n" if code.needs_typing else "",
        tensor="from torch import Tensor\n" if code.needs_typing else "",
        torch=torch,
        python=_plain(python or request.environment.python),
        where=request.environment.build,
        cache=_plain(request.cell.cache),
        mode=request.cell.mode,
        expected="\n".join(f"It shows: {_plain(line)}" for line in expected)
        or "It shows what the log beside it shows.",
        differs="\n".join(
            textwrap.wrap(_plain(f"Not all of the run that it comes from, the cell: {'; '.join(told)}."), 118)
        ),
        os="import os\n" if variables else "",
        variables=f"\n# read when torch is imported\nos.environ.update({variables!r})\n" if variables else "",
        threads=request.limits.threads,
        device=request.device.value,
        dtype=workload.dtype,
        autocast=f"torch.{workload.autocast}" if workload.autocast else "None",
        compile_arguments=repr(arguments),
        forecasts=pprint.pformat(planned_forecasts(workload), width=100),
        variates=workload.variates,
        groups=min(workload.groups, workload.variates),
        missing=workload.missing,
        shapes=_shapes(),
        cache_code=code.text,
        seed=workload.seed,
        model=workload.model,
        settings=textwrap.indent(_settings(request), "    "),
        mark_dynamic=textwrap.indent(_mark_dynamic(request), "    "),
    )
    ast.parse(text)  # a script that is handed on at least compiles
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def differences(request: CellRequest) -> list[str]:
    """Say what the script cannot bring along of the cell."""
    told = [f"its weights are drawn from a seed, those of the cell are {request.workload.checkpoint}"]
    told = told if request.workload.checkpoint else []
    if request.csv is not None:
        told.append("its series is a walk, that of the cell is a file")
    if not is_release(request.environment.toto_ts):
        told.append("the cell had a toto-ts of its own")
    if secret := sorted(set(_beyond_a_cells(request)) - set(own_variables(request))):
        told.append(f"without the variables {', '.join(secret)}, whose values are secret")
    return told


def own_variables(request: CellRequest) -> dict[str, str]:
    """Return the variables that this cell has and others have not, but for those with a secret in them."""
    clean = redact_variables(_beyond_a_cells(request))
    return {name: value for name, value in clean.items() if REDACTED not in value}


def _beyond_a_cells(request: CellRequest) -> dict[str, str]:
    usual = cell_variables(request.limits, request.device)
    return {name: value for name, value in request.variables.items() if usual.get(name) != value}


def _plain(text: str) -> str:
    """Make text from a log or an incident safe inside the script's docstring."""
    return " ".join(text.replace("\\", "/").replace('"""', "'''").split())[:300].rstrip('"')


def planned_forecasts(workload: Workload) -> list[tuple[int, int, int, int, int]]:
    """List forecasts as the recompile suite takes them: both ends of the context twice, samples, then in between."""
    ends, batch, horizon = (workload.context[0], workload.context[-1]), workload.batches[0], workload.horizon[0]
    planned = [(context, horizon, b, 0, 0) for b in workload.batches for context in ends for _ in range(2)]
    for samples, per_batch in workload.sampled[:1]:
        planned += [(context, horizon, batch, min(samples, 2 * per_batch), per_batch) for context in ends]
    planned += [(context, horizon, batch, 0, 0) for context in workload.context[1:-1]]
    planned += [(workload.context[0], other, batch, 0, 0) for other in workload.horizon[1:]]
    return planned


def _settings(request: CellRequest) -> str:
    settings = request.settings
    lines = []
    if settings.capture_scalar_outputs:
        lines.append("torch._dynamo.config.capture_scalar_outputs = True")
    for name, old in (
        ("recompile_limit", "cache_size_limit"),
        ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
    ):
        value = getattr(settings, name)
        if value is not None:
            lines.append(f'renamed = "{name}" if hasattr(torch._dynamo.config, "{name}") else "{old}"')
            lines.append(f"setattr(torch._dynamo.config, renamed, {value})")
    return "\n".join(lines) or "# every setting is torch's own"


def _mark_dynamic(request: CellRequest) -> str:
    if not request.settings.mark_dynamic:
        return ""
    return textwrap.dedent(
        """
        def mark(_module, _positional, named):
            for name in ("inputs", "input_padding_mask", "id_mask"):
                torch._dynamo.mark_dynamic(named[name], 2)

        compiled.register_forward_pre_hook(mark, with_kwargs=True)
        """
    ).strip()


def _shapes() -> str:
    """Read the shapes of the models from this package's source: importing it would need torch."""
    source = _source("model/backbone.py")
    return "\n\n".join(_assigned(source, name) for name in ("_COMMON", "SHAPES"))


@dataclass(frozen=True)
class CacheCode:
    """The code of a cache and a line `CACHE = ...`."""

    text: str
    needs_typing: bool = False  # Any and Tensor


def cache_code(request: CellRequest) -> CacheCode:
    """Read the code of the cell's cache; NoMinimalScript where it is more than a class."""
    name = request.cache.name
    if request.cache.source != "builtin":
        return CacheCode(_user_cache_code(request.cache.source))
    row = CACHES.get(name)
    if row is None or row.kind != "whole_model":
        what = f"cache {name} is a model of its own: {row.code}" if row else f"{name} is a cache broken on purpose"
        raise NoMinimalScript(
            f"{what} in toto_compat {'' if row is None else '(pip install toto-compat)'}".strip(),
        )
    if name == "upstream":
        return CacheCode("CACHE = KVCache  # toto-ts's own")
    module, _, class_name = row.code.partition(":")
    source = _source(f"{module.replace('.', '/')}.py")
    needed = [_defined(source, one) for one in ("_slots", class_name)]
    return CacheCode("\n\n\n".join(["", *needed, f"CACHE = {class_name}"]).lstrip("\n"), needs_typing=True)


def _user_cache_code(source: str) -> str:
    file, class_name = split_source(source)
    text, _ = decoded_code(Path(file).read_bytes())
    tree = ast.parse(text)
    imported = {
        (node.module or "").partition(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if others := sorted(imported - _STANDALONE):
        raise NoMinimalScript(f"{Path(file).name} imports {', '.join(others)}")
    if any(isinstance(node, ast.FunctionDef) and node.name == "bind" for node in ast.walk(tree)):
        raise NoMinimalScript(f"{class_name} binds itself and is more than a cache")
    return f"# --- {Path(file).name}\n{text.strip()}\n# ---\n\nCACHE = {class_name}"


def _source(path: str) -> str:
    return (resources.files(_PACKAGE) / path).read_text(encoding="utf-8")


def _defined(source: str, name: str) -> str:
    """Return the source of a class or function of a module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(source, node) or ""
    raise LookupError(name)


def _assigned(source: str, name: str) -> str:
    """Return the source of an assignment of a module, without its annotation."""
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == name and value is not None:
            return f"{name} = {ast.get_source_segment(source, value)}"
    raise LookupError(name)
