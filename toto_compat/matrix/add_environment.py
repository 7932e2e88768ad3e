"""A new environment in the text of matrix.yaml: lines are put in, everything else stays as somebody wrote it."""

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.version import Version

from toto_compat.contract.request import Device, Environment
from toto_compat.errors import MatrixFileError, StorageError
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.schema import Matrix

# What YAML takes for the end of a line beside \n and \r\n: a lone \r, and three of Unicode's.
_OTHER_LINE_ENDS = re.compile("\r(?!\n)|[\x85\u2028\u2029]")


@dataclass(frozen=True)
class EditedMatrix:
    """The text of a matrix file with one environment more, checked as the file itself would be."""

    path: Path
    original: bytes
    text: str
    stanza: str
    matrix: Matrix


def with_environment(path: Path, name: str, environment: Environment, *, remarks: tuple[str, ...] = ()) -> EditedMatrix:
    """Put an environment where its release belongs. Nothing is written: `write_matrix` does that."""
    before = load_matrix(path)
    if name in before.environments:
        raise MatrixFileError(f"{path} has {name} already", hint="remove it first, or choose another release")
    original = path.read_bytes()
    text = original.decode("utf-8")
    if _OTHER_LINE_ENDS.search(text):
        raise MatrixFileError(
            f"{path}: has line ends that are neither Unix's nor Windows's, so that lines cannot be put in",
            hint="save it with ordinary line ends, then try again",
        )
    section = _environments_node(text, path)
    lines = text.split("\n")  # those of Windows keep their \r, so that every line that is there stays as it is
    at = _line_for(section, lines, before, environment)
    if at == len(lines) and lines[-2].endswith("\r"):
        lines[-1] += "\r"  # the last line has no end yet
    indent = section.value[0][0].start_mark.column
    pins = _anchor_of(text, section, environment, before, at)
    stanza = _stanza(name, environment, indent, pins, remarks)
    edited = "\n".join([*lines[:at], *_spaced(lines, at, stanza, section), *lines[at:]])
    after = _checked(path, edited, name, stanza)
    expected = dict(before.environments) | {name: environment}
    if after.environments != expected or after.model_copy(update={"environments": expected}) != before.model_copy(
        update={"environments": expected}
    ):
        raise MatrixFileError(
            f"{path}: {name} cannot be put in without changing something else",
            hint=f"add it under environments: yourself:\n{stanza}",
        )
    return EditedMatrix(path, original, edited, stanza, after)


def write_matrix(edited: EditedMatrix) -> None:
    """Replace the file by its edited text, whole; a link to it stays a link, and its mode stays."""
    target = edited.path.resolve()
    # asking an index takes half a minute, in which somebody may have saved the file
    if target.read_bytes() != edited.original:
        raise StorageError(f"{target}: was changed by somebody else meanwhile", hint="give the same command again")
    beside = _write_beside(target, edited.text)
    try:
        beside.chmod(target.stat().st_mode)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(f"{target}: cannot be written: {error.strerror}", hint="check its permissions") from error


def _write_beside(path: Path, text: str) -> Path:
    """Write in the same folder: what the file names is relative to it, and a rename stays on one disk."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".matrix-", suffix=".yaml", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}", hint="check the folder") from error
    return Path(name)


def _checked(path: Path, text: str, name: str, stanza: str) -> Matrix:
    beside = _write_beside(path.resolve(), text)
    try:
        return load_matrix(beside)
    except MatrixFileError as error:
        raise MatrixFileError(
            f"{path}: with {name} it would not be valid:\n{error.message.replace(str(beside), str(path))}",
            hint=f"add it under environments: yourself:\n{stanza}",
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _environments_node(text: str, path: Path) -> yaml.MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # load_matrix has read it
    section = next(value for key, value in root.value if key.value == "environments")
    assert isinstance(section, yaml.MappingNode)
    if section.flow_style or any(key.tag.endswith(":merge") for key, _ in section.value):
        raise MatrixFileError(
            f"{path}:{section.start_mark.line + 1}: environments is written in a way that lines cannot be put into",
            hint="write one key per line below `environments:`",
        )
    return section


def _line_for(section: yaml.MappingNode, lines: list[str], matrix: Matrix, environment: Environment) -> int:
    """Number the line to put it at: behind the newest older release, else before the first one for its device."""
    names = [key.value for key, _ in section.value]
    same = [name for name in names if matrix.environments[name].device is environment.device]
    older = [name for name in same if Version(matrix.environments[name].torch) < Version(environment.torch)]
    if older:
        follows = names.index(
            max(older, key=lambda name: (Version(matrix.environments[name].torch), names.index(name)))
        )
    else:
        follows = names.index(same[0]) - 1 if same else len(names) - 1
    if follows < 0:
        return int(section.value[0][0].start_mark.line)
    end = section.value[follows + 1][0].start_mark.line if follows + 1 < len(names) else _end_of(section, lines)
    column = section.value[0][0].start_mark.column
    # comments above a key belong to it, and so do the blank lines before them
    while end > 0 and _is_between(lines[end - 1], column):
        end -= 1
    return end


def _end_of(section: yaml.MappingNode, lines: list[str]) -> int:
    return min(section.end_mark.line if section.end_mark.column == 0 else section.end_mark.line + 1, len(lines))


def _is_between(line: str, column: int) -> bool:
    bare = line.strip()
    return not bare or (bare.startswith("#") and len(line) - len(line.lstrip()) <= column)


def _spaced(lines: list[str], at: int, stanza: str, section: yaml.MappingNode) -> list[str]:
    """Keep one blank line between environments where the file has them, and the line ends that it has."""
    own, end = stanza.rstrip("\n").split("\n"), "\r" if lines[at - 1].endswith("\r") else ""
    first, last = (section.value[place][0].start_mark.line for place in (0, -1))
    apart = first == last or any(not line.strip() for line in lines[first:last])
    blank = [""] if apart else []
    if at == first or not lines[at - 1].strip():
        spaced = [*own, *blank]
    else:
        follows = at >= len(lines) or bool(lines[at].strip())
        spaced = [*blank, *own, *(blank if follows else [])]
    if at < len(lines):
        return [line + end for line in spaced]
    return [*(line + end for line in (spaced if spaced[-1] else spaced[:-1])), ""]


def _anchor_of(text: str, section: yaml.MappingNode, environment: Environment, matrix: Matrix, line: int) -> str | None:
    """Name an anchor that stands above the line and holds the environment's pins, as people would write it."""
    anchors = {token.start_mark.index: token.value for token in yaml.scan(text) if isinstance(token, yaml.AnchorToken)}
    for key, value in section.value:
        for inner, node in value.value:
            above = inner.value == "pins" and node.start_mark.line < line
            if above and node.start_mark.index in anchors and matrix.environments[key.value].pins == environment.pins:
                return str(anchors[node.start_mark.index])
    return None


def _stanza(name: str, environment: Environment, indent: int, pins: str | None, remarks: tuple[str, ...]) -> str:
    fields = environment.model_dump(mode="json", exclude_defaults=True)
    fields |= {"python": environment.python, "base_image": environment.base_image}  # also where they are the defaults
    order = ("torch", "build", "python", "toto_ts", "xformers", "index", "base_image", "gpu_architectures")
    lines = [f"# {remark}" for remark in remarks] + [f"{name}:"]
    for field in order:
        if field not in fields:
            continue
        value = fields[field]
        quoted = field in ("torch", "python", "toto_ts", "xformers")
        told = f"[{', '.join(value)}]" if isinstance(value, list) else json.dumps(value) if quoted else str(value)
        lines.append(f"  {field}: {told}")
    if environment.pins and pins:
        lines.append(f"  pins: *{pins}")
    elif environment.pins:
        lines += [
            "  pins:",
            *(f"    {package}: {json.dumps(version)}" for package, version in environment.pins.items()),
        ]
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def most_similar(matrix: Matrix, version: Version, build: str) -> Environment:
    """Choose the nearest environment: same build, same device, not production's special pins, near release."""
    wants_cpu = build == "cpu"

    def distance(name: str) -> tuple[bool, bool, bool, list[int]]:
        environment = matrix.environments[name]
        release = Version(environment.torch).release
        steps = [abs(mine - other) for mine, other in zip(release, version.release, strict=False)]
        other_device = (environment.device is Device.CPU) != wants_cpu
        return environment.build != build, other_device, name == matrix.production, steps

    return matrix.environments[min(matrix.environments, key=distance)]
