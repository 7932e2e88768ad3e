"""What a timing depends on beside the code: the machine's state before and after."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def machine_conditions() -> Mapping[str, Any]:
    """Load, clocks, throttling and who else uses the GPU: what explains a figure that does not repeat."""
    conditions: dict[str, Any] = {"load_average": list(os.getloadavg())}
    frequency = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    if frequency.is_file():
        conditions["cpu_mhz"] = int(frequency.read_text()) / 1000.0
    if shutil.which("nvidia-smi"):
        conditions["gpu"] = _nvidia_smi(
            "--query-gpu=clocks.sm,clocks.mem,clocks_throttle_reasons.active,temperature.gpu,utilization.gpu"
        )
        own = str(os.getpid())
        others = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory").splitlines()
        conditions["foreign_gpu_processes"] = [line for line in others if line.partition(",")[0].strip() != own]
    return conditions


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip()
