"""The one way to a runtime, for whatever runs cells or opens a shell."""

from typing import Literal

from toto_compat.contract.request import Device, Limits
from toto_compat.errors import EngineError
from toto_compat.runtimes.here import HereRuntime
from toto_compat.runtimes.seam import OnLine, Runtime
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime

RuntimeName = Literal["auto", "docker", "venv", "here"]


def open_runtime(
    name: RuntimeName,
    *,
    limits: Limits,
    device: Device,
    rebuild: bool = False,
    say: OnLine | None = None,
    source: CellSource | None = None,
) -> Runtime:
    """Open docker where an engine answers, else venv; `docker` insists, `here` is this interpreter.

    Nothing on the machine is changed by it.

    `say` gets one line where `auto` finds no engine. Cells run `source`, or this package as it is now.
    """
    source = source or CellSource()
    if name == "here":
        return HereRuntime(source, limits=limits, device=device)
    if name != "venv":
        # here and not above: the Docker SDK takes 0.3 s, which --runtime venv does without
        from toto_compat.runtimes.docker import DockerRuntime

        try:
            return DockerRuntime(source, limits=limits, device=device, rebuild=rebuild)
        except EngineError as error:
            if name == "docker":
                raise
            if say is not None:
                say(f"cells run in virtualenvs: {error.message}")
    return VenvRuntime(source, limits=limits, device=device)
