"""`toto-compat shell ENVIRONMENT`: a shell in the pinned environment, with a cell's own variables and hardening."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import click

from toto_compat.contract.request import Device
from toto_compat.environments.locks import named_environments
from toto_compat.errors import SelectionError
from toto_compat.evidence.files import cache_folder
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.progress import say
from toto_compat.runtimes.seam import AttachedCommand


@click.command("shell", context_settings={"ignore_unknown_options": True})
@click.argument("environment")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--runtime",
    type=click.Choice(get_args(RuntimeName)),
    default="auto",
    show_default=True,
    help="A container, a virtualenv, or what is installed here; auto: docker if an engine answers.",
)
@click.option(
    "--device",
    type=click.Choice([device.value for device in Device]),
    default="cpu",
    show_default=True,
    help="With cuda it sees a GPU.",
)
@matrix_option
def shell_command(
    environment: str, command: tuple[str, ...], runtime: RuntimeName, device: str, matrix_file: Path | None
) -> None:
    """Open a shell (or run COMMAND) in ENVIRONMENT as a cell would find it; a container is read-only, without network.

    The folder it starts in is empty, writable and gone afterwards; the project's source is on PYTHONPATH. `{python}` in
    COMMAND is the environment's interpreter.
    """
    matrix = load_matrix(find_matrix_file(matrix_file))
    chosen = named_environments(matrix, (environment,))
    if len(chosen) > 1:
        raise SelectionError(f"{environment!r} names {', '.join(chosen)}", hint="a shell is in one of them")

    ((name, wanted),) = chosen.items()
    opened = open_runtime(runtime, limits=matrix.limits, device=Device(device), say=say)
    # built but not probed: a shell is where one finds out why a probe fails
    built = opened.build(name, wanted, say)
    with tempfile.TemporaryDirectory(prefix="shell-", dir=cache_folder()) as folder:
        words = command or ("/bin/sh", "-i")
        code = run_attached(opened.attached(built, words, Path(folder), terminal=sys.stdin.isatty()))
    if code:
        sys.exit(code)


def run_attached(command: AttachedCommand) -> int:
    """Run a command on this process's terminal and return its exit code; Ctrl-C is the command's own."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command.words, env=command.variables, cwd=command.folder, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
