# ruff: noqa: T201 - what it prints is its purpose
"""Asks OSV, through pip-audit, for known vulnerabilities of what is in docker/locks: `nox -s audit`.

Exit code 0: asked, and none is known. 1: some are. 3: nobody could be asked, which is not the same as none.
"""

import json
import subprocess
import sys
from pathlib import Path

LOCKS = Path(__file__).parent / "locks"


def main(names: list[str]) -> int:
    locks = [LOCKS / f"{name}.txt" for name in names] or sorted(LOCKS.glob("*.txt"))
    codes = [audit(lock) for lock in locks]
    return 1 if 1 in codes else max(codes)


def audit(lock: Path) -> int:
    if not lock.is_file():
        print(f"{lock.stem}: no such lock; there are {', '.join(path.stem for path in sorted(LOCKS.glob('*.txt')))}")
        return 2
    # the lock names everything and its hashes: pip is asked for nothing
    options = ["--disable-pip", "--require-hashes", "-s", "osv", "-f", "json", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(lock), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answered = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"{lock.stem}: NOT AUDITED: {last[:300]}")
        return 3
    found = [(one["name"], one["version"], flaw) for one in answered for flaw in one.get("vulns", [])]
    skipped = [f"{one['name']} ({one['skip_reason']})" for one in answered if one.get("skip_reason")]
    for name, version, flaw in found:
        fixed = ", ".join(flaw["fix_versions"]) or "nowhere yet"
        print(f"{lock.stem}: {name} {version}: {flaw['id']}, fixed in {fixed}")
    if skipped:
        print(f"{lock.stem}: nobody knows about {', '.join(skipped)}")
    print(f"{lock.stem}: {len(answered)} packages asked about, {len(found)} known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
