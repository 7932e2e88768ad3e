"""What is made from the reference: README's table, the page, and the picture of the page."""

import hashlib
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from itertools import groupby, takewhile
from pathlib import Path

from packaging.version import Version
from tabulate import tabulate

from toto_compat.contract.request import Device
from toto_compat.contract.result import Outcome
from toto_compat.errors import InputError
from toto_compat.evidence.files import read_bytes, storage_errors, write_atomically
from toto_compat.evidence.store import Run, cell_path, load_run
from toto_compat.matrix.gates import Gate
from toto_compat.reference.thinning import as_text, check_same_verdict, thinned
from toto_compat.reference.torch_logs import LogCount, read_counts
from toto_compat.report.compatibility import as_json, compatibility
from toto_compat.report.publish import write_compatibility
from toto_compat.report.table import escaped_markdown, plain_markdown
from toto_compat.repro.claims import claims_page
from toto_compat.verdict.decision import Contender, DeviceDecision, torch_release
from toto_compat.verdict.judge import JudgedCell, Status
from toto_compat.verdict.judged_run import JudgedRun, judge_run
from toto_compat.verdict.ranges import ReleaseRange
from toto_compat.verdict.without_gpu import KnownWithoutGpu, known_without_gpu

SHOWN = "cpu"  # the run that README shows
BEGIN, END = "<!-- begin: made by `nox -s reference` -->", "<!-- end: made by `nox -s reference` -->"
_STAMP = "toto-compat-reference"  # the chunk of the picture that says what it shows


def judged_reference(folder: Path, name: str = SHOWN) -> JudgedRun:
    """A run of the reference as it was judged on its last day: README must not change because time passes."""
    run = load_run(folder / name)
    return judge_run(run, today=_day_of(run))


def _day_of(run: Run) -> date:
    return datetime.fromisoformat((run.info.finished or run.info.started).replace("Z", "+00:00")).date()


def identity(judged: JudgedRun) -> str:
    """A hash of all that the table and the picture tell."""
    return hashlib.sha256(as_json(compatibility(judged)).encode()).hexdigest()


# --- README ----------------------------------------------------------------------------------------------------------


def readme_block(judged: JudgedRun, counts: Sequence[LogCount]) -> str:
    """The answer, then one line per release and mode with a column per cache."""
    releases = sorted({torch_release(cell) for cell in judged.cells}, key=Version)
    span = releases[0] if len(releases) == 1 else f"{len(releases)} releases, {releases[0]} to {releases[-1]}"
    lines = [
        f"**In short**: {in_short(judged)}",
        "",
        f"Measured on {span}, {_where(judged)}, profile `{judged.run.info.profile}` "
        f"([the run](results/reference/{SHOWN})):",
        "",
        release_table(judged.cells),
        "",
        "FAIL names the [gate](docs/gates.md) that decided, or says that the compiled forecast raises; PASS has the "
        "gain over eager with toto-ts's own cache (lower end of the interval). "
        f"{_counted(counts, judged.cells)}",
        "",
        _with_commands(judged),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _with_commands(judged: JudgedRun) -> str:
    """The decision's sentence, with the commands in it to be copied as they are."""
    text = plain_markdown(judged.decision.sentence)
    commands = {one for device in judged.decision.devices.values() for one in device.next_commands}
    for command in sorted(commands, key=len, reverse=True):
        text = text.replace(f"run {plain_markdown(command)}", f"run `{command}`")
    return text


def in_short(judged: JudgedRun) -> str:
    """One sentence: since which release, with which cache and mode, on which device, by what kind of evidence."""
    told = [_of_device(device, decision) for device, decision in judged.decision.devices.items()]
    return "; ".join(sorted(told, key=lambda one: "nothing is measured" in one)) + "."


def _of_device(device: Device, decision: DeviceDecision) -> str:
    name = "the CPU" if device is Device.CPU else "CUDA"
    cells = [cell for one in decision.contenders for cell in one.cells]
    ran = [cell for cell in cells if not cell.result.request.lower_only]
    if not ran:
        rows = "1 row was" if len(cells) == 1 else f"{len(cells)} rows were"
        compiled = f"; {rows} compiled for it without a GPU" if cells else ""
        return f"on {name} nothing is measured{compiled}"
    histories = {one.name: _history(one) for one in decision.contenders}
    first = decision.contender.name if decision.contender else ""
    best = max(
        histories, key=lambda one: (len(_good_to_the_end(histories[one])), _passes(histories[one]), one == first)
    )
    good, before = _good_to_the_end(histories[best]), histories[best]
    if good:
        everywhere = f"each of the {len(good)} releases that were tried from there on, to {good[-1]}"
        tried = everywhere if len(good) > 1 else "this release alone, the newest that was tried"
        earlier = _in_words(dict(list(before.items())[: -len(good)]))
        told = f"`{best}` is good since torch {good[0]}, measured on {tried}"
        return f"on {name} {told}{f' (before that: {earlier})' if earlier else ''}"
    if _passes(before):
        return f"on {name} nothing is good on the newest release that was tried; `{best}` {_in_words(before)}, measured"
    undecided = sum(cell.verdict is Status.INCONCLUSIVE for cell in ran)
    rest = f", and {undecided} of {len(ran)} rows are not decided" if undecided else ""
    return f"on {name} no cache passes on any release that was tried{rest}, measured"


def _history(contender: Contender) -> dict[str, Status]:
    """The verdict of every release that was tried, oldest first: the worst of its rows."""
    found: dict[str, set[Status]] = {}
    for cell in contender.cells:
        found.setdefault(torch_release(cell), set()).add(cell.verdict)
    worst_first = (Status.FAIL, Status.INCONCLUSIVE, Status.PASS)
    return {release: next(one for one in worst_first if one in seen) for release, seen in found.items()}


def _good_to_the_end(history: Mapping[str, Status]) -> list[str]:
    newest_first = takewhile(lambda release: history[release] is Status.PASS, reversed(list(history)))
    return list(newest_first)[::-1]


def _passes(history: Mapping[str, Status]) -> int:
    return list(history.values()).count(Status.PASS)


def _in_words(history: Mapping[str, Status]) -> str:
    """'fails in 2.3.1, good in 2.4.1 and 2.5.1, not decided in 2.6.0'."""
    words = {Status.PASS: "good in", Status.FAIL: "fails in", Status.INCONCLUSIVE: "not decided in"}
    stretches = groupby(history, key=history.__getitem__)
    return ", ".join(f"{words[one]} {ReleaseRange(one, tuple(releases)).text}" for one, releases in stretches)


def _where(judged: JudgedRun) -> str:
    """Say on what kind of machine the cells ran, as they themselves recorded it."""
    # a cell that could not be run has not said where it was
    places = [cell.result.provenance for cell in judged.cells if cell.result.provenance.cores]
    runtimes = {"venv": "virtualenvs", "docker": "containers"}
    runtime = " and ".join(sorted({runtimes.get(place.runtime, place.runtime) for place in places}))
    cores = sorted({place.cores for place in places})
    builds = {place.torch.partition("+")[2].rstrip("0123456789"): place.torch for place in places}
    of_cpu = sorted({place.torch.partition("+")[0] for place in places if place.torch.endswith("+cpu")}, key=Version)
    told = f" ({', '.join(of_cpu)} as a CPU build, the others as CUDA builds)" if len(builds) > 1 else ""
    return f"in {runtime} on a CPU with {' or '.join(map(str, cores))} cores{told}"


def release_table(cells: Sequence[JudgedCell]) -> str:
    """Releases and modes down, the newest first; caches across."""
    caches = list(dict.fromkeys(cell.result.cell.cache for cell in cells))
    builds: dict[str, set[str]] = {}
    for cell in cells:
        builds.setdefault(torch_release(cell), set()).add(cell.result.request.environment.build)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for cell in sorted(cells, key=lambda one: Version(torch_release(one)), reverse=True):
        name, release = cell.result.cell, torch_release(cell)
        build = f" ({cell.result.request.environment.build})" if len(builds[release]) > 1 else ""
        key = (f"{release}{build}", cell.result.request.speaks_of.value, name.rpartition("/")[2])
        rows.setdefault(key, {})[name.cache] = verdict_text(cell)
    body = [[torch, mode, *(found.get(cache, "") for cache in caches)] for (torch, _, mode), found in rows.items()]
    headers = ["torch", "mode", *(f"`{cache}`" for cache in caches)]
    return tabulate(
        [[escaped_markdown(one) for one in row] for row in body], headers, tablefmt="github", disable_numparse=True
    )


def verdict_text(cell: JudgedCell) -> str:
    """A row's verdict as a table of releases shows it: with its gain, its gate, or what else became of it."""
    if cell.verdict is Status.PASS:
        speedup = cell.gates.get(Gate.SPEEDUP)
        gain = f" {speedup.value:.2f}x" if speedup and speedup.value is not None else ""
        return f"**PASS**{gain}"
    if cell.decided_by is None:
        return f"{cell.verdict.value} did not finish"
    if cell.result.request.lower_only and (known := known_without_gpu(cell.result)) is not None:
        return f"{cell.verdict.value} {_predicted(known)}"
    evidence = cell.result.evidence.get(cell.decided_by.rule.suite)
    if evidence is None and cell.result.failure is not None:
        return f"{cell.verdict.value} could not be run"
    raised = evidence is not None and evidence.outcome is Outcome.MODEL_FAILED
    return f"{cell.verdict.value} {'raises' if raised else cell.decided_by.value}"


def _predicted(known: KnownWithoutGpu) -> str:
    """What a row that was only compiled for CUDA says: a prediction, which decides nothing."""
    skips = known.objections
    if skips is None:
        graphs = "~not known"
    else:
        graphs = f"~{skips} graphs not captured whole" if skips else "~every graph captured whole"
    right = {True: ", its code right (interpreted)", False: ", its code WRONG (interpreted)", None: ""}[known.right]
    return f"{graphs}{right}"


def _counted(counts: Sequence[LogCount], cells: Sequence[JudgedCell]) -> str:
    if not counts:
        return ""
    agreeing = sum(one.agree for one in counts)
    caches = {one.cell.cache for one in counts}
    of_them = [cell for cell in cells if cell.result.cell.cache in caches]
    uncounted = {torch_release(cell) for cell in of_them} - {one.torch.partition("+")[0] for one in counts}
    raising = ReleaseRange(Status.FAIL, tuple(sorted(uncounted, key=Version))).text if uncounted else ""
    return (
        "Recompiles and graph breaks of `upstream` were counted a second time, by the text of `TORCH_LOGS` alone: the "
        f"two counts agree on {agreeing} of {len(counts)} releases"
        f"{f'; in {raising} there is none, since no forecast came to its end' if raising else ''}."
    )


def with_block(readme: str, block: str, path: Path) -> str:
    """The README with its made part replaced."""
    before, begins, rest = readme.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise InputError(f"{path}: has no place for the table", hint=f"it stands between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


# --- the picture -----------------------------------------------------------------------------------------------------


def stamped(png: bytes, text: str) -> bytes:
    """A PNG with a text chunk that says what it is a picture of."""
    signature, header_end = 8, 8 + 25  # the header chunk comes first and has 25 bytes
    if png[:4] != b"\x89PNG":
        raise InputError("the picture is no PNG")
    return (
        png[:signature] + png[signature:header_end] + _chunk(f"{_STAMP}\0{text}".encode("latin-1")) + png[header_end:]
    )


def stamp_of(png: bytes) -> str:
    """What a PNG says that it is a picture of; empty where it says nothing."""
    place = 8
    while place + 8 <= len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        if kind == b"tEXt" and content.startswith(f"{_STAMP}\0".encode()):
            return content.partition(b"\0")[2].decode("latin-1")
        place += 12 + length
    return ""


def _chunk(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + b"tEXt" + content + struct.pack(">I", zlib.crc32(b"tEXt" + content))


# --- all of it -------------------------------------------------------------------------------------------------------


def show(folder: Path, project: Path, runs: Sequence[str]) -> list[str]:
    """Make the table, the pages, the claims and the picture from the reference; what could not be made is told."""
    told = []
    for name in runs:
        if (folder / name / "run.json").exists():
            thin_again(folder / name)
            write_compatibility(judged_reference(folder, name))
            _without_spaces(folder / name / "compatibility.json")
    if not (folder / SHOWN / "run.json").exists():
        return [f"{folder / SHOWN}: nothing to show yet"]
    judged = judged_reference(folder)
    readme = project / "README.md"
    if readme.exists():
        block = readme_block(judged, read_counts(folder / SHOWN).counts)
        write_atomically(readme, with_block(read_bytes(readme).decode(), block, readme))
    claims = project / "docs" / "claims.md"
    if claims.exists():
        write_atomically(claims, claims_page(folder.parent))
    camera = project / "docs" / "screenshot.py"
    picture = project / "docs" / "report.png"
    if camera.exists() and not (picture.exists() and stamp_of(read_bytes(picture)) == identity(judged)):
        told += _take_picture(camera, folder / SHOWN / "compatibility.html", picture, identity(judged))
    return told


def thin_again(folder: Path) -> None:
    """Thin what was kept when less was left out: all of the reference together has to stay small."""
    run = load_run(folder)
    for cell in run.cells:
        path, thin = cell_path(folder, cell.cell), thinned(cell)
        if len(text := as_text(thin)) < path.stat().st_size:
            check_same_verdict(cell, thin, run.info.gates)
            write_atomically(path, text)


def _without_spaces(path: Path) -> None:
    """Write JSON that only programs read in half its size."""
    write_atomically(path, json.dumps(json.loads(read_bytes(path)), separators=(",", ":")) + "\n")


def _take_picture(camera: Path, page: Path, picture: Path, stamp: str) -> list[str]:
    new = picture.with_name(".report-new.png")
    try:
        done = subprocess.run(
            [sys.executable, str(camera), str(page), str(new)], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0 or not new.exists():
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            return [f"{picture}: not made, it shows an older reference: {last}"]
        with storage_errors(picture, "written"):
            new.write_bytes(stamped(new.read_bytes(), stamp))
            new.replace(picture)
    except subprocess.TimeoutExpired:
        return [f"{picture}: not made, the browser did not answer"]
    finally:
        new.unlink(missing_ok=True)
    return []


def stale_showing(folder: Path, project: Path) -> list[str]:
    """What does not show the reference as it is: README's table, the claims, the picture."""
    judged = judged_reference(folder)
    stale = []
    readme = project / "README.md"
    text = read_bytes(readme).decode()
    if text != with_block(text, readme_block(judged, read_counts(folder / SHOWN).counts), readme):
        stale.append("README.md: its table is not that of the reference")
    claims = project / "docs" / "claims.md"
    if claims.exists() and read_bytes(claims).decode() != claims_page(folder.parent):
        stale.append("docs/claims.md: says something else than the reference")
    picture = project / "docs" / "report.png"
    if not picture.exists() or stamp_of(read_bytes(picture)) != identity(judged):
        stale.append("docs/report.png: shows another reference")
    return stale
