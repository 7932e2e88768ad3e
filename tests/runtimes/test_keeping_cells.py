"""A cell that has ended goes into its run and into the store, whatever one of the two says for a moment."""

from pathlib import Path

import pytest

from tests.verdict.sample_cells import good_result
from tests.verdict.stored_runs import store_run
from toto_compat.errors import StorageError
from toto_compat.evidence.store import CellStore, StoredCell, load_run
from toto_compat.runtimes.local import FinishedCell
from toto_compat.runtimes.run import keep_cell

KEY = "ab" * 32


class FullStore(CellStore):
    """Has no room the first times that it is asked."""

    refusals = 0

    def put(self, cell: StoredCell) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StorageError("No space left on device")
        super().put(cell)


@pytest.mark.parametrize(("refusals", "stored"), [(0, True), (1, True), (2, False)])
def test_a_store_without_room_is_asked_once_more_and_costs_the_run_nothing(
    tmp_path: Path, refusals: int, stored: bool
) -> None:
    folder = store_run(tmp_path, "run", [good_result()])
    store, told = FullStore(tmp_path / "store"), list[str]()
    store.refusals = refusals
    keep_cell(FinishedCell(good_result(), 1.0), KEY, folder, store, told.append)
    assert len(load_run(folder).cells) == 1
    assert store.path(KEY).exists() is stored
    assert [line.partition(": ")[2] for line in told] == (
        [] if stored else ["not kept for later runs: No space left on device"]
    )
