"""What a cell is asked, made from matrix.yaml: one way for the matrix, incidents and whatever else runs a cell."""

from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import (
    CacheRequest,
    CellProfile,
    CellRequest,
    CompileSettings,
    Demand,
    Device,
    Limits,
    SymbolSeries,
    Workload,
    suites_here,
)
from toto_compat.contract.suites import WITHOUT_GPU, Suite
from toto_compat.errors import SelectionError
from toto_compat.matrix.demands import demands_of
from toto_compat.matrix.expand import gate_limits, is_whole_model, named_profile
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.user_cache import BUILTIN, split_source


def matrix_request(
    matrix: Matrix,
    matrix_path: Path,
    cell: CellName,
    profile_name: str,
    device: Device,
    *,
    checkpoint_folder: str | None = None,
    quiet_lock: str | None = None,
    symbols: tuple[SymbolSeries, ...] = (),
    lower_only: bool = False,
    architectures: tuple[str, ...] = (),
) -> CellRequest:
    """Make the request of a cell of the matrix under a profile; the user's own series bring their suite along.

    `architectures` stand in the place of the profile's, where a CUDA build compiles for GPUs that are not there.
    """
    profile = named_profile(matrix, profile_name)
    workload_name = cell.workload or profile.workloads[0]
    environment = matrix.environments[cell.environment]
    device = environment.runs_on(device)
    of_cell = profile.of_cell
    if architectures and environment.device is Device.CUDA and device is Device.CPU:
        of_cell = of_cell.model_copy(update={"architectures": architectures})
    if lower_only:
        suites = tuple(suite for suite in of_cell.suites if suite in WITHOUT_GPU) or (Suite.CUDA_LOWERING,)
        of_cell = of_cell.model_copy(update={"suites": suites})
    request = cell_request(
        matrix,
        matrix_path,
        cell,
        settings=matrix.settings[cell.settings],
        profile_name=profile_name,
        profile=with_time_to_autotune(of_cell, cell, device),
        workload_name=workload_name,
        workload=matrix.workloads[workload_name],
        workload_folder=matrix_path.resolve().parent,
        device=device,
        checkpoint_folder=checkpoint_folder,
        quiet_lock=quiet_lock,
        demands=demands_of(gate_limits(matrix, profile_name), device=device, mode=cell.mode),
    )
    request = with_symbols(request, symbols)
    return request.model_copy(update={"lower_only": True, "demands": ()}) if lower_only else request


def with_symbols(request: CellRequest, symbols: tuple[SymbolSeries, ...]) -> CellRequest:
    """Add the user's series and the suite that forecasts them; without any, that suite is not run, nor demanded."""
    suites = [suite for suite in request.profile.suites if not suite.rule.needs_symbols]
    if symbols:
        suites += [suite for suite in Suite if suite.rule.needs_symbols]
    elif not suites:
        raise SelectionError(
            f"profile {request.profile_name} runs nothing without series of yours", hint="name them with --data"
        )
    return request.model_copy(
        update={
            "profile": request.profile.model_copy(update={"suites": tuple(suites)}),
            "symbols": symbols,
            "demands": tuple(demand for demand in request.demands if symbols or not demand.suite.rule.needs_symbols),
        }
    )


def with_time_to_autotune(profile: CellProfile, cell: CellName, device: Device) -> CellProfile:
    """Give a cell that autotunes on a GPU twice the time, one with the 70 graphs of a whole model four times."""
    if device is Device.CPU or cell.mode != "max-autotune":
        return profile
    factor = 4 if is_whole_model(cell) else 2
    return profile.model_copy(update={"timeout_minutes": factor * profile.timeout_minutes})


def cell_request(
    matrix: Matrix,
    matrix_path: Path,
    cell: CellName,
    *,
    settings: CompileSettings,
    profile_name: str,
    profile: CellProfile,
    workload_name: str,
    workload: Workload,
    workload_folder: Path,
    device: Device,
    checkpoint_folder: str | None = None,
    quiet_lock: str | None = None,
    demands: tuple[Demand, ...] = (),
) -> CellRequest:
    """Make the request of one cell. A CPU wheel runs on the CPU whatever `device` says.

    Files are named by their absolute path on this machine; a runtime that shows them elsewhere changes that. Those of
    the workload are relative to `workload_folder`, a cache's to the matrix file.
    """
    environment = matrix.environments[cell.environment]
    device = environment.runs_on(device)
    limits = matrix.limits.model_copy(update={"threads": workload.threads or matrix.limits.threads})
    known = environment.gpu_architectures or profile.architectures
    profile = profile.model_copy(
        update={
            "suites": suites_here(profile.suites, environment, device),
            "architectures": tuple(one for one in profile.architectures if one in known) or known[-1:],
        }
    )
    csv = workload.csv
    if csv is not None:
        csv = csv.model_copy(update={"path": str((workload_folder / csv.path).resolve())})
    return CellRequest(
        cell=cell,
        environment=environment,
        cache=CacheRequest(name=cell.cache, source=_absolute_source(matrix, matrix_path, cell.cache)),
        settings=settings,
        device=device,
        profile_name=profile_name,
        profile=profile,
        workload_name=workload_name,
        workload=workload,
        limits=limits,
        variables=cell_variables(limits, device),
        checkpoint_folder=checkpoint_folder,
        csv=csv,
        quiet_lock=quiet_lock,
        demands=demands,
    )


def _absolute_source(matrix: Matrix, matrix_path: Path, cache: str) -> str:
    source = matrix.caches[cache].source
    if source == BUILTIN:
        return source
    file, class_name = split_source(source)
    return f"{(matrix_path.resolve().parent / file).resolve()}:{class_name}"


def cell_variables(limits: Limits, device: Device) -> dict[str, str]:
    """Return the variables of a cell's processes, without those that name a place or a GPU of this machine."""
    threads = str(limits.threads)
    variables = {
        "USER": "toto-compat",  # inductor names a folder after the user, who may have no name in a container
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        # toto-ts is imported from packages that warn at import; a cell's log is for what the compiler says
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        # a 32-core host would start 32 compile workers and meet the memory and pids limits
        "TORCHINDUCTOR_COMPILE_THREADS": str(limits.cpus),
    }
    if device is Device.CPU:
        # an empty list hides the GPU from a CUDA build that is asked to run on the CPU
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables
