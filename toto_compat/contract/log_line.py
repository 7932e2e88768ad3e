"""One message of a log, and the texts in it made safe, short and comparable."""

import re
from dataclasses import dataclass
from functools import lru_cache

# A log line is data from outside: longer than this is cut before any regular expression sees it.
LONGEST_LINE = 4_000


_LONGEST_REASON = 1_000  # what is behind it tells no two causes apart
_TERMINAL_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-~])")
# C0, DEL and C1 controls, and the invisible characters that reorder or hide text in a terminal.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message and what its prefix said. Empty string: it did not say."""

    number: int
    text: str
    process: str = ""
    torch_prefix: bool = False
    logged_from: str = ""
    compile_id: str = ""
    time: str = ""  # as logs/times.py writes it


def printable(text: str) -> str:
    """Text without anything that a terminal would obey instead of show."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _TERMINAL_ESCAPES.sub("", text).replace("\t", " "))


@lru_cache(1024)
def shorten_path(path: str) -> str:
    """A source file from its package on: '/venv/lib/python3.11/site-packages/toto/model/x.py' -> 'toto/model/x.py'."""
    path = path.strip().replace("\\", "/")
    for folder in ("site-packages/", "dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    for package in ("toto_compat", "toto", "torch"):
        head, slash, tail = path.rpartition(f"/{package}/")
        if slash and (head or path.startswith("/")):
            return f"{package}/{tail}"
        if path.startswith(f"{package}/"):
            return path
    return "/".join(part for part in path.split("/") if part not in ("", ".", "..", "..."))[-200:].rpartition("/")[2]


def without_its_source(reason: str) -> str:
    """A reason up to 'Found from', which names files of the machine; releases put a full stop before it, or none."""
    return re.split(r"\.?\s+Found from\b", reason, maxsplit=1)[0].strip()


@lru_cache(1024)  # a log says the same thing over and over
def normalise_reason(reason: str) -> str:
    """A reason with what varies between two hits of the same cause replaced, for grouping."""
    text = re.sub(r"^\d+/\d+(?:_\d+)?:\s*", "", reason.strip()[:_LONGEST_REASON])
    text = re.sub(r"0x[0-9a-fA-F]+", "ADDRESS", text)
    text = re.sub(r"(?:[\w.~-]*/)+[\w.-]+\.py(?::\d+)?", "PATH", text)
    text = re.sub(r"(?<=_at_)\d+|(?<=__compiled_fn_)\d+(?:_\w+)?", "N", text)
    text = re.sub(r"\b([suz])\d+\b", r"\1N", text)
    text = re.sub(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b", "N", text)
    return re.sub(r"\s+", " ", text).strip()
