"""A stand-in for `nvidia-smi`: a program on PATH that answers as the real one would on a machine with these GPUs."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from toto_compat.runtimes import nvidia_smi

_PROGRAM = """#!{python} -I
import json, os, sys
machine = json.loads({machine!r})
words = sys.argv[1:]
if machine["hangs"]:
    import signal
    signal.pause()
if machine["says"] is not None:
    sys.stdout.write(machine["says"])
    sys.exit(machine["code"])
query = next((word for word in words if word.startswith("--query-")), "")
chosen = next((word.partition("=")[2] for word in words if word.startswith("--id=")), None)
kind, _, fields = query.partition("=")
fields = fields.split(",")
rows = machine["processes"] if kind == "--query-compute-apps" else machine["gpus"]
if words[:1] == ["-L"]:
    for row in machine["gpus"]:
        print("GPU %s: %s (UUID: %s)" % (row["index"], row["name"], row["uuid"]))
        for number, (size, uuid) in enumerate(row["slices"]):
            print("  MIG %s     Device  %d: (UUID: %s)" % (size, number, uuid))
elif words[:1] == ["pmon"]:
    print("# gpu   pid  type    sm   mem   command")
    print("# Idx     #   C/G     %     %   name")
    for row in machine["processes"]:
        print("    0  %s     C    %s     9   %s" % (row["pid"], row["sm"], row["process_name"]))
else:
    for field in fields:
        if field in machine["unknown_fields"]:
            print('Field "%s" is not a valid field to query.\\n' % field)
            sys.exit(2)
    for row in rows:
        if chosen in (None, row.get("index"), row.get("uuid")):
            print(", ".join(str(row.get(field, "[N/A]")) for field in fields))
"""


def gpu(
    index: int = 0, name: str = "NVIDIA H100 80GB HBM3", capability: str = "9.0", **more: object
) -> dict[str, object]:
    """One row of the machine, by nvidia-smi's own names."""
    number = f"{index:012x}"
    return {
        "index": str(index),
        "uuid": f"GPU-5c89852c-d268-c3f3-1b07-{number}",
        "name": name,
        "driver_version": "580.95.05",
        "compute_cap": capability,
        "memory.total": "81559",
        "memory.used": "4",
        "mig.mode.current": "Disabled",
        "clocks.sm": "1980",
        "clocks.mem": "2619",
        "clocks_event_reasons.active": "0x0000000000000001",
        "temperature.gpu": "34",
        "utilization.gpu": "0",
        "slices": [],
        **more,
    }


def process(on: Mapping[str, object], *, pid: int, name: str, memory: int = 0, sm: int = 0) -> dict[str, object]:
    """A program that computes on a GPU."""
    return {"gpu_uuid": on["uuid"], "pid": pid, "process_name": name, "used_gpu_memory": memory, "sm": sm}


ONE = (gpu(),)
EIGHT = tuple(gpu(index) for index in range(8))
DISPLAY = gpu(0, "Quadro K620", "5.0", **{"memory.total": "2000", "memory.used": "700"})
TWO_GENERATIONS = (DISPLAY, gpu(1))
SPLIT = (
    gpu(
        0,
        "NVIDIA A100-SXM4-40GB",
        "8.0",
        slices=[("3g.20gb", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"), ("3g.20gb", "MIG-a28ad590-3fda-56dd")],
        **{"mig.mode.current": "Enabled"},
    ),
)


def without_devices(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have a machine that may have GPUs look as one whose driver has made no device."""
    patch.setattr(nvidia_smi, "_DEVICES", folder / "no-devices")


def install(
    folder: Path,
    patch: pytest.MonkeyPatch,
    gpus: Sequence[Mapping[str, object]] = (),
    *,
    processes: Sequence[Mapping[str, object]] = (),
    unknown_fields: Sequence[str] = (),
    says: str | None = None,
    code: int = 0,
    hangs: bool = False,
) -> Path:
    """Put the program on PATH before everything else; what was learnt from another one is forgotten."""
    machine = {
        "gpus": list(gpus),
        "processes": list(processes),
        "unknown_fields": list(unknown_fields),
        "says": says if gpus or says is not None else "No devices were found\n",
        "code": code if gpus or says is not None else 6,
        "hangs": hangs,
    }
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, machine=json.dumps(machine)))
    program.chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.delenv("CUDA_DEVICE_ORDER", raising=False)
    forget()
    return program


def forget() -> None:
    """Have the next question asked anew."""
    nvidia_smi._asked.cache_clear()
