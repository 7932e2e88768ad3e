"""How much faster a cell is than upstream eager, whose doing that is, and how firmly it may be said."""

from collections.abc import Sequence
from dataclasses import dataclass

from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import JudgedCell

# An interval of one process does not know how processes differ: upstream eager's medians spanned 151 to 194 ms here.
FEWEST_PROCESSES = 3


@dataclass(frozen=True)
class Gain:
    """One cell's gain. `least` is the lower end that its gate judged; the rest are ratios of medians."""

    least: float
    median: float
    from_cache: float
    from_compile: float
    processes: int


def gain_of(cell: JudgedCell) -> Gain | None:
    """Read a cell's gain from its evidence; None where it was not timed."""
    names = (Gate.SPEEDUP.figure, "eager_p50_ms", "same_cache_eager_p50_ms", "p50_ms")
    figures = [cell.figure(Suite.SPEED, name) for name in names]
    least, upstream, same_cache, compiled = (figure.value if figure else None for figure in figures)
    if not (least and upstream and same_cache and compiled):
        return None
    timed = cell.result.evidence[Suite.SPEED].details.get("forecasts_per_repeat")
    return Gain(
        least=least,
        median=upstream / compiled,
        from_cache=upstream / same_cache,
        # no more than the whole: an eager side slower than upstream's would be what compile makes good
        from_compile=min(same_cache, upstream) / compiled,
        processes=len(timed) if isinstance(timed, list) else 1,
    )


def gain_text(cells: Sequence[JudgedCell]) -> str:
    """Say what holds for every one of these cells; empty if one was not timed.

    "At least" is said of three or more processes a cell only.
    """
    gains = [gain for cell in cells if (gain := gain_of(cell))]
    if not gains or len(gains) < len(cells):
        return ""
    smallest = min(gains, key=lambda gain: gain.least)
    processes = min(gain.processes for gain in gains)
    parts = (
        f"{smallest.from_cache:.1f}x from the cache, {smallest.from_compile:.1f}x more from compile{_by_whom(cells)}"
    )
    if processes >= FEWEST_PROCESSES:
        return f"at least {smallest.least:.2f}x faster than upstream eager over {processes} processes ({parts})"
    in_how_many = "one process" if processes == 1 else f"{processes} processes"
    return f"about {smallest.median:.1f}x faster than upstream eager in {in_how_many} ({parts})"


def _by_whom(cells: Sequence[JudgedCell]) -> str:
    """Say who told the parts: a user's file brings its own eager side, and nobody but it knows how long that must take.

    The whole is against upstream eager, in a process that the file is not in.
    """
    builtin = all(cell.result.request.cache.source == "builtin" for cell in cells)
    return "" if builtin else ", the parts by its own eager side"


def weights_text(cells: Sequence[JudgedCell]) -> str:
    """Say whether the forecasts were those of a trained model, and of which."""
    if any(cell.result.request.checkpoint_folder is None for cell in cells):
        return "with seeded weights"
    named = {cell.result.provenance.checkpoint.partition(" (")[0] for cell in cells}
    return (
        f"with the weights of {named.pop()}" if len(named) == 1 and "" not in named else "with a checkpoint's weights"
    )
