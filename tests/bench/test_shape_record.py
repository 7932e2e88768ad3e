"""The committed runs over all shapes: nothing compiled after the warm-up, no break, eager's own forecasts."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from toto_compat.bench.command import SHAPES, bench_command
from toto_compat.bench.shape_record import ShapeRecord, read_records, write_record
from toto_compat.bench.shapes import Asked, Found, shapes_of
from toto_compat.contract.request import PATCH_SIZES
from toto_compat.errors import InputError, SelectionError

COMMITTED = Path(__file__).parents[2] / "results" / "reference" / "shapes"
FOUND = Found(
    torch="2.13.0",
    python="3.11.7",
    model="tiny",
    autocast=None,
    shapes=8,
    announced=(1, 16, 128, 512),
    compilations_in_warm_up=7,
    compilations=0,
    graph_breaks=0,
    error=3e-7,
    eager_error=4e-7,
    nudged=1e-7,
)


@pytest.mark.parametrize("record", read_records(COMMITTED), ids=lambda record: f"{record.contest} {record.environment}")
def test_a_committed_run_holds_over_all_that_production_may_ask_for(record: ShapeRecord) -> None:
    assert record.asked == SHAPES[record.contest]
    assert record.found.torch.partition("+")[0] in record.environment
    assert record.found.model == record.asked.model
    assert record.found.shapes == len(shapes_of(record.asked, PATCH_SIZES[record.asked.model]))
    assert record.found.compilations_in_warm_up > 0  # else nothing was compiled at all
    assert record.holds


def test_a_record_is_read_as_it_was_written_and_one_that_breaks_a_claim_does_not_hold(tmp_path: Path) -> None:
    path = write_record(tmp_path, "shapes.tiny", "torch-2.13.0-cpu", Asked(), FOUND)
    assert path.name == "tiny-torch-2.13.0-cpu.json"
    (record,) = read_records(tmp_path)
    assert (record.asked, record.found, record.holds) == (Asked(), FOUND, True)
    for wrong in ({"compilations": 1}, {"graph_breaks": 1}, {"error": 9e-7}):
        changed = record.model_copy(update={"found": FOUND.model_copy(update=wrong)})
        assert not changed.holds


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiny-torch-2.13.0-cpu.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"tiny-torch-2\.13\.0-cpu\.json: no record of shapes"):
        read_records(tmp_path)


def test_times_are_of_one_environment_alone() -> None:
    asked = ["--only", "tiny.mean", "--environment", "torch-2.13.0-cpu", "--environment", "torch-2.9.0-cu128"]
    with pytest.raises(SelectionError, match="no figures of one run"):
        CliRunner().invoke(bench_command, asked, catch_exceptions=False)
