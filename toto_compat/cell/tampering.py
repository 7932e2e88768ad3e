"""What a candidate did to its process beyond forecasting: switches that it turned, code of the harness replaced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toto_compat.cell.seal import broken, seal_harness
from toto_compat.cell.switch_watch import watching_the_switches
from toto_compat.cell.switches import changed, switches
from toto_compat.contract.request import CompileSettings


@contextmanager
def watching_the_candidate(settings: CompileSettings) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Return a function that names what was touched so far; to be entered before a candidate's file is imported."""
    seal, before = seal_harness(), switches()
    with watching_the_switches(settings) as turned:

        def touched() -> tuple[str, ...]:
            lasting = changed(before, switches(), settings)
            passing = [one for one in turned() if not one.startswith(tuple(lasting))]
            return (*lasting, *passing, *broken(seal))

        yield touched
