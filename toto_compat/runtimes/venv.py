"""Runs cells as processes of an environment's virtualenv, on this machine."""

import os
from pathlib import Path

from toto_compat.contract.files import utc_now
from toto_compat.contract.request import CellRequest, Device, Environment, Limits
from toto_compat.contract.result import CellResult, Provenance
from toto_compat.environments.pythons import compiler_version, find_compiler, find_python
from toto_compat.environments.virtualenv import (
    build_venv,
    disk_needed,
    download_size,
    read_built,
    venv_folder,
    venv_log,
)
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import write_model
from toto_compat.evidence.references import KnownReferences
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes import probe
from toto_compat.runtimes.cell_process import (
    CELL_COMMAND,
    REQUEST_FILE,
    RESULT_FILE,
    WORK,
    CellProcesses,
    check_control_group,
    collect_result,
)
from toto_compat.runtimes.gpu import check_gpus, first_gpu
from toto_compat.runtimes.inputs import with_inputs
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.probing import (
    PROBE_SECONDS,
    Probed,
    blame_probe,
    check_answer,
    probe_record,
    probed_once,
    read_answer,
    scratch_folder,
)
from toto_compat.runtimes.references import give_references
from toto_compat.runtimes.seam import AttachedCommand, BuildNeeds, OnLine, PreparedEnvironment
from toto_compat.runtimes.source import CellSource

_BUILD_SECONDS = {Device.CPU: 90.0, Device.CUDA: 240.0}  # measured on two cores and a fast index
_LONGEST_TMPDIR = 70  # multiprocessing puts sockets below it, and their paths end at 107 characters


class VenvRuntime:
    """Cells in virtualenvs. Safe to use from several threads."""

    name = "venv"
    elsewhere = False

    def __init__(
        self, source: CellSource, *, limits: Limits, device: Device, command: tuple[str, ...] = CELL_COMMAND
    ) -> None:
        self.source = source
        self._limits, self._device, self._command = limits, device, command
        self._processes = CellProcesses()

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:
        built = read_built(venv_folder(environment_name, environment))
        return built.lock if built else None

    def obstacle(self, environment_name: str, environment: Environment) -> str:
        try:
            find_compiler()
            if self.lock_of(environment_name, environment) is None:
                find_python(environment.python)
            self._check_gpus(environment_name, environment)
        except EnvironmentBuildError as error:
            return str(error)
        return ""

    def needs(self, environment_name: str, environment: Environment) -> BuildNeeds:  # noqa: ARG002 - the protocol's
        return BuildNeeds(
            download_bytes=download_size(environment),
            disk_bytes=disk_needed(environment),
            seconds=_BUILD_SECONDS[environment.device],
        )

    def tidy(self) -> None:
        """Do nothing: cells are processes, and end with their runner."""

    def build_log(self, environment_name: str, environment: Environment) -> Path:
        return venv_log(environment_name, environment)

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        built = build_venv(environment_name, environment, say)
        return PreparedEnvironment(
            name=environment_name, environment=environment, runtime=self.name, python=built.python, lock=built.lock
        )

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        check_control_group()
        self._check_gpus(environment_name, environment)
        prepared = self.build(environment_name, environment, say)
        device, compiler = environment.runs_on(self._device), find_compiler()
        facts = [self.name, prepared.python, prepared.lock, compiler, compiler_version(compiler)]
        probed_once(probe_record(facts, device, self._limits), lambda: self._probe(prepared, device))
        return prepared

    def _check_gpus(self, environment_name: str, environment: Environment) -> None:
        device = environment.runs_on(self._device)
        if device is Device.CUDA:  # on a CPU a broken nvidia-smi keeps nobody from running
            check_gpus(environment_name, environment, device, find_gpus())

    def _probe(self, prepared: PreparedEnvironment, device: Device) -> Probed:
        """See if the virtualenv's own interpreter compiles a kernel and uses the GPU, as a cell would."""
        with scratch_folder() as folder:
            variables = self._variables(prepared, cell_variables(self._limits, device), folder, device)
            end = self._processes.run(
                [prepared.python, "-I", probe.__file__, probe.ANSWER_FILE, *probe.ENVIRONMENT_CHECKS],
                env=variables | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
                folder=folder,
                timeout=PROBE_SECONDS,
                memory=self._limits.memory_bytes,
                on_line=lambda _: None,
            )
            answer = read_answer(folder / probe.ANSWER_FILE)
        if answer is None:
            raise blame_probe(prepared.name, end, self._limits, runtime=self.name)
        check_answer(prepared.name, prepared.environment, device, answer, runtime=self.name)
        return Probed(answer=answer)

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,
        on_line: OnLine,
        *,
        gpu: str | None = None,
        references: KnownReferences | None = None,
    ) -> CellResult:
        started = utc_now()
        variables = self._variables(prepared, request.variables, folder, request.device, gpu)
        origin = request.origin.model_copy(
            update={"runtime": self.name, "lock": prepared.lock, "source_hash": self.source.hash}
        )
        work = folder / WORK
        work.mkdir(parents=True, exist_ok=True)
        own = {"work_folder": str(work), "origin": origin, "references": give_references(references, work)}
        seen = with_inputs(request, lambda path, _: str(path))
        write_model(folder / REQUEST_FILE, seen.model_copy(update=own))
        end = self._processes.run(
            [prepared.python, *self._command, str(folder / REQUEST_FILE), str(folder / RESULT_FILE)],
            env=variables,
            folder=folder,
            timeout=request.profile.timeout_minutes * 60,
            memory=request.limits.memory_bytes,
            on_line=on_line,
        )
        known = Provenance(**origin.model_dump(), torch=prepared.environment.torch, started=started, finished=utc_now())
        return collect_result(request, folder, end, known)

    def attached(
        self,
        prepared: PreparedEnvironment,
        words: tuple[str, ...],
        folder: Path,
        *,
        terminal: bool,  # noqa: ARG002 - it is this process's own, in any case
    ) -> AttachedCommand:
        device = prepared.environment.runs_on(self._device)
        return AttachedCommand(
            words=tuple(word.replace("{python}", prepared.python) for word in words),
            variables=self._variables(prepared, cell_variables(self._limits, device), folder, device),
            folder=folder,
        )

    def stop(self) -> None:
        self._processes.stop()

    def _variables(
        self,
        prepared: PreparedEnvironment,
        variables: dict[str, str],
        folder: Path,
        device: Device,
        gpu: str | None = None,
    ) -> dict[str, str]:
        """Make the whole environment of a process: nothing of the user's shell but where programs and libraries are.

        To a cell's variables come those that name a place or a GPU of this machine.
        """
        home, temporary = folder / "home", folder / "tmp"
        for made in (home, temporary):
            made.mkdir(parents=True, exist_ok=True)
        places = {
            "PATH": os.pathsep.join([str(Path(prepared.python).parent), os.environ.get("PATH", os.defpath)]),
            "HOME": str(home),
            "CXX": find_compiler(),
            "PYTHONPATH": str(self.source.folder),
        }
        if len(str(temporary)) < _LONGEST_TMPDIR:
            places["TMPDIR"] = str(temporary)
        if device is Device.CUDA:
            passed_on = ("LD_LIBRARY_PATH", "CUDA_HOME")
            places |= {name: os.environ[name] for name in passed_on if name in os.environ}
            # one of those that the user's own CUDA_VISIBLE_DEVICES leaves, by its UUID
            places["CUDA_VISIBLE_DEVICES"] = gpu or first_gpu()
        return {**variables, **places}
