"""What the schema alone cannot say about an incident: what fits together, and the files and names that it mentions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toto_compat.contract.caches import SABOTAGE_PREFIX, SABOTAGES
from toto_compat.contract.failure_messages import FAILURE_KINDS
from toto_compat.contract.suites import Suite
from toto_compat.matrix.document import Document, Mistake, describe_value, listed, nearest_name
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.toto_source import ACCEPTED as TOTO_ACCEPTED
from toto_compat.matrix.toto_source import absolute, toto_source
from toto_compat.repro.pins import Pins, is_version, pins_problems, read_freeze
from toto_compat.repro.variables import why_refused


def incident_mistakes(document: Document, folder: Path) -> list[Mistake]:
    """Work on the plain data, so that it runs beside schema mistakes. Paths are relative to the incident's folder."""
    if not isinstance(document.data, dict):
        return []
    return [
        *_stack_mistakes(document, folder),
        *_expectation_mistakes(document),
        *_raised_mistakes(document),
        *_variable_mistakes(document),
    ]


def name_mistakes(document: Document, matrix: Matrix) -> Iterator[Mistake]:
    """Find names in the incident that this matrix does not have."""
    sabotaged = [f"{SABOTAGE_PREFIX}{name}" for name in SABOTAGES]
    known = {"environment": (list(matrix.environments), []), "cache": (list(matrix.caches), sabotaged)}
    for key, (names, others) in known.items():
        name = document.data.get(key) if isinstance(document.data, dict) else None
        if isinstance(name, str) and name and name not in (*names, *others):
            nearest = nearest_name(name, [*names, *others])
            yield document.mistake((key,), f"{describe_value(name)}, which matrix.yaml has not", listed(names), nearest)


def _stack_mistakes(document: Document, folder: Path) -> Iterator[Mistake]:
    data = document.data
    named, pinned = data.get("environment"), data.get("pins")
    if not named and pinned is None:
        accepted = "name of the environment in matrix.yaml that production ran, or pins of its own"
        yield document.mistake(("environment",), "nothing", accepted)
    if named and pinned is not None:
        yield document.mistake(("pins",), f"pins beside environment {describe_value(named)}", "one of the two")
    if not isinstance(pinned, dict):
        return
    try:
        pins = Pins.model_validate(pinned)
    except ValidationError:
        return  # the schema's to complain about
    if pins.toto_ts is not None:
        try:
            toto_source(absolute(pins.toto_ts, folder))
        except ValueError as error:
            found = f"{describe_value(pins.toto_ts)}: {error}"
            yield document.mistake(("pins", "toto_ts"), found, TOTO_ACCEPTED)
    if pins.xformers is not None and not is_version(pins.xformers):
        yield document.mistake(("pins", "xformers"), describe_value(pins.xformers), "one exact version, such as 0.0.33")
    try:
        if pins.freeze is not None and not (folder / pins.freeze).is_file():
            found = f"no file {pins.freeze!r}"
            yield document.mistake(("pins", "freeze"), found, "a file, relative to the incident's own")
            return
        frozen = read_freeze(pins, folder)
    except (OSError, UnicodeDecodeError) as error:
        yield document.mistake(("pins", "freeze"), f"a file that cannot be read: {error}", "text in UTF-8")
        return
    for problem in pins_problems(pins, frozen):
        yield document.mistake(("pins", *problem.key), problem.found, problem.accepted)


def _expectation_mistakes(document: Document) -> Iterator[Mistake]:
    data = document.data
    kinds = ("expect", "gates", "raised")
    if not any(data.get(key) for key in kinds):
        empty = next((key for key in kinds if data.get(key) == []), None)
        if empty is not None:
            yield document.mistake((empty,), "an empty list", "at least 1 of them, or of another kind")
        else:
            accepted = "events that it showed, or gates that it broke under gates, or an error under raised"
            yield document.mistake(("expect",), "nothing", accepted)
    for index, event in _listed(data.get("expect")):
        at_least, at_most = event.get("at_least", 1), event.get("at_most")
        if isinstance(at_least, int) and isinstance(at_most, int) and at_most < at_least:
            accepted = f"at least as many as at_least, which is {at_least}"
            yield document.mistake(("expect", index, "at_most"), describe_value(at_most), accepted)
        if at_least == 0 and at_most is None:
            yield document.mistake(("expect", index, "at_least"), "0 without at_most", "1 or more: 0 expects nothing")
        if event.get("kind") in list(FAILURE_KINDS) and event.get("needs") == "cuda" and event.get("predicted_by"):
            yield document.mistake(("expect", index, "predicted_by"), "a prediction", "none: nobody predicts a failure")
        yield from _prediction_mistakes(document, ("expect", index), event, "cudagraph" in str(event.get("kind")))
    for index, gate in _listed(data.get("gates")):
        name = gate.get("gate")
        known = next((one for one in Gate if one.value == name), None)
        if known is not None and known.rule.suite.rule.needs_symbols:
            others = [one.value for one in Gate if not one.rule.suite.rule.needs_symbols]
            nearest = nearest_name(str(name).removeprefix("symbol_"), others)
            yield document.mistake(
                ("gates", index, "gate"), f"{name!r}, which is about series named with --data", listed(others), nearest
            )
        if known is not None and known.rule.default is None and gate.get("limit") is None:
            accepted = "a limit, such as {max: 0.05}: this gate is off without one"
            yield document.mistake(("gates", index, "limit"), "nothing", accepted)
        yield from _prediction_mistakes(document, ("gates", index), gate, name == Gate.CUDAGRAPHS.value)


def _raised_mistakes(document: Document) -> Iterator[Mistake]:
    for index, error in _listed(document.data.get("raised")):
        if error.get("suite") in [suite.value for suite in Suite if suite.rule.needs_symbols]:
            found = f"{error['suite']!r}, which is about series named with --data"
            yield document.mistake(("raised", index, "suite"), found, "another suite")
        if error.get("predicted_by"):
            yield document.mistake(("raised", index, "predicted_by"), "a prediction", "none: nobody predicts an error")


def _prediction_mistakes(
    document: Document, place: tuple[str | int, ...], one: dict[str, Any], about_cuda_graphs: bool
) -> Iterator[Mistake]:
    if one.get("predicted_by") and not about_cuda_graphs:
        accepted = "it for what CUDA graphs do: events cudagraph_skip and cudagraph_partition, gate cudagraphs"
        yield document.mistake((*place, "predicted_by"), "a prediction", accepted)


def _variable_mistakes(document: Document) -> Iterator[Mistake]:
    variables = document.data.get("variables")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if why := why_refused(str(name), str(value)):
            yield document.mistake(("variables", name), f"the variable {name}", f"others: {why}")


def _listed(items: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the mappings of a list with their places; what is none is the schema's to complain about."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield index, item
