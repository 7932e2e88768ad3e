"""Where a cell's evidence comes from. Everything is asked of the system; what does not answer stays empty."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from toto_compat.contract.files import utc_now
from toto_compat.contract.references import References
from toto_compat.contract.request import Origin
from toto_compat.contract.result import Provenance

_MET_BY_CELLS = (
    "binutils",
    "clang",
    "cuda",
    "g++",
    "gcc",
    "libc6",
    "libcuda",
    "libgcc",
    "libgomp",
    "libnvidia",
    "libstdc++",
    "nvidia",
    "python3",
)


def torch_facts() -> dict[str, Any]:
    """Return what only an imported torch can tell. Called in a group process, never in the orchestrator."""
    # here and not above: the orchestrator, which asks the rest, does without
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_git": str(torch.version.git_version or ""),
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_architecture"] = f"sm_{major}{minor}"
    return facts


def collect_provenance(origin: Origin, *, started: str) -> Provenance:
    """Ask where this process runs; what only the runtime knows comes with the request.

    The programs it asks may be slow: not at the end of a cell."""
    packages = installed_packages()
    return Provenance(
        torch=packages.get("torch", ""),
        driver=_first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or None,
        python=platform.python_version(),
        toto_ts=packages.get("toto-ts", ""),
        xformers=packages.get("xformers"),
        packages=packages,
        system_packages=system_packages(all_of_them=bool(origin.image)),
        compiler=_first_line([os.environ.get("CXX", "g++"), "--version"]),
        **origin.model_dump(),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_bytes=_memory_bytes(),
        os=_os_name(),
        host=platform.node(),
        started=started,
    )


def complete_provenance(
    collected: Provenance, *, cache_class: str, facts: dict[str, Any], references: References | None
) -> Provenance:
    """With the end of the cell, and what only its groups know; `facts` are the torch facts of one that got that far."""
    known = {**collected.model_dump(), **facts}
    known |= {"cache_class": cache_class, "references": references, "finished": utc_now()}
    return Provenance.model_validate(known)


def installed_packages() -> dict[str, str]:
    """Every distribution this interpreter sees, by its normalised name."""
    named = ((distribution.metadata["Name"], distribution.version) for distribution in metadata.distributions())
    return dict(sorted((name.lower().replace("_", "-"), version) for name, version in named if name))


def system_packages(*, all_of_them: bool) -> dict[str, str]:
    """Debian packages and their versions; pins cover pip only, so drift underneath must at least be visible.

    An image has few. A machine has hundreds that no cell ever meets: there only what compiles and what is linked to.
    """
    output = _output(["dpkg-query", "--show", "--showformat=${binary:Package}\t${Version}\n"])
    installed = dict(_pairs(output.splitlines()))
    if all_of_them:
        return installed
    return {name: version for name, version in installed.items() if name.startswith(_MET_BY_CELLS)}


def _pairs(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, tab, version = line.partition("\t")
        if tab and version:
            yield name, version


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _os_name() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return f"{line.partition('=')[2].strip().strip(chr(34))}, {platform.system()} {platform.release()}"
    return f"{sys.platform} {platform.release()}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "").strip()


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout if finished.returncode == 0 else ""
