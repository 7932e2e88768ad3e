# ruff: noqa: T201 - printing is how a cell reports
"""A cell that behaves as told instead of measuring: `python stub_cell.py <behaviour> <request.json> <result.json>`.

Only for tests of the machinery around cells. It writes a schema-true result without torch, and no test judges by it.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HANG = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"

# A terminal's title, its clipboard, a cleared screen, text that is read in another order than it is written.
ESCAPES = "\x1b]0;title\x07\x1b]52;c;bHM=\x07\x1b[2J\x1b[31mred\r\x08\x9b2J\u202eflipped"

EAT = "import os, signal; eaten = bytearray(os.urandom(2**20)) * 300; signal.pause()"


def main(behaviour: str, request_path: Path, result_path: Path) -> int:  # noqa: PLR0912 - one case per behaviour
    request = json.loads(request_path.read_text(encoding="utf-8"))
    behaviour = json.loads(behaviour).get(request["cache"]["name"], "measure") if behaviour[0] == "{" else behaviour
    suites = request["profile"]["suites"]
    if request["only_references"]:
        write(result_path, leave_references(request))
        return 0
    match behaviour:
        case "measure":
            print(f"::suite {suites[0]} start", flush=True)
            print("an ordinary line")
            write(result_path, result(request, suites))
        case "environment":
            write(result_path, result(request, suites, details={"environment": dict(os.environ)}))
        case "references":
            given = sorted((Path(request["work_folder"]) / "references").iterdir())
            found = {path.name: path.read_text() for path in given}
            for path in given:
                path.unlink()  # as a cell does before its candidate can look
            write(result_path, result(request, suites, details={"found": found, "told": request["references"]}))
        case "error":
            write(result_path, result(request, suites, outcome="error"))
        case "escapes":
            print(f"::suite {ESCAPES}", flush=True)
            failure = {"kind": "crash", "message": ESCAPES, "last_lines": [ESCAPES]}
            write(result_path, result(request, suites, outcome="error") | {"failure": failure})
        case "exit":
            print("about to leave")
            return 3
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "garbage":
            result_path.write_text("{ not json")
        case "link":
            result_path.symlink_to("/etc/hostname")
            (Path(request["work_folder"]) / "group.log").symlink_to("/etc/hostname")
        case "other cell":
            write(result_path, result(request, suites) | {"cell": "another/one/default"})
        case "half":
            write(result_path, result(request, suites[:1]))
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            hang(request)
        case "stop politely":
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                hang(request)
            except KeyboardInterrupt:
                write(result_path, stopped(request, suites))
        case "memory":
            child = subprocess.Popen([sys.executable, "-c", EAT], start_new_session=True)
            print(f"child {child.pid}", flush=True)
            signal.pause()
    return 0


def leave_references(request: dict) -> dict:  # type: ignore[type-arg]
    """As a cell does that was asked for nothing else."""
    folder = Path(request["work_folder"]) / "references"
    folder.mkdir()
    contents = {"references.safetensors": b"answers", "truths.safetensors": b"truths"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    told = result(request, request["profile"]["suites"], outcome="not_run")
    return told | {"provenance": {"references": {"files": hashes, "made": {"scenarios": []}}}}


def hang(request: dict) -> None:  # type: ignore[type-arg]
    """With a child in a session of its own, as the cell's groups are."""
    marker = Path(request["work_folder"]) / "child"
    child = subprocess.Popen([sys.executable, "-c", HANG, str(marker)], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    print("::suite recompile start", flush=True)
    signal.pause()


def result(request: dict, suites: list[str], outcome: str = "measured", details: dict | None = None) -> dict:  # type: ignore[type-arg]
    evidence = {suite: {"suite": suite, "outcome": outcome, "details": details or {}} for suite in suites}
    return {"schema": 3, "cell": request["cell"], "request": request, "provenance": {}, "evidence": evidence}


def stopped(request: dict, suites: list[str]) -> dict:  # type: ignore[type-arg]
    failure = {"kind": "interrupted", "message": "told to stop"}
    return result(request, suites) | {"failure": failure}


def write(path: Path, content: dict) -> None:  # type: ignore[type-arg]
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
