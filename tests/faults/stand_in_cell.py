# ruff: noqa: T201 - printing is how a cell reports
"""A quick cell for fault campaigns: `python stand_in_cell.py <orders.json> <request.json> <result.json>`.

It writes a schema-true result without torch and enters itself in a ledger, so that a cell run twice is seen. Runner,
store, supervisor and the files around it are the real ones. No verdict is ever drawn from it.
"""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

SLEEPER = "import signal; signal.pause()"


def main(orders_path: Path, request_path: Path, result_path: Path) -> int:
    orders = json.loads(orders_path.read_text(encoding="utf-8"))
    request = json.loads(request_path.read_text(encoding="utf-8"))
    suites = request["profile"]["suites"]
    ledger = os.open(orders["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if request["only_references"]:
        write(result_path, with_references(request))
        return 0
    os.write(ledger, f"begun {request['cell']}\n".encode())
    wait_at_gate(orders, request["cell"], "begin", ledger)
    for suite in suites:
        print(f"::suite {suite} start", flush=True)
        print(f"an ordinary line about {suite}", flush=True)
    match orders["behaviours"].get(request["cache"]["name"], "measure"):
        case "never ends":
            subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        case "floods its log":
            block = "".join(
                f"{number} of a compiler that says what it does{' and why' * 24}\n" for number in range(4_000)
            )
            for _ in range(int(orders["flood_blocks"])):
                sys.stdout.write(block)
        case "a line without end":
            for _ in range(int(orders["flood_blocks"])):
                sys.stdout.write("x" * 1_000_000)
            sys.stdout.flush()
        case "takes all memory":
            held = []
            while True:
                held.append(bytearray(os.urandom(2**16)) * 256)  # 16 MB that the kernel cannot share
    wait_at_gate(orders, request["cell"], "before its result", ledger)
    write(result_path, result(request, suites))
    wait_at_gate(orders, request["cell"], "after its result", ledger)
    os.write(ledger, f"ended {request['cell']}\n".encode())
    return 0


def wait_at_gate(orders: dict, cell: str, place: str, ledger: int) -> None:  # type: ignore[type-arg]
    """Stand still while a campaign holds the gate, in the cell and at the place it has chosen."""
    if orders["waits"] == [cell, place]:
        os.write(ledger, f"waiting {cell}\n".encode())
        with Path(orders["gate"]).open("r") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)


def with_references(request: dict) -> dict:  # type: ignore[type-arg]
    """As a cell does that was asked for nothing else."""
    folder = Path(request["work_folder"]) / "references"
    folder.mkdir(exist_ok=True)
    contents = {"references.safetensors": b"answers", "truths.safetensors": b"truths"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    told = result(request, request["profile"]["suites"], outcome="not_run")
    return told | {"provenance": {"references": {"files": hashes, "made": {"scenarios": []}}}}


def result(request: dict, suites: list[str], outcome: str = "measured") -> dict:  # type: ignore[type-arg]
    evidence = {suite: {"suite": suite, "outcome": outcome} for suite in suites}
    return {"schema": 3, "cell": request["cell"], "request": request, "provenance": {}, "evidence": evidence}


def write(path: Path, content: dict) -> None:  # type: ignore[type-arg]
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
