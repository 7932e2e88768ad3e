# ruff: noqa: T201 - the table is its purpose
"""`nox -s faults`: inject faults into real runs of the runner, resume, and tell what was lost.

It lies with the tests and is not shipped: it compiles a shim that makes system calls fail, kills processes and fills
disks, and nobody who installed the command should be one typing mistake away from that.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from tests.faults.catalogue import FAULTS
from tests.faults.outcome import Campaign, Outcome
from tests.faults.trial import build_shim


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nox -s faults --", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--moments", type=int, default=20, help="of a run, for each fault that has moments")
    asked = parser.parse_args(words)
    # told to go, it goes as after Ctrl-C: disks are unmounted, images and folders removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="toto-faults-") as folder:
        told = campaign(Path(folder), asked.only or list(FAULTS), seed=asked.seed, moments=asked.moments)
    print(f"\n{table(told)}\n\n{summary(told)} (seed {asked.seed})")
    return int(any(outcome.damage for outcomes in told.values() for outcome in outcomes))


def campaign(folder: Path, names: Sequence[str], *, seed: int, moments: int) -> dict[str, list[Outcome]]:
    """Try the faults of these names, telling each as it was tried."""
    made = Campaign(folder, build_shim(folder), seed, moments)
    told: dict[str, list[Outcome]] = {name: [] for name in names}
    for name in names:
        for outcome in FAULTS[name](made):
            told[name].append(outcome)
            result = f"not run: {outcome.not_run}" if outcome.not_run else f"{outcome.happened}; {lost(outcome)}"
            print(f"{time.strftime('%H:%M:%S')} {name} at {outcome.moment}: {result}", flush=True)
    return told


def lost(outcome: Outcome) -> str:
    damage = outcome.damage
    parts = [("lost", damage.lost), ("left", damage.left), ("broken", damage.broken)]
    return "; ".join(f"{word}: {', '.join(what)}" for word, what in parts if what) or "nothing lost"


def table(told: dict[str, list[Outcome]]) -> str:
    rows = []
    for name, outcomes in told.items():
        tried = [outcome for outcome in outcomes if not outcome.not_run]
        happened = Counter(outcome.happened for outcome in tried)
        said = "; ".join(f"{count}x {what}" if len(tried) > 1 else what for what, count in happened.most_common(3))
        rest = "; ..." if len(happened) > 3 else ""
        skipped = "; ".join(sorted({f"not run: {outcome.not_run}" for outcome in outcomes if outcome.not_run}))
        bad = sorted({lost(outcome) for outcome in tried if outcome.damage})
        words = [part for part in (said + rest, skipped) if part]
        rows.append([name, len(tried), "; ".join(words), "; ".join(bad)[:300] or ("nothing" if tried else "-")])
    header = ["fault", "times", "what happened", "what was lost"]
    return tabulate(rows, header, tablefmt="simple_grid", maxcolwidths=[24, None, 60, 40], disable_numparse=True)


def summary(told: dict[str, list[Outcome]]) -> str:
    tried = [outcome for outcomes in told.values() for outcome in outcomes if not outcome.not_run]
    cells = sum(len(outcome.damage.lost) for outcome in tried)
    leftovers = sum(len(outcome.damage.left) for outcome in tried)
    broken = sum(len(outcome.damage.broken) for outcome in tried)
    return f"{len(tried)} faults injected: {cells} cells lost, {leftovers} leftovers, {broken} broken promises"


if __name__ == "__main__":
    sys.exit(main())
