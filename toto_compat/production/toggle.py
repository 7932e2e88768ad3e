"""`toto-compat toggle`: compile switched on or off in `.env.compile`, on as far as the newest verdict allows it.

`disable` imports nothing that could be broken: no verdict, no matrix, no torch.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toto_compat.errors import InputError, RefusedError, TotoCompatError
from toto_compat.production import env_file

if TYPE_CHECKING:
    from toto_compat.production.switch import Switch
    from toto_compat.verdict.verdict_file import Installed, Permission, Verdict

DEFAULT_FILE = Path(".env.compile")
VERDICT_VARIABLE = "TOTO_COMPAT_VERDICT"
_PACKAGED = Path(__file__).parents[1] / "matrix.yaml"  # a wheel brings it along
# Their names as `switch_lines` has them, written out: see above.
_DISABLE, _FORCE = "TOTO_DISABLE_COMPILE", "TOTO_COMPILE_FORCE"

_FILE = click.option(
    "--file", type=click.Path(path_type=Path), default=DEFAULT_FILE, show_default=True, help="The service's env file."
)
_VERDICT = click.option(
    "--verdict",
    type=click.Path(path_type=Path),
    help=f"Verdict of `report --format verdict`.  [default: ${VERDICT_VARIABLE}]",
)
_TORCH = click.option("--torch", metavar="VERSION", help="The service's torch, if it is not the one installed here.")
_TOTO_TS = click.option("--toto-ts", metavar="VERSION", help="The service's toto-ts, if it is not the one here.")
_DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="The service's device; auto: a GPU if this machine has one.",
)
_GPU = click.option("--gpu", metavar="NAME", help="The service's GPU, if it is not this machine's.")


@click.group("toggle")
def toggle_command() -> None:
    """Switch compile on or off for the service, in an env file that it sources or reads."""


@toggle_command.command("disable")
@_FILE
def disable_command(*, file: Path) -> None:
    """Switch compile off. A service that reads the file goes eager at its next forecast."""
    env_file.edit(file, {_DISABLE: "1"}, f"switched off {_now()}", at_any_cost=True)
    click.echo(f"compile is off in {file}")
    if not env_file.read(file).is_exported(_DISABLE):
        click.echo(f"note: {file} does not export {_DISABLE}", err=True)


@toggle_command.command("enable", short_help="Switch compile on, if the verdict allows it.")
@_FILE
@_VERDICT
@_TORCH
@_TOTO_TS
@_DEVICE
@_GPU
@click.option("--force", "reason", metavar="REASON", help="Switch on without a verdict; the reason goes into the file.")
def enable_command(*, file: Path, reason: str | None, **where: Any) -> None:
    """Switch compile on, if the newest verdict for the torch release in use says so."""
    # here and not above: `disable` must work where these are broken
    from toto_compat.verdict.switch_lines import BACKEND, COMPILE, DISABLE, FORCE, MODE, switched_on

    if reason is not None:
        reason = " ".join(reason.split())
        if not reason:
            raise InputError("--force needs a reason", hint="it is written into the file: --force 'incident 42'")
        env_file.edit(file, {DISABLE: "0", COMPILE: "1", FORCE: reason}, f"forced on {_now()}: {reason}")
        click.echo(f"compile is on in {file}, forced: {reason}")
        return
    verdict, installed, allowed = _allowed(**where)
    if allowed.row is None:
        raise RefusedError(
            f"compile stays as it is: {allowed.why}",
            hint="`toto-compat toggle enable --force REASON` switches on all the same and says so in the file",
        )
    asked = switched_on(allowed.row)
    values = {name: asked.get(name) for name in (DISABLE, COMPILE, MODE, BACKEND, FORCE)}
    env_file.edit(file, values, f"switched on {_now()}: {allowed.why}, review by {verdict.review_by}")
    click.echo(f"compile is on in {file}: {allowed.why} (torch {installed.torch}, {installed.device.value})")


@toggle_command.command("mode")
@click.argument("mode")
@_FILE
def mode_command(*, mode: str, file: Path) -> None:
    """Choose the compile mode. It switches nothing on, and the service runs eager unless the mode was judged PASS."""
    # here and not above: `disable` must work where these are broken
    from toto_compat.production.switch import MODES
    from toto_compat.verdict.switch_lines import MODE

    if mode not in MODES:
        raise InputError(f"mode {mode!r} is unknown", hint=f"accepted: {', '.join(MODES)}")
    env_file.edit(file, {MODE: mode})
    click.echo(f"mode is {mode} in {file}")


@toggle_command.command("status", short_help="Show what is in force, and the verdict.")
@_FILE
@_VERDICT
@_TORCH
@_TOTO_TS
@_DEVICE
@_GPU
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def status_command(*, file: Path, as_json: bool, **where: Any) -> None:
    """Show file, environment, what they come to, the verdict and its age."""
    # here and not above: `disable` must work where these are broken
    from toto_compat.contract.log_line import printable
    from toto_compat.production.switch import VARIABLES, read_switch

    environment = {name: os.environ.get(name) for name in VARIABLES}
    switch = read_switch(file if file.exists() else None, environment)
    shown = {
        "file": str(file) if file.exists() else f"{file} is not there",
        "in the file": _in_file(file, VARIABLES),
        "in the environment": {name: value for name, value in environment.items() if value is not None},
        **_outcome(switch, where),
    }
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    for name, value in shown.items():
        if isinstance(value, dict):
            click.echo(f"{name}:" + ("" if value else " nothing"))
            for variable, held in value.items():
                click.echo(printable(f"  {variable}={held}"))
        else:
            click.echo(printable(f"{name}: {value}"))


@toggle_command.command("test", short_help="Try compile on the torch that is installed here.")
@click.argument("selectors", nargs=-1, metavar="[SELECTOR]...")
@_DEVICE
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
@click.option("--run", metavar="NAME", help="Name of the run's folder in results/.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print compatibility.json (with --dry-run the plan) to stdout.")
def test_command(*, selectors: tuple[str, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Run the smoke profile on the torch that is installed here: fixed_size in the default mode, or SELECTORs."""
    # asked of the program that this is a command of: importing it would go against the flow of the package
    root = click.get_current_context().find_root()
    matrix = root.command.get_command(root, "matrix") if isinstance(root.command, click.Group) else None
    if matrix is None:
        raise click.UsageError("run it as `toto-compat toggle test`")
    words = [*(selectors or ("*/fixed_size/default",)), "--runtime", "here", "--profile", "smoke"]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    words += [*(["--dry-run"] if dry_run else []), *(["--json"] if as_json else [])]
    if not Path("matrix.yaml").exists() and _PACKAGED.exists():
        words += ["--matrix", str(_PACKAGED)]
    matrix.main(words, standalone_mode=False)


def _outcome(switch: "Switch", where: dict[str, Any]) -> dict[str, Any]:
    """Say what a service would do now, as far as this machine can tell."""
    if switch.eager_because:
        return {"effective": f"eager: {switch.eager_because}", "verdict": _verdict_text(where)}
    if switch.forced:
        return {"effective": f"compile, forced: {switch.forced}", "verdict": _verdict_text(where)}
    try:
        verdict, _, allowed = _allowed(**where, mode=switch.mode, backend=switch.backend)
    except TotoCompatError as error:
        return {"effective": f"eager: {error.message}", "verdict": error.message}
    row = allowed.row
    if row is None:
        effective = f"eager: {allowed.why}"
    elif switch.compile is False and row.mode is not None:
        effective = f"eager: TOTO_COMPILE is off in {switch.decided_by['TOTO_COMPILE']}"
    elif row.mode is None:
        effective = f"cache {row.cache}, nothing compiled: {allowed.why}"
    else:
        effective = f"compile, cache {row.cache}, mode {row.mode}: {allowed.why}"
    return {"effective": effective, "verdict": verdict.age_text(_today())}


def _verdict_text(where: dict[str, Any]) -> str:
    try:
        return _verdict(where["verdict"]).age_text(_today())
    except TotoCompatError as error:
        return error.message


def _allowed(
    *,
    verdict: Path | None,
    torch: str | None,
    toto_ts: str | None,
    device: str,
    gpu: str | None,
    mode: str | None = None,
    backend: str | None = None,
) -> "tuple[Verdict, Installed, Permission]":
    # here and not above: `disable` must work where these are broken
    from toto_compat.contract.request import Device
    from toto_compat.production.installed import installed_for, torch_version
    from toto_compat.verdict.verdict_file import permission

    read = _verdict(verdict)
    torch = torch or torch_version()
    if not torch:
        raise InputError("no torch is installed here", hint="name the service's: --torch 2.9.0+cu128 --device cuda")
    if gpu is None and device != "cpu":
        gpu = _gpu_here()
    on = Device(device) if device != "auto" else Device.CUDA if gpu and "+cpu" not in torch else Device.CPU
    installed = installed_for(on, gpu, torch, toto_ts)
    return read, installed, permission(read, installed, today=_today(), mode=mode, backend=backend)


def _gpu_here() -> str | None:
    # here and not above: it is part of what may be broken
    from toto_compat.runtimes.nvidia_smi import find_gpus

    return next((gpu.name for gpu in find_gpus()), None)


def _verdict(given: Path | None) -> "Verdict":
    # here and not above: pydantic takes longer to import than `disable` takes to run
    from toto_compat.verdict.verdict_file import read_verdict

    path = given or (Path(named) if (named := os.environ.get(VERDICT_VARIABLE)) else None)
    if path is None:
        raise InputError(
            "there is no verdict: none means eager",
            hint=f"toto-compat report RUN --format verdict --output verdict.json, then --verdict or {VERDICT_VARIABLE}",
        )
    return read_verdict(path)


def _in_file(file: Path, names: tuple[str, ...]) -> dict[str, str]:
    if not file.exists():
        return {}
    try:
        parsed = env_file.read(file)
    except InputError as error:
        return {"error": error.message}
    found = {name: parsed.assigned(name) for name in names}
    return {
        name: ("(the shell computes it)" if one.value is None else one.value)
        + ("" if parsed.is_exported(name) else "  (not exported: sourcing does not pass it on)")
        for name, one in found.items()
        if one is not None
    }


def _today() -> Any:
    return datetime.now(UTC).date()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
