"""Cell files of earlier versions, brought to the present layout when read; a later version's is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

from toto_compat.contract.request import PATCH_SIZES
from toto_compat.contract.result import RESULT_SCHEMA
from toto_compat.errors import StorageError

_PRESENT = re.compile(rb'\s*\{\s*"schema"\s*:\s*%d\s*[,}]' % RESULT_SCHEMA)


def upgraded(path: Path, content: bytes) -> bytes:
    """Bring the content into today's layout; what is no JSON object is left for the reader to complain about."""
    if _PRESENT.match(content):
        return content  # by the first bytes: no need to read megabytes twice
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            return content
        schema = document.get("schema")
        if schema == 1:
            return json.dumps(_from_2(_from_1(document))).encode()
        if schema == 2:
            return json.dumps(_from_2(document)).encode()
    except (ValueError, RecursionError):
        return content
    refuse_later(path, content, newest=RESULT_SCHEMA)
    return content


def refuse_later(path: Path, content: bytes, *, newest: int) -> None:
    """Refuse a file of ours by the version that wrote it; whatever else may be wrong with it the reader tells."""
    try:
        schema = json.loads(content)["schema"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return
    if isinstance(schema, int) and schema > newest:
        raise StorageError(
            f"{path}: written by a later version of toto-compat (layout {schema}; this one reads {newest})",
            hint="update toto-compat, or run the matrix again",
        )


def _from_1(cell: dict[str, Any]) -> dict[str, Any]:
    """Layout 1 held the verdict beside the evidence, the limits of gates in the request, and parts of the cell's name
    a second time."""
    kept = {name: value for name, value in cell.items() if name not in ("verdict", "decided_by", "gates")}
    request = kept.get("request")
    if isinstance(request, dict):
        said_twice = ("environment_name", "mode", "settings_name")
        request = {name: value for name, value in request.items() if name not in said_twice}
        profile = request.get("profile")
        if isinstance(profile, dict):
            profile = {name: value for name, value in profile.items() if name not in ("gates", "workload")}
        kept["request"] = {**request, "schema": 2, "profile": profile}
    return {**kept, "schema": 2}


def _from_2(cell: dict[str, Any]) -> dict[str, Any]:
    """Layout 2 held a workload's lengths in patches, and one kind of samples."""
    request = cell.get("request")
    if isinstance(request, dict):
        request = {**request, "schema": 3}
        if isinstance(workload := request.get("workload"), dict):
            request["workload"] = _in_points(workload)
    return {**cell, "request": request, "schema": 3}


def _in_points(workload: dict[str, Any]) -> dict[str, Any]:
    points = dict(workload)
    patch_size = PATCH_SIZES.get(str(workload.get("model", "tiny")), 1)
    for name in ("context", "horizon"):
        if isinstance(lengths := points.pop(f"{name}_patches", None), list):
            points[name] = [length * patch_size if isinstance(length, int) else length for length in lengths]
    samples, per_batch = points.pop("samples", None), points.pop("samples_per_batch", None)
    if samples is not None and per_batch is not None:
        points["sampling"] = [f"{samples}/{per_batch}"]
    return points
