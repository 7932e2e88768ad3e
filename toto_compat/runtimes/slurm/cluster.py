"""Slurm's own commands: submitting through submitit, asking the queue, cancelling. Accounting is never asked."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toto_compat.errors import ExitCode, MissingExtraError, TotoCompatError
from toto_compat.evidence.files import storage_errors
from toto_compat.matrix.slurm import JobDemands, SlurmSettings

# Slurm reads % in the names of files, and a batch script is a shell's
_USABLE_FOLDER = re.compile(r"/[A-Za-z0-9_./+@=,: -]*")
_ANSWER_SECONDS = 60.0
LARGEST_ARRAY = 1000  # Slurm's own default is an index below 1001
WARNING_SECONDS = 60  # before the end of its time a job is told, to end its cell and say so
_EXTRA_MEMORY_MB = 1024  # for what watches the cell

# A job in one of these is over. In any other, one of a later Slurm such as EXPEDITING included, it can still bring a
# result; what has ended in a state that is not known here is soon forgotten by Slurm, and then counts as over
_OVER = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
        *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED"),
    }
)
# Pending, and for ever unless somebody releases it: what Slurm itself has put back and holds, by state or by reason
# (launch failed requeued held, job requeued in held state, ...; some releases write _ for a space), and what a person
# holds. A user who holds a job means to release it
_PUT_BACK_STATES = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_PUT_BACK = re.compile(r"\w*requeued\w*_(held|special_exit)\w*|JobHoldMaxRequeue|DependencyNeverSatisfied")
_HELD_BY_ADMIN, _HELD_BY_USER = "JobHeldAdmin", "JobHeldUser"

# What a job gets of the shell that submits: what finds programs and packages, and nothing that is there by chance, such
# as tokens. What Slurm itself sets comes along by itself
_PASSED_ON = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYENV_ROOT"),
        *("CC", "CXX", "CUDA_HOME", "CUDA_DEVICE_ORDER", "BASH_ENV", "LOADEDMODULES", "_LMFILES_"),
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
_PASSED_ON_FROM = ("TOTO_COMPAT_", "LC_", "PIP_", "DOCKER_", "MODULE", "LMOD_", "BASH_FUNC_")
_JOB_LINE = re.compile(r"\s*([0-9][^|\s]*)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)")  # as `queue` asks for it
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(%%)?", re.ASCII)  # a function of bash has %% at its end


class SlurmError(TotoCompatError):
    """Slurm does not answer, or refused."""

    code = ExitCode.SLURM


@dataclass(frozen=True)
class QueuedJob:
    """Holds what the queue says of one job."""

    state: str
    node: str = ""
    reason: str = ""
    name: str = ""

    @property
    def held(self) -> str:
        """Say why it does not run until somebody releases it; '' if it is not held."""
        if self.state in _PUT_BACK_STATES:
            return self.state
        reason = self.reason.strip().replace(" ", "_")
        is_held = reason in (_HELD_BY_ADMIN, _HELD_BY_USER) or _PUT_BACK.fullmatch(reason)
        return reason if self.state == "PENDING" and is_held else ""

    @property
    def may_be_replaced(self) -> bool:
        """Tell if another job in its place is nobody's affront: what an admin holds stays held."""
        return self.held != _HELD_BY_ADMIN

    @property
    def is_coming(self) -> bool:
        return self.state not in _OVER and self.held in ("", _HELD_BY_USER)


@dataclass(frozen=True)
class Cluster:
    """Submits into a folder that the nodes see, and asks about what was submitted."""

    folder: Path  # submitit's
    settings: SlurmSettings

    def check(self) -> None:
        """Find out before anything is noted as asked for whether Slurm can be asked at all."""
        try:
            # here and not above: as in `submit`
            import submitit  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "--executor slurm needs the package submitit", hint="pip install 'toto-compat[matrix,slurm]'"
            ) from error
        check_folder(self.folder)
        if not all(map(shutil.which, ("srun", "sbatch"))):
            raise no_slurm()

    def submit(
        self,
        function: Any,
        tasks: Sequence[Path],
        demands: JobDemands,
        *,
        cpus: int,
        memory_mb: int,
        minutes: float,
        at_a_time: int,
        name: str,
        after: Sequence[str] = (),
    ) -> list[str]:
        """Submit one array whose jobs each call `function` with one of the paths; their ids, in the same order."""
        # here and not above: whoever runs cells on this machine does without it
        import submitit

        executor = submitit.SlurmExecutor(folder=self.folder, max_num_timeout=0)
        asked = {
            "partition": demands.partition,
            "gres": demands.gres,
            "constraint": demands.constraint,
            "account": self.settings.account,
            "qos": self.settings.qos,
            "exclusive": self.settings.exclusive or None,
            "setup": list(self.settings.setup) or None,
            "dependency": ":".join(("afterany", *after)) if after else None,
        }
        limit = max(1, round(demands.minutes or minutes))
        executor.update_parameters(
            **{key: value for key, value in asked.items() if value is not None},
            job_name=name,
            time=limit,
            cpus_per_task=cpus,
            array_parallelism=at_a_time,
            signal_delay_s=min(WARNING_SECONDS, limit * 20),
            additional_parameters={
                "mem": f"{memory_mb + _EXTRA_MEMORY_MB}M",
                "requeue": True,
                "export": ",".join(passed_on(os.environ)),
            },
            # since 22.05 a step does not take over the processors of its job; of its variables it gets what setup made
            srun_args=[f"--cpus-per-task={cpus}", "--export=ALL"],
        )
        try:
            with _without_defaults_of_sbatch():
                jobs = executor.map_array(function, [str(task) for task in tasks])
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
            said = str(error).strip().splitlines()
            raise SlurmError(
                f"Slurm refused the jobs: {said[-1] if said else type(error).__name__}",
                hint="see partition, account, gres and minutes under `slurm` in matrix.yaml; `sinfo -o '%P %G %l'`"
                " lists what the cluster has",
            ) from error
        return [job.job_id for job in jobs]

    def leave_calls(self, function: Any, tasks: Mapping[str, Path]) -> None:
        """Leave for each job what it calls, where whoever submitted it was killed before that."""
        # here and not above: as in `submit`
        from submitit.core.utils import DelayedSubmission, JobPaths, temporary_save_path

        for job, task in tasks.items():
            place = JobPaths(folder=self.folder, job_id=job).submitted_pickle
            if not place.exists():
                with storage_errors(place, "written"), temporary_save_path(place) as temporary:
                    DelayedSubmission(function, str(task)).dump(temporary)


def passed_on(variables: Mapping[str, str]) -> list[str]:
    """Name the variables of a shell that a job gets."""
    return [
        name
        for name in sorted(variables)
        if _NAME.fullmatch(name) and (name in _PASSED_ON or name.startswith(_PASSED_ON_FROM))
    ]


@contextmanager
def _without_defaults_of_sbatch() -> Iterator[None]:
    """Hide variables that sbatch prefers to its script's lines: what is asked for stands in matrix.yaml."""
    taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SBATCH_")}
    try:
        yield
    finally:
        os.environ.update(taken)


def check_folder(folder: Path) -> None:
    """Refuse a folder whose name would be something else to Slurm or to a shell."""
    if not _USABLE_FOLDER.fullmatch(str(folder)):
        raise SlurmError(
            f"{folder}: jobs cannot be kept there: its path has characters that Slurm or a shell reads",
            hint="take a folder with letters, digits, spaces and _./+@=,:- only: --results FOLDER",
        )


def queue() -> dict[str, QueuedJob] | None:
    """Ask for all of this user's jobs that Slurm still knows, ended ones included; None if it does not answer.

    What is no answer of squeue's, or half of one, is none: every job would look forgotten, and be run again."""
    done = _run(["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T|%N|%r|%j"])
    if done is None or done.returncode != 0:
        return None
    jobs = dict[str, QueuedJob]()
    for line in filter(str.strip, done.stdout.splitlines()):
        if told := _JOB_LINE.fullmatch(line):
            jobs[told[1]] = QueuedJob(*(part.strip() for part in told.groups()[1:]))
        elif not jobs or line.lstrip()[0].isdigit():
            return None
        # else it belongs to the name of the job before it, which has a line break
    return jobs


def cancel_jobs(jobs: Sequence[str]) -> bool:
    """Cancel jobs, those that have ended included; False if Slurm did not take the order."""
    for start in range(0, len(jobs), LARGEST_ARRAY):
        done = _run(["scancel", *jobs[start : start + LARGEST_ARRAY]])
        # that a job has ended by now is no failure, and scancel does not tell it apart by its exit code
        if done is None or (done.returncode != 0 and "Invalid job id" not in done.stderr):
            return False
    return True


def no_slurm() -> SlurmError:
    return SlurmError(
        "there is no Slurm here: srun is not found",
        hint="run it on a machine that submits to the cluster; `--executor local` needs none",
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    # a user's own defaults would leave jobs out of the answer, or of what is cancelled
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
            env=variables,
        )
    except FileNotFoundError as error:
        raise no_slurm() from error
    except (OSError, subprocess.TimeoutExpired):
        return None
