"""`toto-compat lint-env`: variables that do nothing, are misspelt, in conflict or have values that torch ignores."""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from packaging.version import InvalidVersion, Version

from toto_compat.contract.events import Severity
from toto_compat.contract.log_line import printable
from toto_compat.environments.torch_sources.variables import Table, load_table
from toto_compat.errors import ExitCode, InputError
from toto_compat.production import env_file
from toto_compat.production.installed import torch_version
from toto_compat.production.switch import MODES, VARIABLES, read_switch
from toto_compat.verdict.switch_lines import COMPILE, DISABLE, FORCE, MODE

# The compiler is Python from end to end: what its sources do not read is read nowhere.
_COMPILERS_OWN = re.compile(r"^(TORCHDYNAMO|TORCHINDUCTOR|TORCH_COMPILE|AOTINDUCTOR|AOT_)")
_TORCHS = re.compile(r"^(TORCH|PYTORCH)")
_OWN = re.compile(r"^TOTO_(COMPILE|DISABLE|COMPAT)")
_OWN_NAMES = (*VARIABLES, "TOTO_COMPAT_VERDICT", "TOTO_COMPAT_CACHE", "TOTO_COMPAT_DOCKER_FILES")
# Read by torch's libraries, which the table does not cover.
_OF_LIBRARIES = re.compile(
    r"^(TORCH_(NCCL|GLOO|CUDA|CPP|DISTRIBUTED|FR|SHOW|ALLOW_TF32|BLAS|LINALG|HIP|XPU|MPS)_?|PYTORCH_)"
)
INSTEAD: Mapping[str, str] = {
    "TORCH_COMPILE_MODE": "the mode is an argument of torch.compile: set TOTO_COMPILE_MODE, which forecaster() reads",
    "TORCHDYNAMO_RECOMPILE_LIMIT": "it is a setting in Python, torch._dynamo.config.recompile_limit; forecaster() "
    "applies the one that was judged",
    "TORCHDYNAMO_CACHE_SIZE_LIMIT": "it is a setting in Python, torch._dynamo.config.cache_size_limit (recompile_limit "
    "from 2.7 on); forecaster() applies the one that was judged",
    "TORCH_CUDAGRAPHS": "CUDA graphs come with the mode: TOTO_COMPILE_MODE=reduce-overhead",
}
_SWITCHED_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_FLAG_WORDS = frozenset({"", "0"})


@dataclass(frozen=True)
class Finding:
    severity: Severity
    variable: str
    where: str
    problem: str
    fix: str = ""


@dataclass(frozen=True)
class Given:
    """The variables to look at: values, where each stands, and the file if there is one."""

    values: Mapping[str, str | None]
    where: Mapping[str, str]
    file: env_file.EnvFile | None = None
    path: Path | None = None


def given_by(path: Path | None, environment: Mapping[str, str]) -> Given:
    if path is None:
        return Given(dict(environment), dict.fromkeys(environment, "the environment"))
    parsed = env_file.read(path)
    if "\0" in parsed.text:  # no shell takes it; nothing to complain about would be said of any binary file
        raise InputError(f"{path}: this is no env file: it holds zero bytes", hint="give lines of NAME=value")
    named = {one.name: one for one in parsed if one.name}
    return Given(
        {name: one.value for name, one in named.items()},
        {name: f"{path}:{one.line}" for name, one in named.items()},
        parsed,
        path,
    )


def findings(given: Given, torch: str, table: Table) -> Iterator[Finding]:
    """Tell everything there is to say, by variable."""
    release = table.nearest(torch)
    for name, value in sorted(given.values.items()):
        where = given.where[name]
        if _OWN.match(name):
            yield from _own(name, value, where)
        elif name in table.variables:
            yield from _known(name, value, where, release, table)
        elif _TORCHS.match(name) or _COMPILERS_OWN.match(name):
            yield from _unknown(name, where, release, table)
    yield from _conflicts(given)
    if given.file is not None and given.path is not None:
        yield from _of_the_file(given.file, given.path)


def _own(name: str, value: str | None, where: str) -> Iterator[Finding]:
    if name not in _OWN_NAMES:
        close = difflib.get_close_matches(name, _OWN_NAMES, n=1)
        fix = f"did you mean {close[0]}?" if close else f"known: {', '.join(_OWN_NAMES)}"
        yield Finding(Severity.ERROR, name, where, "nobody reads it", fix)
        return
    if value is None:
        yield Finding(Severity.WARNING, name, where, "its value is computed by the shell and cannot be read here")
        return
    word = value.strip().lower()
    if name in (DISABLE, COMPILE) and word not in {"", "0", "1", "true", "false", "yes", "no", "on", "off"}:
        counts_as = "1" if name == DISABLE else "0"
        yield Finding(
            Severity.ERROR, name, where, f"{value!r} is neither on nor off and counts as {counts_as}", "use 1 or 0"
        )
    if name == MODE and word and value.strip() not in MODES:
        yield Finding(
            Severity.ERROR, name, where, f"{value!r} is no mode: the service runs eager", f"one of {', '.join(MODES)}"
        )


def _known(name: str, value: str | None, where: str, release: str, table: Table) -> Iterator[Finding]:
    known = table.variables[name]
    if release not in known.releases:
        if _OF_LIBRARIES.match(name):
            return
        yield Finding(
            Severity.WARNING,
            name,
            where,
            f"torch {release} does not read it, only {_spans(known.releases)} does",
            INSTEAD.get(name, "take it out, or use a release that reads it"),
        )
    elif value is not None and known.compared_with and value not in known.compared_with:
        flag = known.compared_with == ("1",)
        if flag and value not in _FLAG_WORDS:
            yield Finding(
                Severity.ERROR,
                name,
                where,
                f"torch compares it with '1': {value!r} counts as off",
                f"{name}=1 or {name}=0",
            )


def _unknown(name: str, where: str, release: str, table: Table) -> Iterator[Finding]:
    if _OF_LIBRARIES.match(name) and name not in INSTEAD:
        return
    close = difflib.get_close_matches(name, table.variables, n=1, cutoff=0.88)
    fix = INSTEAD.get(name) or (f"did you mean {close[0]}?" if close else "take it out")
    certain = bool(_COMPILERS_OWN.match(name)) or name in INSTEAD
    problem = f"torch {release} never reads it" if certain else f"no Python source of torch {release} reads it"
    yield Finding(Severity.ERROR if certain or close else Severity.WARNING, name, where, problem, fix)


def _conflicts(given: Given) -> Iterator[Finding]:
    def on(name: str) -> bool:
        return (given.values.get(name) or "").strip().lower() in {"1", "true", "yes", "on"}

    if on(DISABLE) and on(COMPILE):
        yield Finding(
            Severity.WARNING, COMPILE, given.where[COMPILE], f"{DISABLE} is on and wins", f"{DISABLE}=0, or {COMPILE}=0"
        )
    for name in _SWITCHED_OFF:
        if on(name) and on(COMPILE) and not on(DISABLE):
            yield Finding(
                Severity.ERROR,
                name,
                given.where[name],
                f"torch.compile does nothing under it, yet {COMPILE} is on",
                "take it out",
            )
    if given.values.get(FORCE) and not on(COMPILE):
        yield Finding(Severity.WARNING, FORCE, given.where[FORCE], f"{COMPILE} is not on: it forces nothing")
    if on("TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
        for name in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"):
            if on(name):
                yield Finding(
                    Severity.WARNING,
                    name,
                    given.where[name],
                    "TORCHINDUCTOR_FORCE_DISABLE_CACHES is on and wins",
                    "take one out",
                )


def _of_the_file(file: env_file.EnvFile, path: Path) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for one in file:
        if not one.name or not (_OWN.match(one.name) or _TORCHS.match(one.name)):
            continue
        where = f"{path}:{one.line}"
        if one.name in seen:
            yield Finding(Severity.WARNING, one.name, where, f"also assigned in line {seen[one.name]}; this one holds")
        seen[one.name] = one.line
        if "\r" in one.text:
            yield Finding(
                Severity.WARNING,
                one.name,
                where,
                "a Windows line end becomes part of the value when it is sourced",
                "dos2unix",
            )
    for name, line in seen.items():
        if not file.is_exported(name):
            yield Finding(
                Severity.ERROR,
                name,
                f"{path}:{line}",
                "not exported: after `source` no program sees it",
                f"export {name}=...",
            )


def in_force(given: Given, torch: str, table: Table) -> list[str]:
    """Say what the variables come to, and why."""
    release = table.nearest(torch)
    if given.path is not None:
        switch = read_switch(given.path, {})
    else:
        switch = read_switch(None, {name: given.values.get(name) for name in VARIABLES})
    if switch.eager_because:
        lines = [f"eager: {switch.eager_because}"]
    elif switch.forced:
        lines = [f"compile, forced: {switch.forced}"]
    else:
        asked = {True: "asked for", False: "not asked for", None: "left to the verdict"}[switch.compile]
        lines = [f"compile is {asked}, mode {switch.mode or 'of the verdict'}; the verdict decides"]
    for name, value in sorted(given.values.items()):
        known = table.variables.get(name)
        if known and release in known.releases:
            lines.append(f"{name}={value} is read by torch {release} in {known.read_in} ({given.where[name]})")
    return lines


def _spans(releases: tuple[str, ...]) -> str:
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


@click.command("lint-env")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--torch", metavar="VERSION", help="The release to check for.  [default: the installed one]")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--fail-on",
    type=click.Choice([Severity.ERROR.value, Severity.WARNING.value]),
    help=f"Exit with {ExitCode.FINDINGS.value} on a finding of this severity or a worse one.",
)
def lint_env_command(*, file: Path | None, torch: str | None, as_json: bool, fail_on: str | None) -> None:
    """Check the environment of this process, or an env FILE, for variables that do not do what they say."""
    table = load_table()
    version = torch if torch is not None else torch_version() or table.releases[-1]
    try:
        Version(version)
    except InvalidVersion as error:
        raise InputError(f"--torch {version!r} is no version", hint="such as 2.9.0") from error
    given = given_by(file, os.environ)
    found = list(findings(given, version, table))
    release = table.nearest(version)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "torch": version,
                    "table": release,
                    "findings": [asdict(one) for one in found],
                    "in_force": in_force(given, version, table),
                },
                indent=2,
            )
        )
    else:
        by = "" if Version(Version(version).public) == Version(release) else f", by the table of {release}"
        click.echo(f"{file or 'the environment of this process'}, torch {version}{by}")
        for one in found:
            fix = f" -> {one.fix}" if one.fix else ""
            click.echo(printable(f"{one.severity.value}: {one.variable} ({one.where}): {one.problem}{fix}"))
        click.echo("" if found else "nothing to complain about")
        click.echo("In force:")
        for line in in_force(given, version, table):
            click.echo(printable(f"  {line}"))
    worst = (
        {Severity.ERROR.value} if fail_on == Severity.ERROR.value else {Severity.ERROR.value, Severity.WARNING.value}
    )
    if fail_on and any(one.severity.value in worst for one in found):
        sys.exit(ExitCode.FINDINGS)
