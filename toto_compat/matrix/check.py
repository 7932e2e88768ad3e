"""What the schema alone cannot say about matrix.yaml: names, references between sections, files."""

import ast
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.version import Version

from toto_compat.contract.caches import CACHES, SABOTAGE_PREFIX, SABOTAGES
from toto_compat.contract.request import TORCH_RELEASE
from toto_compat.matrix.document import Document, KeyPath, Mistake, describe_value, is_file, listed, nearest_name
from toto_compat.matrix.toto_source import ACCEPTED as TOTO_ACCEPTED
from toto_compat.matrix.toto_source import absolute, toto_source

# Names become folders, image tags and parts of a cell identifier, and must not look like a glob.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# These become words of pip's and the engine's command lines, and must not look like options of theirs.
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_INDEX = re.compile(r"(https?|file)://[^\s\x00-\x1f]+")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")


def cross_check(document: Document, folder: Path) -> list[Mistake]:
    """Check names, references and files, on the plain data, so that it runs beside schema mistakes."""
    return [
        *_environment_mistakes(document, folder),
        *_name_mistakes(document),
        *_reference_mistakes(document),
        *_cache_source_mistakes(document, folder),
        *_csv_mistakes(document, folder),
    ]


def _environment_mistakes(document: Document, folder: Path) -> Iterator[Mistake]:
    for name, environment in _section(document, "environments"):
        torch, build = environment.get("torch"), environment.get("build")
        if isinstance(torch, str) and isinstance(build, str):
            identity = f"torch-{torch}-{build}"
            if not re.fullmatch(re.escape(identity) + r"(-[a-z0-9][a-z0-9_.-]*)?", name):
                accepted = f"{identity}, or {identity}-<what differs> in lower case: the name is the identity"
                yield document.mistake(("environments", name), f"the name {name!r}", accepted, identity)
        if isinstance(torch, str) and re.fullmatch(TORCH_RELEASE, torch) and not _is_version(torch):
            place_of_torch: KeyPath = ("environments", name, "torch")
            yield document.mistake(place_of_torch, describe_value(torch), "one exact PyTorch release, such as 2.9.0")
        pins = environment.get("pins")
        for package, version in pins.items() if isinstance(pins, dict) else ():
            place: KeyPath = ("environments", name, "pins", package)
            if str(package).lower() in ("torch", "toto-ts", "toto_ts", "xformers"):
                yield document.mistake(place, "a pin", "it as a key of the environment, not among the pins")
            elif not _PACKAGE.fullmatch(str(package)):
                yield document.mistake(place, f"the name {str(package)!r}", "the name of a package, such as numpy")
            elif isinstance(version, str) and not _is_version(version):
                yield document.mistake(place, describe_value(version), "one exact version, such as 1.26.4")
        yield from _word_mistakes(document, name, environment)
        toto = environment.get("toto_ts")
        if isinstance(toto, str):
            try:
                toto_source(absolute(toto, folder))
            except ValueError as error:
                place = ("environments", name, "toto_ts")
                yield document.mistake(place, f"{describe_value(toto)}: {error}", TOTO_ACCEPTED)


def _word_mistakes(document: Document, name: str, environment: dict[str, Any]) -> Iterator[Mistake]:
    accepted: dict[str, tuple[Callable[[str], object], str]] = {
        "xformers": (_is_version, "one exact version, such as 0.0.33"),
        "index": (_INDEX.fullmatch, "an address that begins with https://, http:// or file://"),
        "base_image": (_IMAGE.fullmatch, "the name of an image, such as python:3.11-slim"),
    }
    for key, (fits, example) in accepted.items():
        if isinstance(value := environment.get(key), str) and not fits(value):
            yield document.mistake(("environments", name, key), describe_value(value), example)


def _name_mistakes(document: Document) -> Iterator[Mistake]:
    for section in ("caches", "settings", "profiles", "workloads"):
        for name, _ in _section(document, section):
            bare = name.removeprefix(SABOTAGE_PREFIX) if section == "caches" else name
            if not _NAME.fullmatch(bare):
                accepted = "letters, digits, '_', '.' and '-': names are parts of identifiers and folders"
                yield document.mistake((section, name), f"the name {name!r}", accepted)
    modes = document.data.get("modes") if isinstance(document.data, dict) else None
    yield from _repeated(document, ("modes",), modes)


def _reference_mistakes(document: Document) -> Iterator[Mistake]:
    for name, profile in _section(document, "profiles"):
        for key, section in (("workloads", "workloads"), ("only_when_named", "caches")):
            yield from _unknown_among(document, ("profiles", name, key), profile.get(key), section)
        yield from _repeated(document, ("profiles", name, "suites"), profile.get("suites"))
        if profile.get("suites") == []:
            yield document.mistake(("profiles", name, "suites"), "an empty list", "at least one suite")
    for name, cache in _section(document, "caches"):
        place: KeyPath = ("caches", name, "settings")
        settings = cache.get("settings", ["stock"])
        if settings == []:
            yield document.mistake(place, "an empty list", _names_under(document, "settings"))
        yield from _unknown_among(document, place, settings, "settings")
    if isinstance(document.data, dict):
        yield from _unknown_among(
            document, ("production_workloads",), document.data.get("production_workloads"), "workloads"
        )
        references = {"production": "environments"}
        if "production_profile" in document.data:
            references["production_profile"] = "profiles"
        for key, section in references.items():
            yield from _unknown(document, (key,), document.data.get(key), section)
        slurm = document.data.get("slurm")
        own = slurm.get("environments") if isinstance(slurm, dict) else None
        for name in own if isinstance(own, dict) else ():
            yield from _unknown(document, ("slurm", "environments", name), name, "environments")


def _cache_source_mistakes(document: Document, folder: Path) -> Iterator[Mistake]:
    builtin_names = (*CACHES, *(SABOTAGE_PREFIX + sabotage for sabotage in SABOTAGES))
    for name, cache in _section(document, "caches"):
        source, place = cache.get("source"), ("caches", name, "source")
        if not isinstance(source, str):
            continue
        if source == "builtin":
            if name not in builtin_names:
                accepted = f"builtin for {listed(CACHES)} only; for your own cache path/to/file.py:Class"
                nearest = nearest_name(name, builtin_names)
                yield document.mistake(place, f"builtin for {name!r}", accepted, nearest)
            continue
        if name in builtin_names:
            yield document.mistake(place, f"a source for the built-in name {name!r}", "builtin, or another name for it")
        match = re.fullmatch(r"(?P<file>.+\.py):(?P<class>[A-Za-z_]\w*)", source)
        if match is None:
            nearest = nearest_name(source, ["builtin"])
            yield document.mistake(place, describe_value(source), "builtin, or path/to/file.py:Class", nearest)
            continue
        yield from _class_mistakes(document, place, folder / match["file"], match["class"])


def _class_mistakes(document: Document, place: KeyPath, file: Path, class_name: str) -> Iterator[Mistake]:
    """Look for the class in the parsed file, which is never imported: it needs torch, and the host has none."""
    if not is_file(file):
        names = []
        with suppress(OSError):
            names = [sibling.name for sibling in file.parent.glob("*.py")]
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
        accepted = listed(classes) or "a class that it defines"
        yield document.mistake(place, f"no {class_name} in {file}", accepted, nearest_name(class_name, classes))


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _csv_mistakes(document: Document, folder: Path) -> Iterator[Mistake]:
    for name, workload in _section(document, "workloads"):
        csv = workload.get("csv")
        path = csv.get("path") if isinstance(csv, dict) else None
        if isinstance(path, str) and not is_file(folder / path):
            place = ("workloads", name, "csv", "path")
            yield document.mistake(place, f"no file {folder / path}", "a CSV file, relative to the matrix file")


def _section(document: Document, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the named entries of a top-level section; what is not a mapping is the schema's to complain about."""
    section = document.data.get(name) if isinstance(document.data, dict) else None
    entries = section.items() if isinstance(section, dict) else ()
    return [(key, entry if isinstance(entry, dict) else {}) for key, entry in entries]


def _unknown(document: Document, place: KeyPath, reference: Any, section: str) -> Iterator[Mistake]:
    names = [name for name, _ in _section(document, section)]
    if isinstance(reference, str) and reference not in names:
        accepted = _names_under(document, section)
        yield document.mistake(place, describe_value(reference), accepted, nearest_name(reference, names))


def _unknown_among(document: Document, place: KeyPath, references: Any, section: str) -> Iterator[Mistake]:
    for index, reference in enumerate(references if isinstance(references, list) else ()):
        yield from _unknown(document, (*place, index), reference, section)
    yield from _repeated(document, place, references)


def _names_under(document: Document, section: str) -> str:
    return listed(name for name, _ in _section(document, section)) or f"a name under {section}, where there is none yet"


def _repeated(document: Document, place: KeyPath, items: Any) -> Iterator[Mistake]:
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Hashable) and item in items[:index]:
            yield document.mistake((*place, index), f"{describe_value(item)} a second time", "each name once")


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except ValueError:  # of a number that is too long for Python, too
        return False
    return True
