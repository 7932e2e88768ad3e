"""Plots as inline SVG by matplotlib, coloured by variables of the page, so that they follow light and dark."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Colours that no palette has: matplotlib writes them, the page's variables replace them.
_INK, _FAINT = "#010101", "#020202"
_SERIES = tuple(f"#{number:02x}" + f"{number:02x}" * 2 for number in range(3, 11))
_VARIABLES = {
    _INK: "var(--plot-ink)",
    _FAINT: "var(--plot-faint)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, start=1)},
}
_MARKERS = "osD^vPX*"
MOST_SERIES = len(_SERIES)
_MOST_TICKS = 16


@dataclass(frozen=True)
class Point:
    x: str
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Frame:
    """An empty plot, and where its data area lies inside it, in SVG units; the page draws a cell's timings into it."""

    svg: str
    left: float
    right: float
    top: float
    bottom: float


def trend_plot(
    series: Sequence[Series], *, order: Sequence[str], y_label: str, label: str, limit: float | None = None, prefix: str
) -> str:
    """Draw lines over named positions (releases, runs), each with its own marker, intervals as whiskers."""
    figure, axes = _figure(width=4.6, height=3.0)
    positions = {name: number for number, name in enumerate(order)}
    highest = max([point.high or point.y for line in series for point in line.points] + [limit or 0.0])
    for colour, marker, line in zip(_SERIES, _MARKERS, series, strict=False):
        xs = [positions[point.x] for point in line.points]
        ys = [point.y for point in line.points]
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.4, label=line.name)
        whiskers = [
            (x, point.low, point.high)
            for x, point in zip(xs, line.points, strict=True)
            if point.low is not None and point.high is not None
        ]
        if whiskers:
            axes.vlines(*zip(*whiskers, strict=True), color=colour, linewidth=1)
    if limit is not None:
        axes.axhline(limit, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        place = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 3), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"limit {limit:g}", (1, limit), fontsize=8, color=_INK, **place)
    every = 1 + (len(order) - 1) // _MOST_TICKS
    named = list(enumerate(order))[::every]
    crowded = sum(len(name) for _, name in named) > 40
    axes.set_xticks(*zip(*named, strict=True), rotation=40 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.4, len(order) - 0.6)
    axes.set_ylim(0, highest * 1.15 or 1)
    axes.set_ylabel(y_label)
    below = -0.42 if crowded else -0.14
    legend = axes.legend(loc="upper left", bbox_to_anchor=(-0.15, below), ncols=1, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(_INK)
    return _svg(figure, prefix=prefix, label=label, tight=True)


def distribution_frame() -> Frame:
    """Draw three rows (who was timed) over milliseconds."""
    figure, axes = _figure(width=5.2, height=2.3)
    axes.set_yticks([0, 1, 2], ["compiled", "same cache\neager", "upstream\neager"])
    axes.set_ylim(-0.6, 2.6)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["x0", "x1", "x2", "x3", "x4"])
    axes.set_xlim(0, 1)
    axes.set_xlabel("milliseconds per forecast")
    return _frame(figure, axes, prefix="distribution", label="Distribution of forecast times, eager against compiled")


def latency_frame() -> Frame:
    """Draw milliseconds over the number of the forecast: a recompile shows as a spike."""
    figure, axes = _figure(width=5.2, height=2.3)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["x0", "x1", "x2", "x3", "x4"])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["y0", "y1", "y2", "y3", "y4"])
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("number of the forecast")
    axes.set_ylabel("milliseconds")
    return _frame(figure, axes, prefix="latency", label="Forecast time over iterations")


def _figure(*, width: float, height: float) -> tuple[Any, Any]:
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text: searchable, and in the page's own font
    mpl.rcParams["svg.hashsalt"] = "toto-compat"  # the same data gives the same bytes
    mpl.rcParams["font.family"] = "sans-serif"
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.17, 0.22, 0.8, 0.73))
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    return figure, axes


def _frame(figure: Any, axes: Any, *, prefix: str, label: str) -> Frame:
    width, height = (72 * inches for inches in figure.get_size_inches())
    box = axes.get_position()
    return Frame(
        svg=_svg(figure, prefix=prefix, label=label, tight=False),
        left=round(box.x0 * width, 2),
        right=round(box.x1 * width, 2),
        top=round((1 - box.y1) * height, 2),
        bottom=round((1 - box.y0) * height, 2),
    )


def _svg(figure: Any, *, prefix: str, label: str, tight: bool) -> str:
    """Write the figure as an <svg> element that can stand in a page beside others."""
    stream = io.StringIO()
    layout = {"bbox_inches": "tight", "pad_inches": 0.05} if tight else {}
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, **layout)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    # matplotlib's own style sheet would apply to the whole page
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{_attribute(label)}" ', svg, count=1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
