"""The line of Python behind a node of a graph, or behind an error."""

import re
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb

import torch

from toto_compat.contract.log_line import shorten_path

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>[^\s,]+))?')


@dataclass(frozen=True)
class SourceLine:
    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


def line_of(node: torch.fx.Node) -> SourceLine | None:
    """The innermost frame that torch kept with the node; None where it kept none."""
    return line_in(str(node.meta.get("stack_trace") or ""))


def line_in(text: str) -> SourceLine | None:
    """The last frame that a stack names."""
    frames = list(_FRAME.finditer(text))
    if not frames:
        return None
    last = frames[-1]
    return SourceLine(shorten_path(last["file"]), int(last["line"]), last["function"] or "")


def line_of_error(error: BaseException) -> SourceLine | None:
    """The last frame that its message names; else the innermost one outside of torch that it came through."""
    torchs = str(Path(torch.__file__).parent)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((torchs, "<"))]
    if named := line_in(str(error)):
        return named
    return SourceLine(shorten_path(frames[-1].filename), frames[-1].lineno or 0, frames[-1].name) if frames else None
