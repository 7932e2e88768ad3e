"""`toto-compat warm`: compile what a service will need before it starts, and show that its start compiles nothing."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from toto_compat.errors import EnvironmentBuildError, ExitCode, InputError, StorageError
from toto_compat.matrix.checkpoint import resolve_checkpoint
from toto_compat.matrix.given_path import GivenPath
from toto_compat.production.switch import MODES
from toto_compat.production.torch_device import checked_device
from toto_compat.production.warming import PRECISIONS, Refused, WarmRequest, WarmResult

_NEEDED = {"torch": "torch", "toto": "toto-ts"}


def refuse_without_torch() -> None:
    """Say what is missing beside this command: what is compiled here is for this interpreter."""
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise EnvironmentBuildError(
            f"{sys.executable} has no {' and no '.join(missing)}: what is compiled is for this interpreter",
            hint=f"run this in the service's own environment, or pip install {' '.join(missing)} beside toto-compat",
        )


def run_process(request: WarmRequest) -> WarmResult:
    """Run it in a process of its own: a start is what is asked about, and this one shall never import torch."""
    with tempfile.TemporaryDirectory(prefix="toto-warm-") as name:
        asked, output = Path(name, "request.json"), Path(name, "output.json")
        asked.write_text(request.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "toto_compat.production.warming", str(asked), str(output)]
        # what a compiler prints need not be UTF-8
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
            raise EnvironmentBuildError(
                f"compiling failed: {last}", hint="toto-compat doctor says what this machine lacks"
            )
        answer = output.read_text(encoding="utf-8")
    if "message" in json.loads(answer):
        refused = Refused.model_validate_json(answer)
        raise InputError(refused.message, hint=refused.hint)
    return WarmResult.model_validate_json(answer)


def call_of(request: WarmRequest) -> str:
    """Give the call with which a service takes what is kept: it announces the same."""
    draws = "" if request.draws == "direct" else f", draws={request.draws!r}"
    return (
        f"compile_toto(model, mode={request.mode!r}, max_context={request.max_context}, "
        f"max_horizon={request.max_horizon}, batch_sizes={request.batch_sizes!r}{draws}, "
        f"cache_dir={request.cache_dir!r})"
    )


def _told(result: WarmResult) -> str:
    return (
        f"{result.graphs_compiled} graphs compiled, {result.graphs_found} found, {result.compiler_calls} calls of the "
        f"C++ compiler, {result.seconds:.1f} s"
    )


@click.command("warm")
@click.option(
    "--cache-dir",
    required=True,
    type=GivenPath(),
    help="Folder to keep it in; nobody else may write to it.",
)
@click.option("--checkpoint", help="Folder, or hub id with revision.  [default: the shape of --model]")
@click.option(
    "--model",
    type=click.Choice(["tiny", "base"]),
    default="base",
    show_default=True,
    help="Shape of the model, where no checkpoint is named.",
)
@click.option(
    "--mode", type=click.Choice(MODES), default="reduce-overhead", show_default=True, help="The compile mode."
)
@click.option(
    "--max-context", type=click.IntRange(min=1), default=512, show_default=True, help="The longest context, in points."
)
@click.option(
    "--max-horizon", type=click.IntRange(min=1), default=64, show_default=True, help="The longest horizon, in points."
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1,),
    show_default=True,
    help="Series times samples per batch; may be repeated.",
)
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(min=1),
    multiple=True,
    help="Points that the first forecast may begin with; may be repeated.  [default: --max-context]",
)
@click.option("--samples", type=click.IntRange(min=0), default=256, show_default=True, help="0: only means.")
@click.option("--variates", type=click.IntRange(min=1), default=1, show_default=True, help="Of a series.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="float32", show_default=True, help="The service's precision."
)
@click.option(
    "--draws",
    type=click.Choice(["direct", "toto-ts"]),
    default="direct",
    show_default=True,
    help="How samples are drawn; toto-ts: its random stream, seed for seed.",
)
@click.option("--device", callback=checked_device, default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--threads", type=click.IntRange(min=1), help="The service's, on a CPU.  [default: torch's own]")
@click.option("--no-check", is_flag=True, help="Leave out the second process that shows that nothing is compiled.")
@click.option("--json", "as_json", is_flag=True, help="Print what was counted as JSON.")
def warm_command(*, cache_dir: Path, checkpoint: str | None, no_check: bool, as_json: bool, **asked: object) -> None:
    """Compile what a service will announce to compile_toto, and keep it in its cache_dir.

    Run it in the service's own environment. Exits with 10 where a second process still had to compile something.
    """
    folder = str(resolve_checkpoint(checkpoint, relative_to=Path.cwd())) if checkpoint is not None else None
    place = str(cache_dir.expanduser().absolute())
    request = WarmRequest.model_validate({"cache_dir": place, "checkpoint": folder, **asked})
    too_long = [length for length in request.contexts if length > request.max_context]
    if too_long:
        raise InputError(
            f"--context {too_long[0]} is more than --max-context {request.max_context}",
            hint="announce the longest: a forecast past it would compile anew in the service",
        )
    if cache_dir.exists() and not cache_dir.is_dir():
        raise InputError(f"--cache-dir {cache_dir}: a file, and no folder", hint="name a folder, there or not")
    refuse_without_torch()
    first = run_process(request)
    if first.file_bytes is None or first.not_written:
        raise StorageError(
            f"nothing is kept: {first.not_written or 'no file was written'}", hint="name another --cache-dir"
        )
    second = None if no_check else run_process(request)
    if as_json:
        both = {"first": first.model_dump(), "second": second and second.model_dump(), "call": call_of(request)}
        click.echo(json.dumps(both, indent=2))
    else:
        click.echo("\n".join(f"{name}: {value}" for name, value in first.key.items()))
        click.echo(f"\n{_told(first)}\nkept: {first.file}, {first.file_bytes / 1e6:.1f} MB")
        if second is not None:
            click.echo(f"a second process: {_told(second)}")
        click.echo(f"\nthe service takes it from there with\n  {call_of(request)}")
    if second is not None and (second.graphs_compiled or second.compiler_calls):
        click.echo("A SECOND PROCESS STILL COMPILES: a restart costs more than a warm start", err=True)
        sys.exit(ExitCode.FINDINGS)
