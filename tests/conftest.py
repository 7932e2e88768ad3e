"""Which tests run where: host-side tests need the host's packages, cell-side tests (marker `cell`) need torch.

A module with `pytestmark = pytest.mark.cell` imports torch at its top and is not imported where torch is missing.
"""

import contextlib
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
CELL_MODULE = re.compile(r"^pytestmark\s*=.*\bmark\.cell\b", re.MULTILINE)
CELL_TEST = re.compile(r"\bmark\.cell\b")
PROCESSOR_SECONDS = "processor_seconds"  # of each test, in JUnit's report: the clock counts what runs beside it
BEFORE = pytest.StashKey[float]()
WHOLE_MODULE = "cell tests need torch, which is not installed here: `nox -s tests` runs them in a real environment"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--side", choices=("host", "cell"), help="run only the tests of this side; the rest is left out")


def pytest_configure() -> None:
    # a shell starts what it puts in the background with SIGINT ignored, and whatever a test starts would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):  # a torch environment need not have it
        import hypothesis

        # no example fails for what else runs on the machine; in CI all else of hypothesis's own profile holds
        hypothesis.settings.register_profile("untimed", hypothesis.settings.default, deadline=None)
        hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEFORE] = processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown" and BEFORE in item.stash:
        item.user_properties.append((PROCESSOR_SECONDS, f"{processor_seconds() - item.stash[BEFORE]:.2f}"))


def processor_seconds() -> float:
    """What this process took and those that it started and waited for; a container is the engine's and not in it."""
    return sum(os.times()[:4])


class LeftOutModule(pytest.File):
    """A cell module where torch is missing: one skip instead of an import error."""

    def collect(self) -> Iterator[pytest.Item]:
        yield LeftOut.from_parent(self, name="cell")


class LeftOut(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(WHOLE_MODULE)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    side = config.getoption("--side")
    if side == "cell" and collection_path.is_dir():
        # a folder of host tests is not entered: its conftest.py imports what only the host has
        return None if any(CELL_TEST.search(read(path)) for path in collection_path.rglob("test_*.py")) else True
    if side is None or not is_test_module(collection_path):
        return None
    text = read(collection_path)
    if side == "host":
        return True if CELL_MODULE.search(text) else None
    return None if CELL_TEST.search(text) else True


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HAS_TORCH or not CELL_MODULE.search(read(module_path)):
        return None
    return LeftOutModule.from_parent(parent, path=module_path)  # type: ignore[return-value]  # any collector will do


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=when_to_begin)  # in that order as they come
    side = config.getoption("--side")
    if side is not None:
        # by the marker, not by keywords: those hold the names of folders too, and tests/cell has tests of both sides
        other = [item for item in items if (item.get_closest_marker("cell") is not None) != (side == "cell")]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]
    elif not HAS_TORCH:
        for item in items:
            if item.get_closest_marker("cell"):
                item.add_marker(pytest.mark.skip(reason=WHOLE_MODULE))


def when_to_begin(item: pytest.Item) -> int:
    """Take modules of minutes first: the quick ones fill the gaps beside them. Of those the containers', since they are
    the longest chain, and build an image while the others still wait for their environment. Slurm's mostly wait."""
    slow, docker, slurm = (item.get_closest_marker(mark) is not None for mark in ("slow", "docker", "slurm"))
    return 0 if slow and docker else 1 if slow or slurm else 2


def is_test_module(path: Path) -> bool:
    return path.suffix == ".py" and path.name.startswith("test_")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
