"""A run over all shapes, in a file small enough to commit: which release, what was asked, what was counted."""

from pathlib import Path

from toto_compat.bench.shapes import Asked, Found
from toto_compat.contract.files import utc_now
from toto_compat.contract.source_hash import hash_contents, read_source
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import InputError
from toto_compat.evidence.files import write_atomically


class ShapeRecord(StrictModel):
    """Holds one release's run. Which shapes were tried follows from what was asked: they are drawn from a seed."""

    contest: str
    environment: str
    source_hash: str  # of the model under test and what ran it
    finished: str
    asked: Asked
    found: Found

    @property
    def holds(self) -> bool:
        """Tell whether nothing was compiled after the warm-up, nothing broke, and every forecast was eager's."""
        found = self.found
        return (found.compilations, found.graph_breaks) == (0, 0) and found.error_over_allowed <= 1


def write_record(folder: Path, contest: str, environment: str, asked: Asked, found: Found) -> Path:
    """Write the file of this contest and environment anew."""
    record = ShapeRecord(
        contest=contest,
        environment=environment,
        source_hash=hash_contents(read_source()),
        finished=utc_now(),
        asked=asked,
        found=found.model_copy(update={"compared": []}),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{contest.removeprefix('shapes.')}-{environment}.json"
    write_atomically(path, record.model_dump_json(indent=1) + "\n")
    return path


def read_records(folder: Path) -> list[ShapeRecord]:
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(ShapeRecord.model_validate_json(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise InputError(f"{path}: no record of shapes: {error}", hint="bench --record writes it anew") from error
    return records
