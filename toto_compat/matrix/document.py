"""YAML as plain data that remembers where each key stands, and the mistakes that point there."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toto_compat.errors import MatrixFileError

KeyPath = tuple[str | int, ...]

_MERGE_TAG = "tag:yaml.org,2002:merge"
_MOST_VALUES = 100_000  # the shipped file has some hundreds
_LONGEST_NUMBER = 256  # bits


@dataclass(frozen=True, order=True)
class Mistake:
    """One thing to change in the file. Lines and columns count from 1."""

    line: int
    column: int
    path: str
    found: str
    accepted: str
    nearest: str | None = None

    def describe(self, file: Path) -> str:
        suggestion = f"; did you mean {self.nearest}?" if self.nearest else ""
        where = f"{self.path}: " if self.path else ""
        return f"{file}:{self.line}: {where}found {self.found}; accepted {self.accepted}{suggestion}"


@dataclass(frozen=True)
class Document:
    """Plain data, where each of its keys stands, and what was already wrong while reading."""

    data: Any
    positions: Mapping[KeyPath, yaml.Mark]
    mistakes: Sequence[Mistake]

    def mistake(self, path: KeyPath, found: str, accepted: str, nearest: str | None = None) -> Mistake:
        # A missing key has no place of its own: the nearest key above it is where it has to go.
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.positions), None)
        mark = self.positions[known] if known is not None else None
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return Mistake(line, column, _dotted(path), found, accepted, nearest)


def is_file(path: Path) -> bool:
    """Tell whether a name that a document gives is that of a file; one that is too long for any is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_document(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MatrixFileError(f"{path}: not UTF-8 text (byte {error.start})", hint="save it as UTF-8") from error
    except OSError as error:
        raise MatrixFileError(f"{path}: cannot be read: {error.strerror}", hint="check its permissions") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise matrix_file_error(path, [_yaml_mistake(error, text)]) from error
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise matrix_file_error(path, [Mistake(line, 1, "", str(error).splitlines()[0], "well-formed YAML")]) from error
    except (ValueError, OverflowError) as error:  # an escape such as "\\UFFFFFFFF" stands for no character
        raise matrix_file_error(path, [Mistake(1, 1, "", f"broken YAML ({error})", "well-formed YAML")]) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if root is None:
        raise matrix_file_error(path, [Mistake(1, 1, "", "an empty file", "a mapping that begins with schema: 1")])
    reader = _NodeReader()
    try:
        data = reader.value(root, ())
    except RecursionError as error:
        raise _too_deep(path) from error
    except _TooMuchError as error:
        accepted = f"{_MOST_VALUES} at most, what an alias stands for counted each time"
        raise matrix_file_error(path, [Mistake(1, 1, "", "too many values", accepted)]) from error
    return Document(data, reader.positions, tuple(sorted(reader.mistakes)))


def _too_deep(path: Path) -> MatrixFileError:
    return matrix_file_error(path, [Mistake(1, 1, "", "YAML nested too deeply", "a few levels")])


def _yaml_mistake(error: yaml.MarkedYAMLError, text: str) -> Mistake:
    """Return what the YAML parser stumbled over, in the words of the other mistakes."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    problem = error.problem or ""
    if "'\\t'" in problem:
        return Mistake(line, column, "", "a tab", "spaces to indent with")
    if alias := re.fullmatch(r"found undefined alias '(.+)'", problem):
        anchors = re.findall(r"&([\w-]+)", text)
        name = _shortened(alias[1])
        accepted = f"the name of an anchor that stands above it: &{name}"
        return Mistake(line, column, "", f"the undefined alias *{name}", accepted, nearest_name(alias[1], anchors))
    if problem.startswith("found "):
        found = " ".join(part for part in (problem.removeprefix("found "), error.context) if part)
    else:
        told = " ".join(part for part in (error.context, problem) if part)
        found = f"broken YAML ({told})" if told else "broken YAML"
    return Mistake(line, column, "", found, "well-formed YAML")


class _TooMuchError(Exception):
    """Aliases of aliases stand for more than anybody wrote: a few lines can mean more than memory holds."""


@dataclass
class _NodeReader:
    """Builds plain data like yaml.safe_load, but remembers where keys stand and refuses duplicates."""

    positions: dict[KeyPath, yaml.Mark] = field(default_factory=dict)
    mistakes: set[Mistake] = field(default_factory=set)  # a set: an aliased node is read once per use
    _open: list[yaml.Node] = field(default_factory=list)
    _read: int = 0

    def _count(self) -> None:
        self._read += 1
        if self._read > _MOST_VALUES:
            raise _TooMuchError

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count()
        if any(node is outer for outer in self._open):
            self._mistake(node, path, "an alias that contains itself", "a finite structure")
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and self._has_tag(node, path, "map"):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and self._has_tag(node, path, "seq"):
                return self._sequence(node, path)
            return self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else None
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result = {}
        for key, (key_node, value_node) in self._entries(node, path, ()).items():
            self.positions[(*path, key)] = key_node.start_mark
            result[key] = self.value(value_node, (*path, key))
        return result

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        result = []
        for index, item in enumerate(node.value):
            self.positions[(*path, index)] = item.start_mark
            result.append(self.value(item, (*path, index)))
        return result

    def _has_tag(self, node: yaml.Node, path: KeyPath, kind: str) -> bool:
        """Tell whether a list or mapping is a plain one; any other tag is a mistake, not something to pass over."""
        plain = bool(node.tag == f"tag:yaml.org,2002:{kind}")
        if not plain:
            self._mistake(node, path, f"the tag {_shortened(node.tag)}", "plain lists and mappings")
        return plain

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        misfit = f"{describe_value(node.value)} with the tag {_shortened(node.tag)}"
        if node.tag in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._mistake(node, path, misfit, "text, numbers, true, false or null")
            return None
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError, KeyError, AttributeError, IndexError):
            self._mistake(node, path, misfit, "text, numbers, true, false or null")
            return None
        if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
            # Python refuses to write it where a message quotes it, and nothing here is counted in such numbers.
            self._mistake(node, path, f"{describe_value(node.value)}, a number too long to be meant", "a shorter one")
            return None
        return value

    def _entries(
        self, node: yaml.MappingNode, path: KeyPath, merging: tuple[yaml.Node, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return a mapping's entries with `<<` resolved: its own keys win, then those merged first."""
        self._count()
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in sources:
                    if not isinstance(source, yaml.MappingNode) or any(source is outer for outer in (*merging, node)):
                        self._mistake(key_node, (*path, "<<"), "something else", "a mapping, or a list of mappings")
                        continue
                    for key, entry in self._entries(source, path, (*merging, node)).items():
                        merged.setdefault(key, entry)
                continue
            key = str(key_node.value)
            if not isinstance(key_node, yaml.ScalarNode):
                self._mistake(key_node, path, "a list or mapping as a key", "text as a key")
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                kind, short = _shortened(key_node.tag.rpartition(":")[2]), _shortened(key)
                found, accepted = f"{short}, which YAML reads as {kind}", f'text as a key: "{short}"'
                self._mistake(key_node, (*path, key), found, accepted)
            if key in own:
                first = own[key][0].start_mark.line + 1
                self._mistake(key_node, (*path, key), f"the key a second time (first in line {first})", "each key once")
                continue
            own[key] = (key_node, value_node)
        return {**merged, **own}

    def _mistake(self, node: yaml.Node, path: KeyPath, found: str, accepted: str) -> None:
        mark = node.start_mark
        self.mistakes.add(Mistake(mark.line + 1, mark.column + 1, _dotted(path), found, accepted))


def nearest_name(name: str, candidates: Iterable[str]) -> str | None:
    """Guess which candidate a mistyped name meant, if any is near."""
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=0.55)
    return by_lower_case[close[0]] if close else None


def describe_value(value: Any) -> str:
    """Show a value as the user wrote it, with what YAML made of it."""
    if isinstance(value, str):
        return repr(_shortened(value))
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "mapping"
        return f"a {kind}" if value else f"an empty {kind}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value} (a number)" if isinstance(value, int | float) else f"{value} (a {type(value).__name__})"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _dotted(path: KeyPath) -> str:
    """Write a place as environments.torch-2.13.0-cpu.pins or modes[1]."""
    text = ""
    for part in path:
        key = part if isinstance(part, int) else _shortened(part)
        text += f"[{key}]" if isinstance(part, int) else f".{key}" if text else str(key)
    return text


def matrix_file_error(path: Path, mistakes: Sequence[Mistake]) -> MatrixFileError:
    return MatrixFileError(describe_mistakes(path, mistakes), hint="every key is described by: toto-compat schema")


def describe_mistakes(path: Path, mistakes: Sequence[Mistake]) -> str:
    """Write every mistake on a line of its own, in the order of the file."""
    count = f"{len(mistakes)} mistake{'s' if len(mistakes) != 1 else ''}"
    lines = [mistake.describe(path) for mistake in sorted(mistakes, key=lambda one: (one.line, one.column, one.path))]
    return "\n  ".join([f"{path} has {count}:", *lines])
