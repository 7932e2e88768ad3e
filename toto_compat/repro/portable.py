"""A cell's request as it travels: what it names lies beside it, so that it means the same in another folder."""

import shutil
from pathlib import Path

from toto_compat.contract.request import CellRequest
from toto_compat.contract.suites import Suite
from toto_compat.matrix.user_cache import BUILTIN, split_source
from toto_compat.runtimes.inputs import with_inputs

CACHE = "cache"  # the folder of a cache of the user's own
WORK = "work"


def portable_request(request: CellRequest) -> CellRequest:
    """Name the request's files as a bundle has them; series and weights are where somebody lays them."""
    changes: dict[str, object] = {"work_folder": WORK, "quiet_lock": None, "references": None}
    if request.cache.source != BUILTIN:
        file, class_name = split_source(request.cache.source)
        changes["cache"] = request.cache.model_copy(update={"source": f"{CACHE}/{file.name}:{class_name}"})
    if request.csv is not None:
        changes["csv"] = request.csv.model_copy(update={"path": f"csv/{Path(request.csv.path).name}"})
    if request.checkpoint_folder is not None:
        changes["checkpoint_folder"] = "checkpoint"
    changes["symbols"] = tuple(
        symbol.model_copy(update={"series": symbol.series.model_copy(update={"path": f"symbols/{number}.csv"})})
        for number, symbol in enumerate(request.symbols)
    )
    return request.model_copy(update=changes)


def traceable_request(request: CellRequest, folder: Path) -> CellRequest:
    """Lay what the request names into a folder, and ask for nothing but the suite that watches the compiler.

    Weights are too large to copy: they are read where they are.
    """

    def laid(path: Path, name: str) -> str:
        if name == "checkpoint":
            return str(path)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target)
        return name

    (folder / WORK).mkdir()
    profile = request.profile.model_copy(update={"suites": (Suite.RECOMPILE,), "unannounced_shapes": False})
    own = {
        "work_folder": WORK,
        "quiet_lock": None,
        "references": None,
        "symbols": (),
        "demands": (),
        "profile": profile,
    }
    return with_inputs(request.model_copy(update=own), laid)
