"""The tests here share the emulated cluster; without one they are skipped, and say how to get it."""

from collections.abc import Iterator

import pytest

from tests.runtimes.slurm.emulated import HOW_TO_GET_IT, Emulated, emulated


@pytest.fixture(scope="module")
def cluster() -> Iterator[Emulated]:
    with emulated() as found:
        if found is None:
            pytest.skip(HOW_TO_GET_IT)
        yield found
