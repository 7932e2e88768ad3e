"""Reads and edits an env file that a shell sources: only lines of our own change, and the file is whole at all times.

Only the standard library is needed: `toggle disable` must work when everything else is broken.
"""

import contextlib
import fcntl
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toto_compat.errors import InputError, StorageError

_ASSIGNMENT = re.compile(r"^\s*(?P<export>export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)$", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPENS = re.compile(r"\s*(if|for|while|until|case|select|function)\b|.*[{(]\s*$")
_CLOSES = re.compile(r"\s*(fi|done|esac)\b|\s*[})]")
_CLOSED_AT_ONCE = re.compile(r"(\b(fi|done|esac)|[})])\s*;?\s*$")
_MOST_BYTES = 1_000_000
_HINT = "give the env file of the service: lines of NAME=value"
_PATIENCE = 5.0  # seconds; an editor of ours needs milliseconds
_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


@dataclass(frozen=True)
class Statement:
    """One line of the file, or several that a quote, a backslash or a here-document holds together."""

    line: int  # the first one's number, from 1
    text: str  # with its line ends
    name: str = ""  # what it assigns; '' if it is anything else
    value: str | None = None  # None: the shell computes it ($NAME, $(...), several words)
    exported: bool = False


@dataclass(frozen=True)
class EnvFile:
    text: str
    statements: tuple[Statement, ...]

    def assigned(self, name: str) -> Statement | None:
        """Find the last assignment, which is the one that holds after sourcing."""
        return next((one for one in reversed(self.statements) if one.name == name), None)

    def is_exported(self, name: str) -> bool:
        """Tell whether a child process would see it: by its own `export`, any earlier one, or a bare `export NAME`."""
        bare = re.compile(rf"^\s*export\b[^=#]*\b{name}\b")
        return any((one.name == name and one.exported) or (not one.name and bare.match(one.text)) for one in self)

    def __iter__(self) -> Iterator[Statement]:
        return iter(self.statements)


def parse(text: str) -> EnvFile:
    """Split into statements. What is not a plain assignment is kept as it is and means nothing here."""
    # splitlines also cuts at form feeds and the like, which no shell does
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    statements: list[Statement] = []
    at = inside = 0
    while at < len(lines):
        taken = _extent(lines, at)
        one = _statement(at + 1, "".join(lines[at : at + taken]))
        opens, closes = _OPENS.match(one.text), _CLOSES.match(one.text)
        inside = max(0, inside - bool(closes))
        # whether an assignment in a block is ever reached is the shell's business
        statements.append(Statement(one.line, one.text) if inside else one)
        inside += bool(opens) and not _CLOSED_AT_ONCE.search(one.text)
        at += taken
    return EnvFile(text, tuple(statements))


def read(path: Path) -> EnvFile:
    """Read a file whatever bytes are in it: those that are no text come back as they were."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: no regular file", hint=_HINT)  # a pipe would be waited for
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}", hint=_HINT) from error
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path}: larger than any env file", hint=_HINT)
    return parse(content.decode("utf-8", "surrogateescape"))


def edited(file: EnvFile, values: Mapping[str, str | None], remark: str = "") -> str:
    """Give the text with these values; None takes the lines that assign it out. All else stays, byte for byte.

    A value stands where its last assignment stood, unless a later line speaks of the variable in a way that is not
    understood here: then it goes to the end, where it holds. `remark` replaces the comment of ours.
    """
    ending = "\r\n" if "\r\n" in file.text else "\n"
    kept: list[str | None] = [one.text for one in file]
    appended = []
    for name, value in values.items():
        assigning = [number for number, one in enumerate(file) if one.name == name]
        if value is None:
            for number in assigning:
                kept[number] = None
            continue
        line = f"export {name}={shlex.quote(value)}"
        mentions = [number for number, one in enumerate(file) if not one.name and _mentions(one.text, name)]
        if assigning and (not mentions or mentions[-1] < assigning[-1]):
            old = file.statements[assigning[-1]]
            first = _BOM if old.text.startswith(_BOM) else ""
            kept[assigning[-1]] = first + line + _comment_after(old.text) + (ending if old.text.endswith("\n") else "")
        else:
            appended.append(line)
    remarks = [number for number, one in enumerate(file) if one.text.startswith(REMARK)]
    if remark:
        for number in remarks[1:]:
            kept[number] = None
        if remarks:
            kept[remarks[0]] = f"{REMARK} {remark}{ending}"
        else:
            appended.insert(0, f"{REMARK} {remark}")
    text = "".join(part for part in kept if part is not None)
    if appended and text and not text.endswith("\n"):
        text += ending
    if appended and text.rstrip("\r\n").endswith("\\"):
        text += ending  # a backslash at the end would swallow what comes now
    return text + "".join(f"{line}{ending}" for line in appended)


REMARK = "# toto-compat:"


def edit(path: Path, values: Mapping[str, str | None], remark: str = "", *, at_any_cost: bool = False) -> None:
    """Edit the file under a lock, by renaming a new one into its place: a reader sees the old or the new, never half.

    A link stays a link and what it names is edited; permissions and, where allowed, owner stay. `at_any_cost` goes on
    without the lock, and where no file can be made beside it, writes into it: for switching off.
    """
    target = _target(path)
    with _locked(target.parent, insist=not at_any_cost):
        before = read(target) if target.exists() else parse("")
        after = edited(before, values, remark)
        if after == before.text and target.exists():
            return
        content = after.encode("utf-8", "surrogateescape")
        try:
            _replace(target, content)
        except OSError as error:
            if not (at_any_cost and target.exists()):
                raise StorageError(
                    f"{path}: cannot be written: {error.strerror or error}", hint="check the folder's permissions"
                ) from error
            _write_into(target, before, values, error)


def _target(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise StorageError(f"{path}: cannot be followed: {error}", hint="remove the link") from error


def _replace(target: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:80]}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if target.exists():
                held = target.stat()
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), held.st_uid, held.st_gid)
                os.fchmod(file.fileno(), held.st_mode & 0o7777)
            else:
                os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_into(target: Path, before: EnvFile, values: Mapping[str, str | None], why: OSError) -> None:
    """Switch off where no file can be made beside it: one write at the end, or on a full disk one in its place."""
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items() if value is not None)
    gap = "" if not before.text or before.text.endswith("\n") else "\n"
    try:
        with target.open("ab", buffering=0) as file:
            file.write((gap + lines).encode())
        return
    except OSError:
        in_place = edited(before, values).encode("utf-8", "surrogateescape")
        old = before.text.encode("utf-8", "surrogateescape")
        try:
            if len(in_place) == len(old):
                with target.open("r+b", buffering=0) as file:
                    file.write(in_place)
                return
        except OSError:
            pass
    raise StorageError(
        f"{target}: cannot be written: {why.strerror or why}",
        hint=f"by hand: put `{lines.strip()}` into the service's environment and restart it",
    ) from why


@contextlib.contextmanager
def _locked(folder: Path, *, insist: bool) -> Iterator[None]:
    """Hold the folder against other editors of ours; a lock on the file itself would go with it when it is replaced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if insist:
            raise StorageError(
                f"{folder}: cannot be opened: {error.strerror}", hint="name a folder that exists"
            ) from error
        yield
        return
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() < deadline and isinstance(error, BlockingIOError):
                    time.sleep(0.02)
                    continue
                if insist and isinstance(error, BlockingIOError):
                    raise StorageError(
                        f"{folder}: another process has been editing here for {_PATIENCE:g} s", hint="try again"
                    ) from error
                break  # a file system without locks, or one who must not wait
        yield
    finally:
        os.close(handle)


def _extent(lines: list[str], at: int) -> int:
    """Count the lines that the statement which begins here takes."""
    if lines[at].lstrip().startswith("#"):
        return 1
    text, count = lines[at], 1
    while _is_open(text):
        if at + count >= len(lines):
            return 1  # a quote that never ends: what follows is read as if it had
        text += lines[at + count]
        count += 1
    heredoc = _HEREDOC.search(text)
    if heredoc and "<<<" not in text:
        for more in range(at + count, len(lines)):
            if lines[more].strip() == heredoc[2]:
                return more - at + 1
    return count


def _marked(text: str) -> str:
    """Mark every character as a shell reads it: p plain, e escaped, s and d in quotes, c in a comment."""
    marks: list[str] = []
    quote, before = "", " "
    while len(marks) < len(text):
        character = text[len(marks)]
        if quote == "c":
            quote = "" if character == "\n" else quote
            marks.append("p" if character == "\n" else "c")
        elif character == "\\" and quote != "s":
            marks += ["e", "e"] if len(marks) + 1 < len(text) else ["e"]
        elif quote:
            marks.append(quote)
            quote = "" if character == {"s": "'", "d": '"'}[quote] else quote
        else:
            quote = {"'": "s", '"': "d"}.get(character, "c" if character == "#" and before.isspace() else "")
            marks.append(quote or "p")
        before = text[len(marks) - 1]
    return "".join(marks)


def _is_open(text: str) -> bool:
    """Tell whether a quote or a backslash at the end continues the statement on the next line."""
    if not text.endswith("\n"):
        return False
    end = _marked(text)[-1]
    return end in "sde"


def _statement(number: int, text: str) -> Statement:
    body = text.removeprefix(_BOM).rstrip("\r\n")
    match = _ASSIGNMENT.match(body)
    if not match:
        return Statement(number, text)
    raw = match["value"]
    try:
        words = shlex.split(raw, comments=True)
    except ValueError:
        words = ["", ""]
    marks = _marked(raw)
    shown = [(character, mark) for character, mark in zip(raw, marks, strict=True) if mark != "c"]
    # NAME=1 command: set for that command alone, which is no assignment
    if len(words) > 1 or any(mark == "p" and character in ";&|<>()" for character, mark in shown):
        return Statement(number, text)
    if any(mark in "pd" and character in "$`" for character, mark in shown):
        return Statement(number, text, match["name"], None, bool(match["export"]))
    empty = not raw or raw[0].isspace()  # NAME= # a comment
    value = "" if empty or not words else words[0]
    return Statement(number, text, match["name"], value, bool(match["export"]))


def _comment_after(text: str) -> str:
    """Keep what a user wrote behind the value."""
    body = text.rstrip("\r\n")
    start = _marked(body).find("c")
    if start < 0 or "\n" in body:
        return ""
    return body[len(body[:start].rstrip()) :]


def _mentions(text: str, name: str) -> bool:
    return not text.lstrip().startswith("#") and re.search(rf"\b{name}\b", text) is not None
