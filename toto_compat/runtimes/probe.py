"""Tries what an environment's cells rely on, run by the environment's own interpreter before its first cell.

`python -I probe.py <answer.json> <check>...`, in a container with a cell's own hardening. Standard library and torch
only; every check is tried, none stops the others.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NONCE_FILE = "nonce"
ANSWER_FILE = "probe.json"


def facts() -> dict[str, Any]:
    """Write down what the container lets a process do."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    interfaces = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {
        "uid": os.getuid(),
        "capabilities": {name: status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "no_new_privileges": status.get("NoNewPrivs", "").strip(),
        "interfaces": [line.partition(":")[0].strip() for line in interfaces],
        "routes": len(Path("/proc/net/route").read_text().splitlines()) - 1,
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory_max": read_first("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        "pids_max": read_first("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"),
        "shm_bytes": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,  # noqa: S108
        "tmp_bytes": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize,  # noqa: S108
    }


def read_first(*paths: str) -> str:
    for path in paths:
        try:
            return Path(path).read_text().strip()
        except OSError:
            continue
    return ""


def nonce() -> str:
    """Read a file that only this machine has: a container that sees it shares our disk."""
    return Path(NONCE_FILE).read_text().strip()


def root_is_read_only() -> bool:
    try:
        Path("/opt/toto-compat-probe").touch()
    except OSError:
        return True
    return False


def torch_build() -> dict[str, Any]:
    # in each check, so that a torch that does not import is an answer
    import torch

    build: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "architectures": list(torch.cuda.get_arch_list()) if torch.version.cuda else [],
        "cuda_available": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        numbers = range(torch.cuda.device_count())
        capabilities = [torch.cuda.get_device_capability(number) for number in numbers]
        build["gpus"] = [
            {"name": torch.cuda.get_device_name(number), "architecture": f"sm_{major}{minor}"}
            for number, (major, minor) in zip(numbers, capabilities, strict=True)
        ]
    return build


def compiled_kernel() -> str:
    """Compile and run one inductor kernel: C++ on a CPU, Triton on a GPU."""
    # in each check, so that a torch that does not import is an answer
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def scaled(x: Any) -> Any:
        return (x * 2 + 1).relu().sum()

    total = float(torch.compile(scaled, fullgraph=True)(torch.ones(64, device=device)))
    if total != 192.0:
        raise RuntimeError(f"a compiled kernel gave {total} instead of 192")
    return device


def captured_graph() -> str:
    """Capture and replay one CUDA graph; not applicable without a GPU."""
    # in each check, so that a torch that does not import is an answer
    import torch

    if not torch.cuda.is_available():
        return "not applicable"
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x + 1
    x.fill_(41.0)
    graph.replay()
    torch.cuda.synchronize()
    if float(y[0]) != 42.0:
        raise RuntimeError(f"a replayed CUDA graph gave {float(y[0])} instead of 42")
    return "replayed"


CHECKS: dict[str, Callable[[], Any]] = {
    "nonce": nonce,
    "facts": facts,
    "root_is_read_only": root_is_read_only,
    "torch": torch_build,
    "compiled_kernel": compiled_kernel,
    "captured_graph": captured_graph,
}
ENVIRONMENT_CHECKS = ("torch", "compiled_kernel", "captured_graph")  # the others ask what a container may do


def main(arguments: list[str]) -> int:
    answer_file, *names = arguments
    Path(os.environ.get("HOME", "/tmp")).mkdir(parents=True, exist_ok=True)  # noqa: S108
    answer: dict[str, Any] = {"ok": {}, "failed": {}}
    for name in names:
        try:
            answer["ok"][name] = CHECKS[name]()
        except Exception as error:  # whatever it is, it is the answer
            answer["failed"][name] = f"{type(error).__name__}: {error}"[-1500:]
    text = json.dumps(answer)
    try:
        Path(answer_file).write_text(text)
    except OSError as error:
        print(f"::probe-unwritable {error}", flush=True)  # noqa: T201
    # also in the log, where somebody who looks for it finds it
    print(f"::probe {text}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
