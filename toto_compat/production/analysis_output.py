"""An analysis as text, JSON, Markdown and HTML. What comes from a log is data: escaped, never obeyed."""

import html
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from toto_compat.contract.events import Severity
from toto_compat.contract.log_line import printable
from toto_compat.production.advice import Advice, advice_for, guides
from toto_compat.production.analysis import Analysis, Group
from toto_compat.production.same_in_matrix import Seen, cells_showing

_WIDTH = 100
_BARS = " ▁▂▃▄▅▆▇█"
_INTERVALS = 24
_MOST_CELLS = 4
_QUIET = (
    "no compiler events. Limit hits and skipped CUDA graphs are logged by default; recompiles and graph breaks only "
    "where the application ran with TORCH_LOGS=recompiles,graph_breaks."
)


def group_facts(group: Group, analysis: Analysis, seen: Sequence[Seen]) -> dict[str, Any]:
    """Give all that is known of a group, for programs."""
    advice = _advice(group, analysis)
    return {
        "kind": group.kind.value,
        "severity": group.severity.value,
        "function": group.function,
        "file": group.example.file,
        "line": group.example.line,
        "reason": group.normalised_reason,
        "example": group.example.reason,
        "events": group.events,
        "instances": group.instances,
        "limits": sorted(group.limits),
        "compile_ids": group.compile_ids,
        "stack": list(group.example.stack),
        "first": analysis.position(group.first),
        "last": analysis.position(group.last),
        "first_time": group.first_time,
        "last_time": group.last_time,
        "timeline": _timeline(group, analysis),
        "cause": advice.cause,
        "fix": advice.fix,
        "holds_for": advice.releases,
        "cells": cells_showing(group.kind.value, group.function, group.normalised_reason, seen),
    }


def as_json(analysis: Analysis, seen: Sequence[Seen] = ()) -> dict[str, Any]:
    """Write the analysis for programs. Positions are '<file>:<line>', `timeline` counts equal parts of `span`."""
    return {
        "schema": 2,
        "files": analysis.files,
        "events": analysis.events,
        "by_severity": {
            severity.value: sum(group.events for group in analysis.groups if group.severity is severity)
            for severity in Severity
        },
        "torch_releases": [
            {"release": hint.release, "because": hint.because, "events": count} for hint, count in analysis.releases
        ],
        "span": _span(analysis),
        "groups": [group_facts(group, analysis, seen) for group in analysis.groups],
    }


def as_text(analysis: Analysis, seen: Sequence[Seen] = ()) -> str:
    """Write the analysis for people: at most 100 columns, nothing that a terminal would obey."""
    if not analysis.groups:
        return _wrapped(f"{_what(analysis)}: {_QUIET}")
    parts = [_wrapped(_headline(analysis)), *(_wrapped(line) for line in _releases(analysis))]
    parts += [_group_text(group, analysis, seen) for group in analysis.groups]
    return "\n".join(parts)


def _group_text(group: Group, analysis: Analysis, seen: Sequence[Seen]) -> str:
    example, advice = group.example, _advice(group, analysis)
    where = f" in {group.function}" if group.function else ""
    place = f" ({_place(group)})" if example.file else ""
    lines = [
        _wrapped(f"{group.severity.upper()} {group.kind} x{group.events}{where}{place}"),
        _wrapped(group.normalised_reason, indent=2) if group.normalised_reason else "",
        _wrapped(f"for example: {example.reason}", indent=2) if example.reason != group.normalised_reason else "",
        _wrapped("; ".join(_facts(group, analysis)), indent=2),
        f"  when: {_bars(group, analysis)}" if group.first_time else "",
        _wrapped(f"cause: {advice.cause}", indent=2),
        _wrapped(f"fix ({advice.releases}): {advice.fix}", indent=2),
        _wrapped(f"the same in the matrix: {_cells(group, seen)}", indent=2) if _cells(group, seen) else "",
    ]
    return "\n".join(["", *(line for line in lines if line)])


def as_markdown(analysis: Analysis, seen: Sequence[Seen] = ()) -> str:
    """Write the analysis for an issue or a wiki: one table, then cause and fix of each group."""
    if not analysis.groups:
        return f"# Compiler events\n\n{_markdown(_what(analysis))}: {_QUIET}\n"
    head = ["severity", "kind", "events", "function", "reason", "first", "last", "timeline"]
    rows = [
        [
            group.severity.value,
            group.kind.value,
            str(group.events),
            f"{group.function} {_place(group)}".strip(),
            group.normalised_reason,
            group.first_time or analysis.position(group.first),
            group.last_time or analysis.position(group.last),
            _bars(group, analysis) if group.first_time else "",
        ]
        for group in analysis.groups
    ]
    table = ["| " + " | ".join(_markdown(cell) for cell in row) + " |" for row in (head, ["---"] * len(head), *rows)]
    parts = ["# Compiler events", _markdown(_headline(analysis)), *map(_markdown, _releases(analysis))]
    parts.append("\n".join(table).replace("\\-\\-\\-", "---"))
    for group in analysis.groups:
        advice = _advice(group, analysis)
        about = _markdown(f"{guides()[group.kind].title}: {group.function} {group.normalised_reason}".strip())
        cells = _cells(group, seen)
        parts.append(
            f"## {about}\n\n- {_markdown('; '.join(_facts(group, analysis)))}\n- Cause: {advice.cause}\n"
            f"- Fix ({advice.releases}): {advice.fix}" + (f"\n- The same in the matrix: {cells}" if cells else "")
        )
    return "\n\n".join(parts) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .4rem .6rem; vertical-align: top }
tr { border-bottom: 1px solid #d0d7de } code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
.error { color: #a40e26; font-weight: 600 } .warning { color: #7a4e00; font-weight: 600 } .info { color: #424a53 }
svg { display: block } details { margin: .3rem 0 }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } tr { border-color: #30363d }
.error { color: #ff7b72 } .warning { color: #e3b341 } .info { color: #9198a1 } }
"""


def as_html(analysis: Analysis, seen: Sequence[Seen] = ()) -> str:
    """Write the analysis as one page that needs nothing else: no script, no link out."""
    rows = "".join(_group_row(group, analysis, seen) for group in analysis.groups)
    table = (
        "<table><thead><tr><th>kind</th><th>events</th><th>where and why</th><th>when</th><th>cause and fix</th></tr>"
        f"</thead><tbody>{rows}</tbody></table>"
        if rows
        else f"<p>{_QUIET}</p>"
    )
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in (_headline(analysis), *_releases(analysis)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Compiler events</title><style>{_STYLE}</style></head>"
        f"<body><h1>Compiler events</h1>{lines}{table}</body></html>\n"
    )


def _group_row(group: Group, analysis: Analysis, seen: Sequence[Seen]) -> str:
    text = html.escape
    advice = _advice(group, analysis)
    stack = "".join(f"<li><code>{text(frame)}</code></li>" for frame in group.example.stack)
    when = f"{_svg(_timeline(group, analysis))}{text(group.first_time)}<br>{text(group.last_time)}"
    cells = _cells(group, seen)
    return (
        f'<tr><td class="{group.severity.value}">{text(guides()[group.kind].title)}<br><code>{group.kind.value}</code>'
        f"</td><td>{group.events}</td>"
        f"<td>{text(group.function)} <code>{text(_place(group))}</code><pre>{text(group.normalised_reason)}</pre>"
        f"<details><summary>{text('; '.join(_facts(group, analysis)))}</summary>"
        f"<pre>{text(group.example.reason)}</pre><ul>{stack}</ul></details></td>"
        f"<td>{when if group.first_time else ''}</td>"
        f"<td>{text(advice.cause)}<br><b>Fix</b> ({text(advice.releases)}): {text(advice.fix)}"
        + (f"<br>The same in the matrix: {text(cells)}" if cells else "")
        + "</td></tr>"
    )


def _svg(counts: Sequence[int]) -> str:
    highest = max(counts, default=0) or 1
    bars = "".join(
        f'<rect x="{5 * index}" y="{24 - max(1, round(24 * count / highest))}" width="4" '
        f'height="{max(1, round(24 * count / highest))}"/>'
        for index, count in enumerate(counts)
        if count
    )
    return (
        f'<svg width="{5 * _INTERVALS}" height="24" fill="currentColor" role="img" '
        f'aria-label="events over time">{bars}</svg>'
    )


def _advice(group: Group, analysis: Analysis) -> Advice:
    return advice_for(group.kind, group.normalised_reason, analysis.release)


def _what(analysis: Analysis) -> str:
    return f"{len(analysis.files)} logs" if len(analysis.files) > 1 else analysis.files[0]


def _headline(analysis: Analysis) -> str:
    counted = f"{_counted(analysis.events, 'event')} in {_counted(len(analysis.groups), 'group')}"
    span = _span(analysis)
    return f"{_what(analysis)}: {counted}" + (f", {span[0]} to {span[1]}" if span else "")


def _releases(analysis: Analysis) -> list[str]:
    return [f"torch {hint.release}: {hint.because} ({_counted(count, 'event')})" for hint, count in analysis.releases]


def _facts(group: Group, analysis: Analysis) -> list[str]:
    first, last = analysis.position(group.first), analysis.position(group.last)
    facts = [
        f"limit {', '.join(map(str, sorted(group.limits)))}" if group.limits else "",
        f"{group.instances} instances" if group.instances > group.events else "",
        f"compile ids {', '.join(group.compile_ids)}" if group.compile_ids else "",
        f"first {first}, last {last}" if group.first != group.last else f"at {first}",
    ]
    return [fact for fact in facts if fact]


def _place(group: Group) -> str:
    example = group.example
    return f"{example.file}:{example.line}" if example.file and example.line else example.file


def _cells(group: Group, seen: Sequence[Seen]) -> str:
    cells = cells_showing(group.kind.value, group.function, group.normalised_reason, seen)
    more = len(cells) - _MOST_CELLS
    return ", ".join(cells[:_MOST_CELLS]) + (f" and {more} more" if more > 0 else "")


def _timeline(group: Group, analysis: Analysis) -> list[int]:
    span = analysis.span
    return group.timeline.between(*span, _INTERVALS) if span and group.timeline.counts else []


def _bars(group: Group, analysis: Analysis) -> str:
    counts = _timeline(group, analysis)
    highest = max(counts)
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // highest)] for count in counts)
    return f"{group.first_time} |{bars}| {group.last_time}"


def _span(analysis: Analysis) -> list[str] | None:
    """Write the times that the timelines go from and to. Without a year in the log they have none."""
    if analysis.span is None:
        return None
    with_year = any(not group.first_time.startswith("--") for group in analysis.groups if group.first_time)
    form = "%Y-%m-%dT%H:%M:%S" if with_year else "--%m-%dT%H:%M:%S"
    return [datetime.fromtimestamp(moment, UTC).strftime(form) for moment in analysis.span]


def _markdown(text: str) -> str:
    """Escape a text so that Markdown shows it as it is."""
    cleaned = printable(text if len(text) <= 600 else f"{text[:600]} [...]").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{char}" if char in "\\`*_{}[]()#+-.!|~>$@" else char for char in cleaned)


def _wrapped(text: str, indent: int = 0) -> str:
    space = " " * indent
    shortened = text if len(text) <= 600 else f"{text[:600]} [...]"
    return textwrap.fill(
        printable(shortened),
        _WIDTH,
        initial_indent=space,
        subsequent_indent=space + ("  " if indent else ""),
        break_on_hyphens=False,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
