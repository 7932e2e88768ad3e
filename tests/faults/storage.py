"""Disks that are full, read-only, slow or gone, files that are damaged or of another version, clocks that jump."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.kills import CELL_NOT_RUN, how
from tests.faults.outcome import ENDED_BEFORE, Campaign, Outcome, named
from tests.faults.trial import (
    CELLS,
    Damage,
    Trial,
    promises,
    resumed,
    still_left,
    whole_cell,
    whole_cells_of_latest,
)

STORAGE = 8
SMALL_DISKS = (64, 128, 256, 512, 1024, 1536)  # KB, and beyond what a whole run takes


def joined(broken: list[str], damage: Damage) -> Damage:
    return Damage(damage.lost, damage.left, (*broken, *damage.broken))


def full_at_each_call(campaign: Campaign) -> Iterator[Outcome]:
    """Let one call after the other fail with ENOSPC, once: each file of a run, at each thing done to it."""
    drawn = campaign.one_of_each_kind("full once", lambda call: not _changes_nothing(call))
    yield from _failing_calls(campaign, "full once", errno.ENOSPC, drawn=drawn)


def full_from_a_call_on(campaign: Campaign) -> Iterator[Outcome]:
    """Let every call from one on fail with ENOSPC, as a disk does that is full."""
    yield from _failing_calls(campaign, "full", errno.ENOSPC, {"FAULT_LASTS": "1"})


def breaks_at_some_calls(campaign: Campaign) -> Iterator[Outcome]:
    """Let a call fail with EIO, once, as a disk does that is about to break."""
    yield from _failing_calls(campaign, "broken", errno.EIO)


def gone_from_a_call_on(campaign: Campaign) -> Iterator[Outcome]:
    """Let every call on the results folder from one on fail, as a server does that went away."""
    results = lambda call: " /results" in call  # noqa: E731
    yield from _failing_calls(campaign, "gone", errno.ESTALE, {"FAULT_LASTS": "1"}, results, only_results=True)


def read_only_from_a_call_on(campaign: Campaign) -> Iterator[Outcome]:
    """Let every call on the results folder from one on fail, as after a remount."""
    results = lambda call: " /results" in call  # noqa: E731
    yield from _failing_calls(campaign, "read-only", errno.EROFS, {"FAULT_LASTS": "1"}, results, only_results=True)


def _changes_nothing(call: str) -> bool:
    return call.startswith(("unlink", "rmdir", "utimensat"))


def _failing_calls(
    campaign: Campaign,
    name: str,
    error: int,
    more: dict[str, str] | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
    *,
    only_results: bool = False,
    drawn: Sequence[int] = (),
) -> Iterator[Outcome]:
    calls = campaign.calls()
    chosen = [call for call in calls if wanted(call)] if only_results else list(calls)
    for moment in drawn or campaign.moments_of(name, lambda call: wanted(call) and not _changes_nothing(call)):
        number = sum(wanted(call) for call in calls[:moment]) if only_results else moment
        with campaign.trial() as trial:
            under = str(trial.results) if only_results else ""
            fault = {"FAULT_AT": str(number), "FAULT_KIND": str(error), **(more or {})}
            ended = trial.start(fault=fault, under=under).wait()
            where = f"{number}: {named(chosen[number - 1])}"
            if not trial.was_hit(number):
                yield Outcome(where, "", not_run=ENDED_BEFORE)
                continue
            # whatever could not be written is told; a cell that could not be given its files is an error of that cell
            broken = promises(ended, 0, CELL_NOT_RUN, STORAGE)
            if ended.code == STORAGE and os.strerror(error) not in ended.said:
                broken.append(f"the error does not say {os.strerror(error)!r}: {ended.said[-300:]}")
            had = len(trial.kept())
            damage = joined(broken, resumed(trial))
            yield Outcome(where, f"{how(ended)}, {had} cells kept, resumed", damage)


def small_disk(campaign: Campaign) -> Iterator[Outcome]:
    """Give results and cache a real disk that is too small; resume with one that is not."""
    for size in SMALL_DISKS[: max(2, campaign.moments)]:
        with campaign.trial() as trial:
            disk = trial.folder / "disk"
            disk.mkdir()
            moment = f"{size} KB"
            mounted = _mount(disk, size)
            if mounted:
                yield Outcome(moment, "", not_run=f"no file system can be mounted here: {mounted}")
                return
            try:
                for place in (trial.results, trial.cache):
                    (disk / place.name).mkdir()
                    place.symlink_to(disk / place.name, target_is_directory=True)
                ended = trial.start().wait()
                broken = promises(ended, 0, CELL_NOT_RUN, STORAGE)
                had = len(trial.kept())
                subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
                damage = joined(broken, resumed(trial))
                yield Outcome(moment, f"{how(ended)}, {had} cells kept, resumed with more", damage)
            finally:
                subprocess.run(["umount", "-l", disk], check=True)


def _mount(disk: Path, kilobytes: int) -> str:
    words = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def file_size_limit(campaign: Campaign) -> Iterator[Outcome]:
    """Give the runner a limit on the size of files, as a quota does."""
    for size in (4_000, 1_000, 16_000)[: campaign.moments]:
        with campaign.trial() as trial:
            ended = trial.start(limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))).wait()  # noqa: B023
            broken = promises(ended, 0, CELL_NOT_RUN, STORAGE)
            had = len(trial.kept())
            yield Outcome(f"{size} bytes", f"{how(ended)}, {had} cells kept, resumed", joined(broken, resumed(trial)))


def slow_disk(campaign: Campaign) -> Iterator[Outcome]:
    """Let every call on the results folder take 30 ms more: the run is slower and right."""
    with campaign.trial() as trial:
        fault = {"FAULT_AT": "1", "FAULT_KIND": "slow", "FAULT_LASTS": "1"}
        ended = trial.start(fault=fault, under=str(trial.results)).wait()
        yield Outcome("every call", f"{how(ended)}, then resumed", joined(promises(ended, 0), resumed(trial)))


def removed_results(campaign: Campaign) -> Iterator[Outcome]:
    """Rename the results folder away in the middle of a run; the cells are in the store."""
    moments = campaign.moments_of("removed", lambda call: "/cells/" in call)
    for number in moments[: max(1, campaign.moments // 4)]:
        with campaign.trial() as trial:
            hit = trial.start(fault={"FAULT_AT": str(number), "FAULT_KIND": "stop"})
            if not hit.until_halted():
                hit.wait()
                yield Outcome(f"{number}", "", not_run=ENDED_BEFORE)
                continue
            trial.results.rename(trial.folder / "elsewhere")
            hit.go_on()
            ended = hit.wait()
            had = len(trial.kept())
            damage = joined(promises(ended, 0, CELL_NOT_RUN, STORAGE), resumed(trial))
            yield Outcome(f"{number}", f"{how(ended)}, {had} cells kept, resumed", damage)


def clock_jumps(campaign: Campaign) -> Iterator[Outcome]:
    """Let the wall clock jump in the middle of a run: no timeout, no order and no name may hang on it."""
    jumps = {"a day back": -86_400, "ten years on": 315_360_000, "an hour back": -3_600, "to 1970": -1_700_000_000}
    moments = campaign.moments_of("clock")
    for turn, number in enumerate(moments):
        words, seconds = list(jumps.items())[turn % len(jumps)]
        with campaign.trial() as trial:
            fault = {"FAULT_AT": str(number), "FAULT_KIND": "clock", "FAULT_CLOCK": str(seconds)}
            ended = trial.start(fault=fault).wait()
            if not trial.was_hit(number):
                yield Outcome(f"{number}, {words}", "", not_run=ENDED_BEFORE)
                continue
            damage = joined(promises(ended, 0), resumed(trial))
            again = "taken from the store" if not damage.lost else "run again"
            yield Outcome(f"{number}, {words}", f"{how(ended)}, then all {again}", damage)


# --- files ------------------------------------------------------------------------------------------------------------


def _truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _zeroed(content: bytes) -> bytes:
    return bytes(len(content))


def _emptied(_: bytes) -> bytes:
    return b""


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :]


def _of_a_later_version(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "schema": 99}).encode()


def _of_another_cell(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "key": "0" * 64}).encode()


def damaged_files(campaign: Campaign) -> Iterator[Outcome]:
    """Damage one stored cell: it is set aside, named and run again, and no other is."""
    damages = (_truncated, _zeroed, _emptied, _flipped, _of_a_later_version, _of_another_cell)
    for damage_file in damages[: 2 * campaign.moments]:
        with campaign.trial() as trial:
            trial.start().wait()
            stored = sorted(trial.cache.glob("evidence/??/*.json"))
            victim = campaign.random(f"damage {damage_file.__name__}").choice(stored)
            name = json.loads(victim.read_bytes())["cell"]
            victim.write_bytes(damage_file(victim.read_bytes()))
            begun = len(trial.entries("begun"))
            ended = trial.start().wait()
            yield Outcome(damage_file.__name__.strip("_"), *_of_damaged(trial, ended.said, victim, name, begun))


def _of_damaged(trial: Trial, said: str, victim: Path, name: str, begun: int) -> tuple[str, Damage]:
    again = trial.entries("begun")[begun:]
    broken = []
    if f"{name}: a stored cell cannot be used" not in said:
        broken.append(f"the damaged file is not named: {said[-400:]}")
    if not (trial.cache / "evidence" / "damaged" / victim.name).exists():
        broken.append("the damaged file is not kept aside")
    lost = [f"{cell} is run again for nothing" for cell in again if cell != name]
    lost += [f"{name} is not run again"] if name not in again else []
    lost += [f"{cell} is nowhere" for cell in sorted(CELLS - trial.kept())]
    left = [path for path in still_left(trial) if "damaged" not in path]
    return "set aside, named, run again", Damage(tuple(lost), tuple(left), tuple(broken))


def damaged_references(campaign: Campaign) -> Iterator[Outcome]:
    """Damage the stored answers that cells are held to: set aside, named and computed again for the next cell."""
    for damage_file in (_truncated, _zeroed, _flipped)[: campaign.moments]:
        with campaign.trial() as trial:
            trial.start().wait()
            place = next(trial.cache.glob("references/*/*/references.json"))
            victim = campaign.random(f"references {damage_file.__name__}").choice(sorted(place.parent.iterdir()))
            victim.write_bytes(damage_file(victim.read_bytes()))
            ended = trial.start("--profile", "other").wait()  # as other cells, which no store has
            broken = promises(ended, 0)
            if "stored answers cannot be used" not in ended.said:
                broken.append(f"damaged answers are not named: {ended.said[-400:]}")
            if not (place.parents[1] / "damaged" / place.parent.name).is_dir():
                broken.append("damaged answers are not kept aside")
            damage = Damage(left=tuple(still_left(trial)), broken=tuple(broken))
            yield Outcome(f"{victim.name} {damage_file.__name__}", "set aside, named, computed again", damage)


def damaged_run(campaign: Campaign) -> Iterator[Outcome]:
    """Damage files of a run and go on in it: they are set aside and named, and the cell is measured again."""
    for name, files in (("a cell", "cells/*/*/*.json"), ("the list of cells", "run.json")):
        for damage_file in (_truncated, _emptied, _of_a_later_version)[: campaign.moments]:
            with campaign.trial() as trial:
                trial.start("--run", "one").wait()
                run, draw = trial.results / "one", campaign.random(f"{name} {damage_file.__name__}")
                victim = draw.choice(sorted(run.glob(files)))
                cell = whole_cell(victim)
                for stored in trial.cache.glob("evidence/??/*.json"):
                    if cell and whole_cell(stored) == cell:
                        stored.unlink()
                victim.write_bytes(damage_file(victim.read_bytes()))
                begun = len(trial.entries("begun"))
                ended = trial.start("--run", "one").wait()
                broken = promises(ended, 0)
                if "its file cannot be used" not in ended.said:
                    broken.append(f"the damaged file is not named: {ended.said[-400:]}")
                if not (run / "damaged" / victim.relative_to(run)).exists():
                    broken.append("the damaged file is not kept aside")
                again = trial.entries("begun")[begun:]
                lost = [f"{one} is run again for nothing" for one in again if one != cell]
                lost += [f"{one} is nowhere" for one in sorted(CELLS - whole_cells_of_latest(trial))]
                damage = Damage(tuple(lost), tuple(still_left(trial)), tuple(broken))
                yield Outcome(f"{name} {damage_file.__name__}", "set aside, named, run again", damage)


def older_layouts(campaign: Campaign) -> Iterator[Outcome]:
    """Write a stored cell in the layout of an earlier version: it is migrated when read, and not run again."""
    for schema in (1, 2)[: campaign.moments]:
        with campaign.trial() as trial:
            trial.start().wait()
            for path in trial.cache.glob("evidence/??/*.json"):
                cell = json.loads(path.read_bytes())
                cell["schema"] = cell["request"]["schema"] = schema
                path.write_text(json.dumps(cell), encoding="utf-8")
            damage = resumed(trial)
            yield Outcome(f"layout {schema}", "migrated when read, nothing run again", damage)


def later_run(campaign: Campaign) -> Iterator[Outcome]:
    """Write run.json as a later version would: reading it is refused by name."""
    with campaign.trial() as trial:
        trial.start("--run", "one").wait()
        path = trial.results / "one" / "run.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "schema": 7}), encoding="utf-8")
        words = [sys.executable, "-m", "toto_compat.cli", "report", "one"]
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(words, cwd=trial.folder, capture_output=True, text=True, env=variables, check=False)
        right = done.returncode == STORAGE and "run.json: written by a later version" in done.stderr
        broken = () if right else (f"exit code {done.returncode}: {done.stderr[-300:]}",)
        yield Outcome("layout 7", "refused by name", Damage(broken=broken))


# --- two runners ------------------------------------------------------------------------------------------------------


def two_runners(campaign: Campaign) -> Iterator[Outcome]:
    """Start two runners on one results folder and one cache: both end well, in a folder each."""
    for _ in range(max(1, campaign.moments // 4)):
        with campaign.trial() as trial:
            runners = [trial.start() for _ in range(2)]
            ended = [one.wait() for one in runners]
            broken = [problem for one in ended for problem in promises(one, 0)]
            folders = {path.parent.name for path in trial.results.glob("*/run.json") if not path.parent.is_symlink()}
            if len(folders) != 2:
                broken.append(f"two runners wrote {len(folders)} runs")
            yield Outcome("at once", f"both end with {ended[0].code}", joined(broken, resumed(trial)))


def two_runners_of_one_name(campaign: Campaign) -> Iterator[Outcome]:
    """Start a runner while another writes the run of that name: it is refused, and the first goes on."""
    number = campaign.moments_of("one name", lambda call: call.endswith("/cell.log"))[0]
    with campaign.trial() as trial:
        first = trial.start("--run", "one", fault={"FAULT_AT": str(number), "FAULT_KIND": "stop"})
        halted = first.until_halted()
        second = trial.start("--run", "one").wait()
        first.go_on()
        broken = promises(first.wait(), 0) + promises(second, STORAGE)
        if not halted or "another runner is writing this run" not in second.said:
            broken.append(f"the second is not refused by name: {second.said[-300:]}")
        yield Outcome("while it writes", "refused by name, the first goes on", joined(broken, resumed(trial)))
