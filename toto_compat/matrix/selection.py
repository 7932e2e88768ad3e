"""What of the matrix is to be run, and where."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.csv_file import check_rows, read_csv
from toto_compat.contract.request import (
    DESCRIBED_ARCHITECTURES,
    CsvSeries,
    Device,
    Environment,
    SymbolSeries,
    Workload,
)
from toto_compat.errors import SelectionError
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.checkpoint import with_checkpoint
from toto_compat.matrix.expand import default_selection, expand, in_order_of_interest, named_profile, select
from toto_compat.matrix.load import find_matrix_file, load_matrix
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.symbols import fit_to_workload, read_symbols


@dataclass(frozen=True)
class Selection:
    """The cells that are to be run on a device, and those of them that must be PASS."""

    matrix: Matrix
    matrix_path: Path
    cells: tuple[CellName, ...]
    required: tuple[CellName, ...]
    device: Device
    workloads: Mapping[str, Workload]  # of the profile, by name
    left_out: Mapping[str, str] = field(default_factory=dict)  # environments that no selector named, and why not
    symbols: Mapping[str, tuple[SymbolSeries, ...]] = field(default_factory=dict)  # the user's own, by workload

    def symbols_of(self, cell: CellName) -> tuple[SymbolSeries, ...]:
        """Return the user's own series as a cell gets them: what stands out depends on the workload's lengths."""
        return self.symbols.get(cell.workload or next(iter(self.workloads)), ())

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Name every checkpoint of the workloads once."""
        named = (workload.checkpoint for workload in self.workloads.values())
        return tuple(dict.fromkeys(one for one in named if one is not None))


WhyNotRunnable = Callable[[str, Environment], str]  # name and environment in, '' if this machine's GPU can run it


def select_cells(
    asked: Asked,
    choose_device: Callable[[], Device],
    why_not_runnable: WhyNotRunnable = lambda *_: "",
    environments: Mapping[str, Environment] | None = None,
) -> Selection:
    """Read the matrix and pick its cells; a mistake in the file, a selector or the user's series is told here.

    The machine is asked for its device once the file is known to be right, and what its GPU can run where nothing is
    selected. `environments` stand in the place of the file's.
    """
    matrix_path = find_matrix_file(asked.matrix_file)
    matrix = load_matrix(matrix_path)
    if environments is not None:
        matrix = matrix.model_copy(update={"environments": dict(environments), "production": None})
    profile = named_profile(matrix, asked.profile)
    if asked.checkpoint is not None:
        matrix = with_checkpoint(matrix, profile.workloads, asked.checkpoint)
    device = choose_device()
    left_out: dict[str, str] = {}
    if asked.lower_only:
        cells = _select_to_lower(matrix, asked)
    elif asked.selectors:
        cells = select(expand(matrix, asked.profile), asked.selectors, only_when_named=profile.only_when_named)
        cells = in_order_of_interest(cells) if device is Device.CUDA else cells
    else:
        if device is Device.CUDA:
            cuda = {name: one for name, one in matrix.environments.items() if one.device is device}
            left_out = {name: why for name, one in cuda.items() if (why := why_not_runnable(name, one))}
        cells = default_selection(matrix, device, asked.profile, left_out)
        left_out = _missed(matrix, cells, left_out)
    required = _select_required(cells, matrix, asked) if asked.require else []
    _check_architectures(asked.architectures, matrix, cells)
    workloads = {name: matrix.workloads[name] for name in profile.workloads}
    for workload in workloads.values():
        check_series(workload, matrix_path.resolve().parent)
    symbols = read_symbols(asked.data, asked.column, asked.symbols) if asked.data is not None else ()
    fitted = {name: fit_to_workload(symbols, name, workload) for name, workload in workloads.items()}
    return Selection(matrix, matrix_path, tuple(cells), tuple(required), device, workloads, left_out, fitted)


def _missed(matrix: Matrix, cells: Sequence[CellName], left_out: Mapping[str, str]) -> dict[str, str]:
    """Keep of what the GPU cannot run what would have been taken: production's, and releases newer than the newest."""
    newest = max((Version(matrix.environments[cell.environment].torch) for cell in cells), default=Version("0"))
    return {
        name: why
        for name, why in left_out.items()
        if name == matrix.production or Version(matrix.environments[name].torch) > newest
    }


def _select_to_lower(matrix: Matrix, asked: Asked) -> list[CellName]:
    """Pick cells of CUDA builds: what a GPU machine would run by default, or those that were asked for."""
    if not asked.selectors:
        return default_selection(matrix, Device.CUDA, asked.profile)
    cells = select(expand(matrix, asked.profile), asked.selectors)
    for_cuda = [cell for cell in cells if matrix.environments[cell.environment].device is Device.CUDA]
    if not for_cuda:
        raise SelectionError(
            "--lower-only: only CPU builds are selected, and those have no CUDA code",
            hint="select cells of CUDA builds: `toto-compat matrix 'torch-*-cu*/fixed_size/*' --lower-only`",
        )
    return for_cuda


def _check_architectures(wanted: Sequence[str], matrix: Matrix, cells: Sequence[CellName]) -> None:
    """Refuse a GPU that nobody described, or that no selected wheel has kernels for."""
    environments = {cell.environment: matrix.environments[cell.environment] for cell in cells}
    wheels = [one.gpu_architectures for one in environments.values() if one.device is Device.CUDA]
    for architecture in wanted:
        if architecture not in DESCRIBED_ARCHITECTURES:
            raise SelectionError(
                f"--architecture {architecture}: no such GPU is described",
                hint=f"there are {', '.join(DESCRIBED_ARCHITECTURES)}",
            )
        if wheels and all(wheel and architecture not in wheel for wheel in wheels):
            known = [one for one in DESCRIBED_ARCHITECTURES if any(one in wheel for wheel in wheels)]
            raise SelectionError(
                f"--architecture {architecture}: no selected CUDA build has kernels for it",
                hint=f"they have {', '.join(known)}",
            )


def _select_required(cells: Sequence[CellName], matrix: Matrix, asked: Asked) -> Sequence[CellName]:
    """Pick among the cells that will run; one that the matrix has but nobody selected is told as that."""
    try:
        return select(cells, asked.require)
    except SelectionError:
        in_matrix = select(
            expand(matrix, asked.profile), asked.require
        )  # what matches nothing at all is told with the nearest names
        left_out = next(cell for cell in in_matrix if cell not in cells)
        raise SelectionError(
            f"--require: {left_out} is not among the {len(cells)} cells that are to run",
            hint=f"select it as well: `toto-compat matrix {left_out} ...`",
        ) from None


def check_series(workload: Workload, folder: Path) -> CsvSeries | None:
    """Read the user's CSV, so that a mistake in it, or too few rows, is told before any cell runs."""
    if workload.csv is None:
        return None
    series = workload.csv.model_copy(update={"path": str(folder / workload.csv.path)})
    check_rows(series, read_csv(series), rows_needed(workload))
    return series


def rows_needed(workload: Workload) -> int:
    """Count the rows of series that a workload looks at: its longest forecast, for every series of a batch."""
    patches = workload.context_patches[-1] + max(workload.horizon_patches)
    return patches * workload.patch_size + max(workload.batch, *workload.batches) - 1
