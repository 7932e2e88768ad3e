"""Where issues are opened: GitHub by `gh`, GitLab by `glab`, each with the login that its runner has."""

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toto_compat.errors import EnvironmentBuildError

_MOST_ISSUES = "1000"


@dataclass(frozen=True)
class KnownIssue:
    """An issue that is there."""

    body: str
    is_open: bool
    created: str  # ISO 8601, UTC


@dataclass(frozen=True)
class Tracker:
    """How a tracker's own tool lists and opens issues."""

    known: Callable[[str], list[KnownIssue]]
    open: Callable[[str, Path, str], str]


def _github_known(label: str) -> list[KnownIssue]:
    fields = "body,state,createdAt"
    answer = _run("gh", "issue", "list", "--state", "all", "--label", label, "--limit", _MOST_ISSUES, "--json", fields)
    return [KnownIssue(one["body"] or "", one["state"] == "OPEN", one["createdAt"]) for one in _rows("gh", answer)]


def _github_open(title: str, body: Path, label: str) -> str:
    # an issue with a label that is not there is refused; --force leaves one that is there as it is named
    _run("gh", "label", "create", label, "--force", "--description", "verdicts of toto-compat that changed")
    return _run("gh", "issue", "create", "--title", title, "--body-file", str(body), "--label", label).strip()


def _gitlab_known(label: str) -> list[KnownIssue]:
    found: list[KnownIssue] = []
    for page in range(1, 11):
        answer = _run(
            "glab",
            "issue",
            "list",
            "--all",
            "--label",
            label,
            "--output",
            "json",
            "--per-page",
            "100",
            "--page",
            str(page),
        )
        rows = _rows("glab", answer)
        found += [KnownIssue(one["description"] or "", one["state"] == "opened", one["created_at"]) for one in rows]
        if len(rows) < 100:
            break
    return found


def _gitlab_open(title: str, body: Path, label: str) -> str:
    text = body.read_text(encoding="utf-8")
    return _run("glab", "issue", "create", "--yes", "--title", title, "--description", text, "--label", label).strip()


TRACKERS: Mapping[str, Tracker] = {
    "github": Tracker(_github_known, _github_open),
    "gitlab": Tracker(_gitlab_known, _gitlab_open),
}


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError as error:
        raise EnvironmentBuildError(
            f"{command[0]} is not installed here",
            hint="install it, or print the issues: toto-compat issues without --tracker",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentBuildError(f"{command[0]} did not answer within 5 minutes") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EnvironmentBuildError(
            f"{' '.join(command[:3])} failed: {said}", hint="what was opened before stays, and is not opened again"
        )
    return done.stdout


def _rows(tool: str, answer: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(answer or "[]")
    except ValueError as error:
        raise EnvironmentBuildError(f"{tool} answered with something else than JSON") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise EnvironmentBuildError(f"{tool} answered with something else than a list of issues")
    return rows
