"""matrix.yaml as a checked Matrix. Every mistake is told with its line, what was found and what is accepted."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import date
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from toto_compat.errors import MatrixFileError
from toto_compat.matrix.check import cross_check
from toto_compat.matrix.document import (
    Document,
    Mistake,
    describe_value,
    listed,
    matrix_file_error,
    nearest_name,
    read_document,
)
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.toto_source import absolute

MATRIX_FILE_NAME = "matrix.yaml"


def find_matrix_file(given: Path | None = None) -> Path:
    """Find the file named by --matrix, else ./matrix.yaml."""
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
    """Make the --matrix option, the same in every command; its value goes to find_matrix_file."""
    return click.option(
        "--matrix",
        "matrix_file",
        type=click.Path(path_type=Path),
        default=None,
        help=f"Matrix file to use instead of ./{MATRIX_FILE_NAME}.",
    )(function)


def load_matrix(path: Path) -> Matrix:
    """Read and check the file; MatrixFileError lists every mistake in it, in the order of its lines."""
    document = read_document(path)
    mistakes = list(document.mistakes)
    matrix: Matrix | None = None
    try:
        matrix = Matrix.model_validate(document.data)
    except ValidationError as error:
        mistakes += schema_mistakes(document, Matrix, error)
    mistakes += cross_check(document, path.parent)
    if mistakes or matrix is None:
        raise matrix_file_error(path, mistakes)
    return with_absolute_forks(matrix, path.resolve().parent)


def with_absolute_forks(matrix: Matrix, folder: Path) -> Matrix:
    """Name a fork of toto-ts by a path that does not depend on where the matrix file is read from."""
    environments = {
        name: one.model_copy(update={"toto_ts": absolute(one.toto_ts, folder)})
        for name, one in matrix.environments.items()
    }
    return matrix.model_copy(update={"environments": environments})


def matrix_hash(matrix: Matrix) -> str:
    """Hash what is tested: a comment or the order of keys changes nothing."""
    # where cells run is no part of what is tested
    tested = matrix.model_dump(mode="json", by_alias=True, exclude={"slurm"})
    canonical = json.dumps(tested, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def json_schema_text() -> str:
    """Write the JSON Schema of matrix.yaml, as committed in matrix.schema.json."""
    schema = Matrix.model_json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def gates_markdown() -> str:
    """Describe every gate, as committed in docs/gates.md."""
    rows = [
        f"| `{gate}` | {gate.rule.meaning} | {gate.rule.default.text if gate.rule.default else 'off'} "
        f"| {gate.rule.suite} | {'CUDA only' if gate.rule.only_on else 'every device'} |"
        for gate in Gate
    ]
    head = [
        "# Gates",
        "",
        "A row is PASS only if every gate that applies was measured and held. Gates decide in this order: the first to",
        "fail names the verdict, else the first that was not measured. Limits here are the defaults; `matrix.yaml`",
        "holds others. Written by `toto-compat schema --gates > docs/gates.md`.",
        "",
        f"Times ({', '.join(f'`{gate}`' for gate in Gate if gate.rule.is_a_time)}) decide nothing, either way, if",
        "other processes, steal, a CPU quota, heat or a lack of memory disturbed the machine while they were taken.",
        "A cell with a measured FAIL skips the memory suite, repeats of the speed suite and shapes that nobody",
        "announced, and says so.",
        "",
        "| gate | what it counts | default limit | suite | decides on |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


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


def schema_mistakes(document: Document, model: type[BaseModel], error: ValidationError) -> list[Mistake]:
    """List everything in which a document is not what the model of its file asks for."""
    return [_schema_mistake(document, model, detail) for detail in error.errors()]


def _schema_mistake(document: Document, model: type[BaseModel], detail: ErrorDetails) -> Mistake:
    """Turn one pydantic error into a line, what was found there, and what is accepted."""
    location = tuple(part for part in detail["loc"] if part != "[key]")
    about_key = "[key]" in detail["loc"]
    parent, leaf = _annotation_at(model, location[:-1]), location[-1] if location else ""
    annotation = _key_annotation(parent) if about_key else _annotation_at(model, location)
    context: Mapping[str, Any] = detail.get("ctx", {})
    found, accepted, nearest = describe_value(detail["input"]), "", None
    choices = _choices(annotation)
    match detail["type"]:
        case "extra_forbidden":
            names = _field_names(parent)
            found, accepted, nearest = "an unknown key", listed(names), nearest_name(str(leaf), names)
        case "missing":
            found, accepted = "nothing", _field_description(parent, str(leaf)) or "a value"
        case "enum" | "literal_error":
            found = f"the unknown key {leaf!r}" if about_key else found
            accepted = listed(choices)
            wrong = str(leaf) if about_key else str(detail["input"])
            nearest = nearest_name(wrong, choices)
        case "string_type":
            quoted = isinstance(detail["input"], int | float | date) and not isinstance(detail["input"], bool)
            accepted = f'text in quotes: "{detail["input"]}"' if quoted else "text"
        case "string_pattern_mismatch":
            described = _field_description(parent, str(leaf)) or _own_description(annotation)
            accepted = described or f"text that matches {context['pattern']}"
        case "too_short":
            accepted = f"at least {context['min_length']} of them"
        case "model_type" | "model_attributes_type":
            accepted = f"a mapping with {listed(_field_names(annotation))}"
        case "value_error":
            found, accepted = "values that do not fit together", f"only this: {context['error']}"
        case other:
            accepted = _ACCEPTED_BY_ERROR.get(other) or detail["msg"].removeprefix("Input should be ")
    return document.mistake(location, found, accepted, nearest)


def _annotation_at(model: type[BaseModel], path: Iterable[str | int]) -> Any:
    """Find the type that the schema gives to a place in the file; None where it knows of no such place."""
    annotation: Any = model
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
            return info.description or listed(_choices(annotation)) or listed(_field_names(annotation))
    return ""


def _own_description(annotation: Any) -> str:
    """Find the description of a list's items, which have no field of their own."""
    notes: tuple[Any, ...] = getattr(annotation, "__metadata__", ())
    return next((note.description for note in notes if getattr(note, "description", None)), "")
