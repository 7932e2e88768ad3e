"""The GPUs of this machine as `nvidia-smi` tells them, by their UUIDs: CUDA counts them in another order than it does.

An nvidia-smi that hangs, fails or says something else is an error: whoever has a GPU must not get a CPU run unawares.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path, PurePath

from toto_compat.contract.log_line import printable
from toto_compat.errors import EnvironmentBuildError

# Eight GPUs without persistence mode take 20 s: the driver is loaded anew for each.
ANSWER_SECONDS = 90.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
# CUDA's own context takes some hundred MB, `base` with its float64 reference 2 GB: with less nothing can be measured.
LEAST_FREE_MB = 3072

_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current")
_ARCHITECTURE = "compute_cap"  # drivers before 510 do not know it
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_MIG_DEVICE = re.compile(r"^\s+MIG (?P<slice>\S+)\s+Device\s+(?P<number>\d+): \(UUID: (?P<uuid>MIG-[^)]+)\)")
_WHOLE_GPU = re.compile(r"^GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_SLICE_OF = " MIG "  # between the name of a GPU and that of a slice of it
_SLICE_GB = re.compile(r" MIG \S*?(\d+)gb")
_NUMBER = re.compile(r"[0-9]{1,12}")
_NO_GPU = "No devices were found"
_CORRUPTED_INFOROM = 14  # an exit code: it warns of what keeps no kernel from running, after its answer
# In the place of a value, of a GPU that is listed and does not work.
_DEAD = ("GPU is lost", "GPU requires reset", "Unknown Error", "ERR!")
_HIDES_THE_REST = ("", "-1", "NoDevFiles")  # CUDA takes what stands before it
_DEVICES = Path("/dev")
_OR_THE_CPU = "or run with --device cpu"


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one slice of a GPU that is split by MIG."""

    index: str  # as nvidia-smi counts, by slot; `0:1` for a slice
    name: str
    driver: str
    architecture: str  # sm_120; empty where the driver does not say
    uuid: str  # what Docker, CDI and CUDA_VISIBLE_DEVICES all take
    memory_mb: int = 0
    used_mb: int = 0
    fault: str = ""  # what nvidia-smi says of one that does not work
    whole: str = ""  # of a slice: the UUID of the GPU that it is a slice of
    lacks_slices: bool = False  # split by MIG, and no slice was made: CUDA sees nothing of it

    @property
    def is_full(self) -> bool:
        """Tell if others have filled it; of one that does not say how much is used nothing is known."""
        return bool(self.memory_mb) and self.memory_mb - self.used_mb < LEAST_FREE_MB


@functools.cache
def _asked() -> tuple[Gpu, ...] | EnvironmentBuildError:
    """Ask once: a machine whose nvidia-smi hangs is not made to wait for it at every step."""
    try:
        return tuple(_ask())
    except EnvironmentBuildError as error:
        return error


def all_gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the machine; none where there is no nvidia-smi or it finds none."""
    return tuple(gpu for gpu in _listed() if not gpu.lacks_slices)


def gpus_without_slices() -> tuple[Gpu, ...]:
    """Return those that are split by MIG and of which no slice was made: nothing can use them before."""
    return tuple(gpu for gpu in _listed() if gpu.lacks_slices)


def _listed() -> tuple[Gpu, ...]:
    answer = _asked()
    if isinstance(answer, EnvironmentBuildError):
        raise EnvironmentBuildError(answer.message, hint=answer.hint)
    return answer


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this user, in its order; all of them where it is not set.

    One of them that does not work is an error: CUDA may hang on it, or silently count without it.
    """
    gpus = all_gpus()
    named = os.environ.get(VISIBLE)
    if named is not None and gpus:
        words = takewhile(lambda word: word not in _HIDES_THE_REST, (word.strip() for word in named.split(",")))
        gpus = tuple(dict.fromkeys([_named(word, gpus) for word in words]))
    dead = next((gpu for gpu in gpus if gpu.fault), None)
    if dead is not None:
        others = ",".join(gpu.uuid for gpu in gpus if not gpu.fault)
        without = f", or leave it out: {VISIBLE}={others}" if others else ""
        raise EnvironmentBuildError(
            f"GPU {dead.index} ({dead.name}, {dead.uuid}) does not work: nvidia-smi says {dead.fault}",
            hint=f"`dmesg | grep -i xid` says why; restart the machine{without}; {_OR_THE_CPU}",
        )
    return gpus


def _named(word: str, gpus: Sequence[Gpu]) -> Gpu:
    if _NUMBER.fullmatch(word):
        _check_counted_alike(word, gpus)
        # of a GPU that is split CUDA takes the first slice
        by_index = [gpu for gpu in gpus if gpu.index.partition(":")[0] == str(int(word))]
        if by_index:
            return by_index[0]
    # CUDA takes any beginning of a UUID that only one GPU has
    is_one = word.startswith(("GPU-", "MIG-"))
    by_uuid = [gpu for gpu in gpus if is_one and (gpu.uuid.startswith(word) or gpu.whole.startswith(word))]
    if len({gpu.whole if gpu.whole.startswith(word) else gpu.uuid for gpu in by_uuid}) == 1:
        return by_uuid[0]
    listed = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
    raise EnvironmentBuildError(
        f"{VISIBLE}={os.environ[VISIBLE]}: {word!r} names "
        + ("no GPU of this machine" if not by_uuid else f"{len(by_uuid)} GPUs of this machine"),
        hint=f"nvidia-smi lists {listed}; unset {VISIBLE} to use all of them",
    )


def _check_counted_alike(word: str, gpus: Sequence[Gpu]) -> None:
    """Refuse a number where CUDA, which counts the fastest first, may mean another GPU than nvidia-smi."""
    kinds = {gpu.name.partition(_SLICE_OF)[0] for gpu in gpus}
    if len(kinds) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        listed = ", ".join(f"{gpu.name} is {gpu.uuid}" for gpu in gpus)
        raise EnvironmentBuildError(
            f"{VISIBLE}={os.environ[VISIBLE]}: {word} does not say which GPU, since CUDA counts the fastest first and"
            " nvidia-smi by slot",
            hint=f"name it by its UUID ({listed}), or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that a run uses: of those left to this user the ones of the most capable kind.

    Rows of one table come from one kind of GPU, and an old card for the display keeps nobody from using the new one.
    Nor does one that others have filled, where there is another of its kind.
    """
    gpus = visible_gpus()
    best = max(gpus, key=_rank, default=None)
    of_a_kind = tuple(gpu for gpu in gpus if best is not None and gpu.name == best.name)
    return tuple(gpu for gpu in of_a_kind if not gpu.is_full) or of_a_kind


def gpus_left_out() -> tuple[Gpu, ...]:
    """Return those that are there for this user and are not in use: of another kind, or full."""
    used = find_gpus()
    return tuple(gpu for gpu in visible_gpus() if gpu not in used)


def _rank(gpu: Gpu) -> tuple[bool, tuple[int, int], int, int]:
    """Order by what can be run at all, then by generation and size; a slice has the size that its name tells."""
    is_large_enough = not gpu.memory_mb or gpu.memory_mb >= LEAST_FREE_MB
    sliced = _SLICE_GB.search(gpu.name)
    return is_large_enough, capability(gpu.architecture) or (0, 0), gpu.memory_mb, int(sliced[1]) if sliced else 0


def capability(architecture: str) -> tuple[int, int] | None:
    """Read 'sm_86' or 'sm_90a'; None for what is no architecture."""
    match = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", architecture)
    return (int(match[1]), int(match[2])) if match else None


def why_none() -> str:
    """Say why no GPU is there to be used, where nvidia-smi answered."""
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi on PATH"
    if all_gpus():
        return f"{VISIBLE}={os.environ.get(VISIBLE, '')!r} hides every GPU"
    return next(map(lacking_slices, gpus_without_slices()), "nvidia-smi finds no GPU")


def lacking_slices(gpu: Gpu) -> str:
    """Say of a GPU that is split by MIG into nothing what is wrong and what to do."""
    return (
        f"GPU {gpu.index} ({gpu.name}) is split by MIG and has no slice; `nvidia-smi mig -i {gpu.index} -cgi 0 -C`"
        f" makes one of all of it, `nvidia-smi -i {gpu.index} -mig 0` ends the split"
    )


# --- asking -----------------------------------------------------------------------------------------------------------


def _ask() -> Iterator[Gpu]:
    if shutil.which("nvidia-smi") is None:
        _check_no_driver()
        return
    fields: tuple[str, ...] = (*_FIELDS, _ARCHITECTURE)
    said = nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if said.code != 0 and "not a valid field" in said.text:
        fields = _FIELDS
        said = nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    lines = [line for line in said.output.splitlines() if line.strip() and not line.startswith("WARNING:")]
    if _NO_GPU in said.text and not any(_is_row(line) for line in lines):
        return
    if said.code not in (0, _CORRUPTED_INFOROM):
        raise _failed(said)
    if not lines:
        raise _garbage(said, said.line)
    gpus = dict(_read_row(line, fields, said) for line in lines)  # each once, whatever it repeats
    slices = _slices() if any(gpus.values()) else {}
    for gpu, split in gpus.items():
        own_slices = slices.get(gpu.uuid, ())
        if not split or not own_slices:
            yield replace(gpu, lacks_slices=split)
        for name, number, uuid in own_slices:
            # what the slice itself has free is told by CUDA alone
            sliced = replace(gpu, memory_mb=0, used_mb=0, whole=gpu.uuid)
            yield replace(sliced, index=f"{gpu.index}:{number}", name=f"{gpu.name}{_SLICE_OF}{name}", uuid=uuid)


def _check_no_driver() -> None:
    """Refuse a machine whose driver has GPUs but that has no nvidia-smi, as a container without NVIDIA's utilities."""
    device = next((one for one in sorted(_DEVICES.glob("nvidia[0-9]*"))), None)
    if device is not None:
        raise EnvironmentBuildError(
            f"there is a GPU ({device}) and no nvidia-smi on PATH, which says what it is",
            hint="put nvidia-smi on PATH; a container gets it with NVIDIA_DRIVER_CAPABILITIES=compute,utility;"
            f" {_OR_THE_CPU}",
        )


def _is_row(line: str) -> bool:
    index, _, rest = line.partition(", ")
    return bool(_NUMBER.fullmatch(index)) and rest.startswith("GPU-")


def _read_row(line: str, fields: Sequence[str], said: "Said") -> tuple[Gpu, bool]:
    """Read one GPU, and whether it is split into slices."""
    values = _values(line)
    row = dict(zip(fields, values, strict=False))
    if len(values) != len(fields) or not _NUMBER.fullmatch(row["index"]) or not _UUID.fullmatch(row["uuid"]):
        raise _garbage(said, line)
    capability = row.get(_ARCHITECTURE, "")
    gpu = Gpu(
        index=row["index"],
        name=row["name"],
        driver=row["driver_version"],
        architecture=f"sm_{capability.replace('.', '')}" if re.fullmatch(r"[0-9]{1,3}\.[0-9]", capability) else "",
        uuid=row["uuid"],
        memory_mb=_number(row["memory.total"]),
        used_mb=_number(row["memory.used"]),
        fault=next((value for value in row.values() if any(words in value for words in _DEAD)), ""),
    )
    return gpu, row["mig.mode.current"] == "Enabled"


def _slices() -> dict[str, list[tuple[str, str, str]]]:
    """Read name, number and UUID of each slice, by the UUID of the GPU that it is a slice of."""
    said = nvidia_smi("-L")
    if said.code != 0:
        raise _failed(said)
    slices: dict[str, list[tuple[str, str, str]]] = {}
    whole = ""
    for line in said.output.splitlines():
        if found := _WHOLE_GPU.match(line):
            whole = found["uuid"]
        elif found := _MIG_DEVICE.match(line):
            slices.setdefault(whole, []).append((found["slice"], found["number"], found["uuid"]))
    return slices


def _values(line: str) -> list[str]:
    """Split a line at its commas: nvidia-smi quotes nothing. They are shown, and may be a program's name for itself."""
    return [printable(value.strip()) for value in line.split(",")]


def _number(text: str) -> int:
    return int(text) if _NUMBER.fullmatch(text) else 0


@dataclass(frozen=True)
class Said:
    """Holds what nvidia-smi answered."""

    code: int
    output: str
    errors: str = ""

    @property
    def text(self) -> str:
        return f"{self.output}\n{self.errors}".strip()

    @property
    def line(self) -> str:
        """The first line that is no GPU: what is wrong may stand after those that are right."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return next((line for line in (*(one for one in lines if not _is_row(one)), *lines)), "nothing")[:200]


def nvidia_smi(*arguments: str) -> Said:
    """Ask nvidia-smi; one that does not answer is left behind, since what waits for a driver cannot be killed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                ["nvidia-smi", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentBuildError(
                f"nvidia-smi cannot be started: {error.strerror}", hint=f"check the NVIDIA driver, {_OR_THE_CPU}"
            ) from error
        try:
            code = process.wait(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise EnvironmentBuildError(
                f"nvidia-smi does not answer within {ANSWER_SECONDS:.0f} s",
                hint="`dmesg | grep -i nvrm` says what the driver waits for; `nvidia-smi -pm 1` keeps it loaded, which"
                f" makes many GPUs answer sooner; {_OR_THE_CPU}",
            ) from None
        output.seek(0)
        errors.seek(0)
        return Said(code, output.read().decode(errors="replace"), errors.read().decode(errors="replace"))


# What to do, by words of nvidia-smi.
_ADVICE = (
    ("Driver/library version mismatch", "the driver was updated while an older one is loaded: restart the machine"),
    ("couldn't communicate with the NVIDIA driver", "the driver is not loaded: `modprobe nvidia`, or install it anew"),
    ("Insufficient Permissions", "this user may not open /dev/nvidia*: check their permissions"),
    ("Unable to determine the device handle", "a GPU fell off the bus (`dmesg | grep -i xid`): restart the machine"),
    ("GPU is lost", "a GPU fell off the bus (`dmesg | grep -i xid`): restart the machine"),
    ("NVML: Unknown Error", "a container loses its GPU when systemd is reloaded on the host: start it anew"),
    ("GPU access blocked", "Windows keeps the GPU from WSL: `wsl --update`, and update the driver of Windows"),
    ("libnvidia-ml.so", "the driver's own library is missing: install the driver (`apt-get install nvidia-driver`)"),
    ("not a valid field", "the driver is too old for any CUDA environment: update it to 525 or later"),
)


def _failed(said: Said) -> EnvironmentBuildError:
    advice = (advice for words, advice in _ADVICE if words in said.text)
    return EnvironmentBuildError(
        f"nvidia-smi fails with exit code {said.code}: {said.line}",
        hint=f"{next(advice, '`nvidia-smi` shows the same problem')}; {_OR_THE_CPU}",
    )


def _garbage(said: Said, line: str) -> EnvironmentBuildError:
    advice = (advice for words, advice in _ADVICE if words in said.text)
    return EnvironmentBuildError(
        f"nvidia-smi answers with something that is no list of GPUs: {line.strip()[:200]}",
        hint=f"{next(advice, '`nvidia-smi --query-gpu=index,uuid,name --format=csv` shows the same')}; {_OR_THE_CPU}",
    )


# --- who uses them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program that computes on a GPU."""

    gpu: str  # its UUID
    pid: str  # as the machine counts, not a container
    name: str
    memory_mb: int | None

    def __str__(self) -> str:
        held = f", {self.memory_mb} MB" if self.memory_mb is not None else ""
        return f"{self.name} (pid {self.pid}{held})"


def running_programs() -> tuple[Program, ...]:
    """List the programs that compute on any GPU now; none where nvidia-smi does not say."""
    fields = "gpu_uuid,pid,process_name,used_gpu_memory"
    try:
        said = nvidia_smi(f"--query-compute-apps={fields}", "--format=csv,noheader,nounits")
    except EnvironmentBuildError:
        return ()  # it answered a moment ago: nothing is known of programs, and nothing depends on it
    rows = [_values(line) for line in said.output.splitlines()] if said.code == 0 else []
    return tuple(
        Program(gpu, pid, PurePath(", ".join(name)).name, int(memory) if _NUMBER.fullmatch(memory) else None)
        for gpu, pid, *name, memory in (row for row in rows if len(row) >= 4)
    )


def programs_on(gpus: Sequence[Gpu]) -> dict[Gpu, list[str]]:
    """Name the programs that compute on these GPUs now, as 'python (pid 4711, 21504 MB)', of those that have any."""
    running = running_programs()
    found = {gpu: [str(program) for program in running if program.gpu == gpu.uuid] for gpu in gpus}
    return {gpu: programs for gpu, programs in found.items() if programs}
