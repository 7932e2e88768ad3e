"""An incident that is being filled in from a log, and the file for people that it becomes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toto_compat.errors import InputError
from toto_compat.repro.incident import load_incident
from toto_compat.repro.new_file import new_file
from toto_compat.repro.redaction.text import redact, redact_data
from toto_compat.repro.seen import Seen
from toto_compat.verdict.judge import one_line


@dataclass
class Draft:
    """An incident as it is being filled in: the file's keys, a remark above each, and what nobody told."""

    keys: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # for the terminal

    def put(self, key: str, value: Any, *remarks: str) -> None:
        self.keys[key] = value
        self.remarks.setdefault(key, []).extend(remarks)

    def remark(self, key: str, *remarks: str) -> None:
        self.remarks.setdefault(key, []).extend(remarks)


def as_yaml(draft: Draft, seen: Seen) -> str:
    """Write the draft as a file for people: every guess and gap as a comment above its key.

    Values lose their secrets before they become YAML: taken out of the text they could take a quote with them.
    """
    lines = [
        f"# Written by `toto-compat repro --from-log` from {_remark(Path(seen.log).name)}. Read it before trusting it:",
        "# what stands under `unknown` was not in what was given, and is a default here.",
        *(f"# unknown: {_remark(one)}" for one in draft.unknown),
    ]
    for key, value in redact_data(draft.keys).items():
        lines += [f"# {_remark(remark)}" for remark in draft.remarks.get(key, ())]
        lines.append(_dumped({key: value}))
    return "\n".join(lines) + "\n"


def _dumped(value: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)
    return text.rstrip("\n")


def _remark(text: str) -> str:
    return one_line(redact(text))


def write_incident(text: str, target: Path) -> None:
    """Write the file, which must not exist, whole or not at all; what is written can be loaded."""
    with new_file(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
        try:
            load_incident(temporary)
        except InputError as error:
            told = error.message.replace(str(temporary), str(target))
            raise InputError(
                f"nothing was written, since it could not be read again: {told}", hint=error.hint
            ) from error
