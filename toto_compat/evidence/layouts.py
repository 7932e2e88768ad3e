"""Cell files of earlier versions, brought to the present layout when read; a later version's is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

from toto_compat.contract.result import RESULT_SCHEMA
from toto_compat.errors import StorageError

_PRESENT = re.compile(rb'\s*\{\s*"schema"\s*:\s*%d\s*[,}]' % RESULT_SCHEMA)


def upgraded(path: Path, content: bytes) -> bytes:
    """The content in today's layout; what is no JSON object is left for the reader to complain about."""
    if _PRESENT.match(content):
        return content  # by the first bytes: no need to read megabytes twice
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(document, dict):
        return content
    schema = document.get("schema")
    if schema == 1:
        return json.dumps(_from_1(document)).encode()
    if isinstance(schema, int) and schema > RESULT_SCHEMA:
        raise StorageError(
            f"{path}: written by a later version of toto-compat (layout {schema}; this one reads {RESULT_SCHEMA})",
            hint="update toto-compat, or run the matrix again",
        )
    return content


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
