"""matrix.yaml as a checked Matrix. Every mistake is told with its line, what was found and what is accepted."""

import ast
import difflib
import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
import yaml
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from toto_compat.errors import MatrixFileError
from toto_compat.matrix.schema import Gate, Matrix

MATRIX_FILE_NAME = "matrix.yaml"
SCHEMA_HINT = "# yaml-language-server: $schema=./matrix.schema.json"
BUILTIN_CACHE_NAMES = ("upstream", "list_index", "compile_friendly", "fixed_size")
SABOTAGE_PREFIX = "sabotaged:"

KeyPath = tuple[str | int, ...]

_MERGE_TAG = "tag:yaml.org,2002:merge"
# Names become folders, image tags and parts of a cell identifier, and must not look like a glob.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
class _Document:
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


def find_matrix_file(given: Path | None = None) -> Path:
    """The file named by --matrix, else ./matrix.yaml."""
    path = given if given is not None else Path(MATRIX_FILE_NAME)
    if path.is_file():
        return path
    if given is None:
        raise MatrixFileError(
            f"there is no {MATRIX_FILE_NAME} in {Path.cwd()}",
            hint="run the command in the folder that holds it, or name another file with --matrix FILE",
        )
    what = "is a folder, not a file" if path.is_dir() else "does not exist"
    raise MatrixFileError(f"{path} {what}", hint="--matrix takes the path of a matrix.yaml")


def matrix_option(function: Any) -> Any:
    """The --matrix option, the same in every command that reads the file; pass its value to find_matrix_file."""
    return click.option(
        "--matrix",
        "matrix_file",
        type=click.Path(path_type=Path),
        default=None,
        help=f"Matrix file to use instead of ./{MATRIX_FILE_NAME}.",
    )(function)


def load_matrix(path: Path) -> Matrix:
    """Read and check the file; MatrixFileError lists every mistake in it, in the order of its lines."""
    document = _read(path)
    mistakes = list(document.mistakes)
    matrix: Matrix | None = None
    try:
        matrix = Matrix.model_validate(document.data)
    except ValidationError as error:
        mistakes += [_schema_mistake(document, detail) for detail in error.errors()]
    mistakes += _cross_check(document, path.parent)
    if mistakes or matrix is None:
        raise _file_error(path, mistakes)
    return matrix


def matrix_hash(matrix: Matrix) -> str:
    """Changes when what is tested changes, not when a comment or the order of keys does."""
    canonical = json.dumps(matrix.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def json_schema_text() -> str:
    """The JSON Schema of matrix.yaml, as committed in matrix.schema.json."""
    schema = Matrix.model_json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of matrix.yaml, for editors and other tools."""
    click.echo(json_schema_text(), nl=False)


def nearest_name(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate a mistyped name most probably meant, if any is near."""
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=0.55)
    return by_lower_case[close[0]] if close else None


# --- reading: YAML nodes to data and positions ---


def _read(path: Path) -> _Document:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MatrixFileError(f"{path}: not UTF-8 text (byte {error.start})", hint="save it as UTF-8") from error
    except OSError as error:
        raise MatrixFileError(f"{path}: cannot be read: {error.strerror}", hint="check its permissions") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        found = " ".join(part for part in (error.context, error.problem) if part)
        raise _file_error(path, [Mistake(line, column, "", found or "broken YAML", "well-formed YAML")]) from error
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise _file_error(path, [Mistake(line, 1, "", str(error).splitlines()[0], "well-formed YAML")]) from error
    except RecursionError as error:
        raise _file_error(path, [Mistake(1, 1, "", "YAML nested too deeply", "a few levels")]) from error
    if root is None:
        raise _file_error(path, [Mistake(1, 1, "", "an empty file", f"a mapping with {_names(_field_names(Matrix))}")])
    reader = _NodeReader()
    data = reader.value(root, ())
    return _Document(data, reader.positions, tuple(sorted(reader.mistakes)))


@dataclass
class _NodeReader:
    """Builds plain data like yaml.safe_load, but remembers where keys stand and refuses duplicates."""

    positions: dict[KeyPath, yaml.Mark] = field(default_factory=dict)
    mistakes: set[Mistake] = field(default_factory=set)  # a set: an aliased node is read once per use
    _open: list[yaml.Node] = field(default_factory=list)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is outer for outer in self._open):
            self._mistake(node, path, "an alias that contains itself", "a finite structure")
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, path)
            return self._scalar(node, path)
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

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)  # type: ignore[no-untyped-call]
        except (yaml.constructor.ConstructorError, ValueError):
            self._mistake(node, path, f"{node.value!r} with the tag {node.tag}", "text, numbers, true, false or null")
            return None

    def _entries(
        self, node: yaml.MappingNode, path: KeyPath, merging: tuple[yaml.Node, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Keys of a mapping with `<<` resolved: its own keys win, then those merged first."""
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
                kind = key_node.tag.rpartition(":")[2]
                self._mistake(key_node, (*path, key), f"{key}, which YAML reads as {kind}", f'text as a key: "{key}"')
            if key in own:
                first = own[key][0].start_mark.line + 1
                self._mistake(key_node, (*path, key), f"the key a second time (first in line {first})", "each key once")
                continue
            own[key] = (key_node, value_node)
        return {**merged, **own}

    def _mistake(self, node: yaml.Node, path: KeyPath, found: str, accepted: str) -> None:
        mark = node.start_mark
        self.mistakes.add(Mistake(mark.line + 1, mark.column + 1, _dotted(path), found, accepted))


# --- schema mistakes, in words ---

_ACCEPTED_BY_ERROR = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}


def _schema_mistake(document: _Document, detail: ErrorDetails) -> Mistake:
    """One pydantic error as a line, a found and an accepted."""
    location = tuple(part for part in detail["loc"] if part != "[key]")
    about_key = "[key]" in detail["loc"]
    parent, leaf = _annotation_at(location[:-1]), location[-1] if location else ""
    annotation = _key_annotation(parent) if about_key else _annotation_at(location)
    context: Mapping[str, Any] = detail.get("ctx", {})
    found, accepted, nearest = _describe_value(detail["input"]), "", None
    choices = _choices(annotation)
    match detail["type"]:
        case "extra_forbidden":
            names = _field_names(parent)
            found, accepted, nearest = "an unknown key", _names(names), nearest_name(str(leaf), names)
        case "missing":
            found, accepted = "nothing", _field_description(parent, str(leaf)) or "a value"
        case "enum" | "literal_error":
            found = f"the unknown key {leaf!r}" if about_key else found
            accepted = _names(choices)
            wrong = str(leaf) if about_key else str(detail["input"])
            nearest = nearest_name(wrong, choices)
        case "string_type":
            quoted = isinstance(detail["input"], (int, float)) and not isinstance(detail["input"], bool)
            accepted = f'text in quotes: "{detail["input"]}"' if quoted else "text"
        case "string_pattern_mismatch":
            description = _field_description(parent, str(leaf)) or "text"
            accepted = f"{description}, matching {context['pattern']}"
        case "too_short":
            accepted = f"at least {context['min_length']} of them"
        case "model_type" | "model_attributes_type":
            accepted = f"a mapping with {_names(_field_names(annotation))}"
        case "value_error":
            found, accepted = "values that do not fit together", str(context["error"])
        case other:
            accepted = _ACCEPTED_BY_ERROR.get(other) or detail["msg"].removeprefix("Input should be ")
    return document.mistake(location, found, accepted, nearest)


def _annotation_at(path: Iterable[str | int]) -> Any:
    """The type the schema gives to a place in the file; None where it knows of no such place."""
    annotation: Any = Matrix
    for part in path:
        annotation = _without_none(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields = {info.alias or name: info.annotation for name, info in annotation.model_fields.items()}
            annotation = fields.get(str(part))
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        else:
            return None
    return _without_none(annotation)


def _key_annotation(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is dict else None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        return next(option for option in get_args(annotation) if option is not type(None))
    return annotation


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if isinstance(annotation, EnumType):
        return [str(member) for member in annotation]  # type: ignore[var-annotated]
    return []


def _field_names(model: Any) -> list[str]:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [info.alias or name for name, info in model.model_fields.items()]


def _field_description(model: Any, name: str) -> str:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return ""
    for own_name, info in model.model_fields.items():
        if name in (own_name, info.alias):
            annotation = _without_none(info.annotation)
            return info.description or _names(_choices(annotation)) or _names(_field_names(annotation))
    return ""


# --- what the schema alone cannot say ---


def _cross_check(document: _Document, folder: Path) -> list[Mistake]:
    """Names, references and files. Works on the plain data, so that it runs beside schema mistakes."""
    return [
        *_environment_mistakes(document),
        *_name_mistakes(document),
        *_reference_mistakes(document),
        *_cache_source_mistakes(document, folder),
        *_gate_mistakes(document),
        *_csv_mistakes(document, folder),
    ]


def _environment_mistakes(document: _Document) -> Iterator[Mistake]:
    for name, environment in _section(document, "environments"):
        identity = f"torch-{environment.get('torch')}-{environment.get('build')}"
        suffix = name.removeprefix(identity)
        if name != identity and not (name.startswith(identity) and re.fullmatch(r"-[a-z0-9][a-z0-9_.-]*", suffix)):
            accepted = f"{identity}, or {identity}-<what differs> in lower case: the name is the identity"
            yield document.mistake(("environments", name), f"the name {name!r}", accepted, identity)
        pins = environment.get("pins")
        for package, version in pins.items() if isinstance(pins, dict) else ():
            place = ("environments", name, "pins", package)
            if str(package).lower() in ("torch", "toto-ts", "toto_ts", "xformers"):
                yield document.mistake(place, "a pin", "it as a key of the environment, not among the pins")
            elif isinstance(version, str) and not _is_version(version):
                yield document.mistake(place, _describe_value(version), "one exact version, such as 1.26.4")
        release = environment.get("toto_ts")
        if isinstance(release, str) and not _is_version(release):
            place = ("environments", name, "toto_ts")
            yield document.mistake(place, _describe_value(release), "one exact version, such as 0.2.0")


def _name_mistakes(document: _Document) -> Iterator[Mistake]:
    for section in ("caches", "settings", "profiles", "workloads"):
        for name, _ in _section(document, section):
            bare = name.removeprefix(SABOTAGE_PREFIX) if section == "caches" else name
            if not _NAME.fullmatch(bare):
                accepted = "letters, digits, '_', '.' and '-': names are parts of identifiers and folders"
                yield document.mistake((section, name), f"the name {name!r}", accepted)
    modes = document.data.get("modes") if isinstance(document.data, dict) else None
    yield from _repeated(document, ("modes",), modes)


def _reference_mistakes(document: _Document) -> Iterator[Mistake]:
    names = {section: [name for name, _ in _section(document, section)] for section in ("workloads", "settings")}
    for name, profile in _section(document, "profiles"):
        yield from _unknown(document, ("profiles", name, "workload"), profile.get("workload"), names["workloads"])
        yield from _repeated(document, ("profiles", name, "suites"), profile.get("suites"))
        if profile.get("suites") == []:
            yield document.mistake(("profiles", name, "suites"), "an empty list", "at least one suite")
    for name, cache in _section(document, "caches"):
        place: KeyPath = ("caches", name, "settings")
        settings = cache.get("settings", ["stock"])
        if settings == []:
            yield document.mistake(place, "an empty list", _names(names["settings"]))
        for index, reference in enumerate(settings if isinstance(settings, list) else ()):
            yield from _unknown(document, (*place, index), reference, names["settings"])
        yield from _repeated(document, place, settings)
    if isinstance(document.data, dict):
        environments = [name for name, _ in _section(document, "environments")]
        yield from _unknown(document, ("production",), document.data.get("production"), environments)


def _cache_source_mistakes(document: _Document, folder: Path) -> Iterator[Mistake]:
    for name, cache in _section(document, "caches"):
        source, place = cache.get("source"), ("caches", name, "source")
        if not isinstance(source, str):
            continue
        if source == "builtin":
            if name not in BUILTIN_CACHE_NAMES and not name.startswith(SABOTAGE_PREFIX):
                accepted = f"builtin for {_names(BUILTIN_CACHE_NAMES)} only; for your own cache path/to/file.py:Class"
                nearest = nearest_name(name, BUILTIN_CACHE_NAMES)
                yield document.mistake(place, f"builtin for {name!r}", accepted, nearest)
            continue
        if name in BUILTIN_CACHE_NAMES or name.startswith(SABOTAGE_PREFIX):
            yield document.mistake(place, f"a source for the built-in name {name!r}", "builtin, or another name for it")
        match = re.fullmatch(r"(?P<file>.+\.py):(?P<class>[A-Za-z_]\w*)", source)
        if match is None:
            nearest = nearest_name(source, ["builtin"])
            yield document.mistake(place, _describe_value(source), "builtin, or path/to/file.py:Class", nearest)
            continue
        yield from _class_mistakes(document, place, folder / match["file"], match["class"])


def _class_mistakes(document: _Document, place: KeyPath, file: Path, class_name: str) -> Iterator[Mistake]:
    """The file is parsed, never imported: it needs torch, and the host has none."""
    if not file.is_file():
        names = [sibling.name for sibling in file.parent.glob("*.py")] if file.parent.is_dir() else []
        nearest = nearest_name(file.name, names)
        yield document.mistake(place, f"no file {file}", "a path relative to the matrix file", nearest)
        return
    try:
        module = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, OSError) as error:
        yield document.mistake(place, f"{file}, which is not readable Python: {error}", "a Python file")
        return
    names = [name for statement in module.body for name in _bound_names(statement)]
    if class_name not in names and "*" not in names:
        classes = [statement.name for statement in module.body if isinstance(statement, ast.ClassDef)]
        accepted = _names(classes) or "a class that it defines"
        yield document.mistake(place, f"no {class_name} in {file}", accepted, nearest_name(class_name, classes))


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _gate_mistakes(document: _Document) -> Iterator[Mistake]:
    gates = document.data.get("gates") if isinstance(document.data, dict) else None
    for gate in Gate if isinstance(gates, dict) else ():
        if gate not in gates:
            yield document.mistake(("gates", str(gate)), "nothing", "a limit for every gate: {max: 0} or {min: 1}")


def _csv_mistakes(document: _Document, folder: Path) -> Iterator[Mistake]:
    for name, workload in _section(document, "workloads"):
        csv = workload.get("csv")
        path = csv.get("path") if isinstance(csv, dict) else None
        if isinstance(path, str) and not (folder / path).is_file():
            place = ("workloads", name, "csv", "path")
            yield document.mistake(place, f"no file {folder / path}", "a CSV file, relative to the matrix file")


def _section(document: _Document, name: str) -> list[tuple[str, dict[str, Any]]]:
    """The named entries of a top-level section; what is not a mapping is the schema's to complain about."""
    section = document.data.get(name) if isinstance(document.data, dict) else None
    entries = section.items() if isinstance(section, dict) else ()
    return [(key, entry if isinstance(entry, dict) else {}) for key, entry in entries]


def _unknown(document: _Document, place: KeyPath, reference: Any, names: Sequence[str]) -> Iterator[Mistake]:
    if isinstance(reference, str) and reference not in names:
        yield document.mistake(place, _describe_value(reference), _names(names), nearest_name(reference, names))


def _repeated(document: _Document, place: KeyPath, items: Any) -> Iterator[Mistake]:
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Hashable) and item in items[:index]:
            yield document.mistake((*place, index), f"{_describe_value(item)} a second time", "each name once")


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _describe_value(value: Any) -> str:
    """A value as the user wrote it, with what YAML made of it."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value} (a number)" if isinstance(value, int | float) else f"{value} (a {type(value).__name__})"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _dotted(path: KeyPath) -> str:
    """environments.torch-2.13.0-cpu.pins, modes[1]"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _file_error(path: Path, mistakes: Sequence[Mistake]) -> MatrixFileError:
    count = f"{len(mistakes)} mistake{'s' if len(mistakes) != 1 else ''}"
    lines = [mistake.describe(path) for mistake in sorted(mistakes, key=lambda one: (one.line, one.column, one.path))]
    hint = "every key is described by: toto-compat schema"
    return MatrixFileError("\n  ".join([f"{path} has {count}:", *lines]), hint=hint)
