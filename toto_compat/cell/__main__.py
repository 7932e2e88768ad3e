"""The entry of a cell: request JSON in, result JSON out. Exit code 0 means that a result was written."""

import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from toto_compat.cell.run import STOP_SIGNALS, run_cell, stop
from toto_compat.contract.files import write_atomically
from toto_compat.contract.request import CellRequest
from toto_compat.errors import ExitCode


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m toto_compat.cell <request.json> <result.json>", file=sys.stderr)  # noqa: T201
        return ExitCode.USAGE
    request_path, result_path = Path(arguments[0]), Path(arguments[1])
    try:
        request = CellRequest.model_validate_json(request_path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        print(f"error: cell request {request_path} cannot be used: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.INPUT
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    Path(request.work_folder).mkdir(parents=True, exist_ok=True)
    result = run_cell(request, request_path.resolve())
    try:
        write_atomically(result_path, result.model_dump_json(by_alias=True, indent=1))
    except OSError as error:
        print(f"error: result {result_path} cannot be written: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.STORAGE
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
