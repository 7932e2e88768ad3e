"""Every way a command can end, and the errors that carry those exit codes.

An error here is something the user can act on: its message says what is wrong, where, and what to do next.
Anything else that escapes is a bug and keeps its traceback.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    BUG = 1  # an unexpected exception: please report it
    USAGE = 2  # the command line itself was wrong (click's own code)
    MATRIX_FILE = 3  # matrix.yaml cannot be read or does not fit the schema
    SELECTION = 4  # a selector, environment, run or gate name that matches nothing
    ENVIRONMENT = 5  # an environment cannot be built: python, torch, compiler, image
    CELL_NOT_RUN = 6  # at least one cell could not be run: crash, hang, out of memory
    REQUIREMENT = 7  # a row named by --require is not PASS, or `toggle enable` has no verdict that allows it
    STORAGE = 8  # results cannot be read or written: permissions, full disk, corrupt file
    INPUT = 9  # a file given by the user (log, CSV, checkpoint, incident) cannot be used
    FINDINGS = 10  # analyze, lint-env or diff found what --fail-on asks to fail on; releases --check, release-check
    NOT_REPRODUCED = 11  # an incident did not show all that is expected of it, or bisect found no change
    ENGINE = 12  # the container engine does not answer or refused
    MISSING_EXTRA = 13  # the command needs packages that a slim install leaves out
    BUNDLE = 14  # a bundle is damaged, unsafe to unpack, or none of ours
    SLURM = 15  # the cluster does not answer or refused the jobs
    INTERRUPTED = 130  # Ctrl-C


class TotoCompatError(Exception):
    """A problem the user can solve. `code` becomes the exit code of the command."""

    code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class MatrixFileError(TotoCompatError):
    code = ExitCode.MATRIX_FILE


class SelectionError(TotoCompatError):
    code = ExitCode.SELECTION


class EnvironmentBuildError(TotoCompatError):
    code = ExitCode.ENVIRONMENT


class StorageError(TotoCompatError):
    code = ExitCode.STORAGE


class InputError(TotoCompatError):
    code = ExitCode.INPUT


class RefusedError(TotoCompatError):
    code = ExitCode.REQUIREMENT


class MissingExtraError(TotoCompatError):
    code = ExitCode.MISSING_EXTRA


class EngineError(TotoCompatError):
    code = ExitCode.ENGINE


class BundleError(TotoCompatError):
    code = ExitCode.BUNDLE
