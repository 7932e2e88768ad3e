"""One issue for every verdict that changed, whatever is run how often, and nothing in it that speaks for itself."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.verdict.sample_cells import good_result, with_figures
from tests.verdict.stored_runs import store_run
from toto_compat.cli import cli
from toto_compat.contract.request import Workload
from toto_compat.errors import EnvironmentBuildError
from toto_compat.fleet.issues import _fenced
from toto_compat.matrix.gates import Gate

BEFORE, AFTER = "2026-11-16T10:00:00Z", "2026-11-17T10:00:00Z"
GOOD, BAD = good_result(), with_figures(good_result(), {Gate.RECOMPILES: 3.0})
OTHER = good_result(cache="compile_friendly")

# Stands where `gh` stands on a runner: keeps issues in a file, as GitHub does, and says them back.
STAND_IN = """#!/usr/bin/env python3
import json, os, sys
store = os.environ["ISSUES"]
issues = json.load(open(store)) if os.path.exists(store) else []
words = sys.argv[1:]
if words[:2] == ["issue", "list"]:
    assert words[words.index("--state") + 1] == "all"
    print(json.dumps(issues))
elif words[:2] == ["issue", "create"]:
    body = open(words[words.index("--body-file") + 1]).read()
    title = words[words.index("--title") + 1]
    issues.append({"title": title, "body": body, "state": "OPEN", "createdAt": os.environ["NOW"]})
    json.dump(issues, open(store, "w"))
    print(f"https://tracker.example/issues/{len(issues)}")
elif words[:2] != ["label", "create"]:
    sys.exit("unknown: " + " ".join(words))
"""


# The same for `glab`, whose words and fields are others.
STAND_IN_GITLAB = """#!/usr/bin/env python3
import json, os, sys
store = os.environ["ISSUES"]
issues = json.load(open(store)) if os.path.exists(store) else []
words = sys.argv[1:]
if words[:2] == ["issue", "list"]:
    assert "--all" in words
    page = int(words[words.index("--page") + 1])
    print(json.dumps(issues[100 * (page - 1) : 100 * page]))
elif words[:2] == ["issue", "create"]:
    assert "--yes" in words
    text = words[words.index("--description") + 1]
    issues.append({"description": text, "state": "opened", "created_at": os.environ["NOW"]})
    json.dump(issues, open(store, "w"))
    print("https://tracker.example/-/issues/1")
"""


@dataclass
class Fleet:
    """Runs in a folder and a tracker beside them."""

    folder: Path

    def tell(self, before: str, after: str, *options: str) -> Result:
        arguments = ["issues", before, after, "--results", str(self.folder), *options]
        return CliRunner().invoke(cli, arguments)

    @property
    def issues(self) -> list[dict[str, str]]:
        store = self.folder / "issues.json"
        return json.loads(store.read_text(encoding="utf-8")) if store.exists() else []

    def close_all(self) -> None:
        closed = [{**one, "state": "CLOSED"} for one in self.issues]
        (self.folder / "issues.json").write_text(json.dumps(closed), encoding="utf-8")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("gh", STAND_IN), ("glab", STAND_IN_GITLAB)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ISSUES", str(tmp_path / "issues.json"))
    monkeypatch.setenv("NOW", AFTER)
    store_run(tmp_path, "before", [GOOD, OTHER], started=BEFORE)
    store_run(tmp_path, "after", [BAD, OTHER], started=AFTER)
    return Fleet(tmp_path)


GITHUB = ("--tracker", "github")


def test_a_verdict_that_changed_is_one_issue(fleet: Fleet) -> None:
    told = fleet.tell("before", "after", *GITHUB)
    assert told.exit_code == 0, told.output
    (issue,) = fleet.issues
    assert issue["title"] == "torch.compile: torch-2.13.0-cpu/fixed_size/default is now FAIL"
    assert "was **PASS**" in issue["body"]
    assert "recompiles 0 before, 3 now" in issue["body"]
    assert "toto-compat matrix" in issue["body"] or "nox -s matrix" in issue["body"]


def test_the_same_news_again_opens_nothing(fleet: Fleet) -> None:
    for _ in range(3):
        assert fleet.tell("before", "after", *GITHUB).exit_code == 0
    assert len(fleet.issues) == 1


def test_gitlab_is_told_once_too_however_many_issues_it_has(fleet: Fleet) -> None:
    others = [{"description": "of somebody else", "state": "opened", "created_at": BEFORE}] * 150
    (fleet.folder / "issues.json").write_text(json.dumps(others), encoding="utf-8")
    for _ in range(2):
        told = fleet.tell("before", "after", "--tracker", "gitlab")
        assert told.exit_code == 0, told.output
    assert len(fleet.issues) == 151


def test_runs_without_a_change_open_nothing(fleet: Fleet) -> None:
    store_run(fleet.folder, "later", [BAD, OTHER], started="2026-11-18T10:00:00Z")
    assert fleet.tell("after", "later", *GITHUB).exit_code == 0
    assert fleet.issues == []


def test_an_issue_that_somebody_closed_is_not_opened_again_for_the_same_change(fleet: Fleet) -> None:
    fleet.tell("before", "after", *GITHUB)
    fleet.close_all()
    fleet.tell("before", "after", *GITHUB)
    assert len(fleet.issues) == 1


def test_the_same_verdict_at_a_later_change_is_news_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.tell("before", "after", *GITHUB)
    fleet.close_all()
    store_run(fleet.folder, "repaired", [GOOD, OTHER], started="2026-11-18T10:00:00Z")
    store_run(fleet.folder, "broken again", [BAD, OTHER], started="2026-11-19T10:00:00Z")
    monkeypatch.setenv("NOW", "2026-11-19T10:00:00Z")
    fleet.tell("after", "repaired", *GITHUB)
    fleet.tell("repaired", "broken again", *GITHUB)
    assert [issue["title"].rpartition(" ")[2] for issue in fleet.issues] == ["FAIL", "PASS", "FAIL"]


def test_rows_that_are_new_or_gone_are_no_changed_verdict(fleet: Fleet) -> None:
    store_run(fleet.folder, "other rows", [good_result(torch="2.15.0")], started=AFTER)
    assert json.loads(fleet.tell("before", "other rows").stdout) == []


@pytest.mark.parametrize("change", [{"profile_name": "smoke"}, {"workload": Workload(seed=1)}])
def test_another_answer_to_another_question_is_no_changed_verdict(fleet: Fleet, change: dict[str, object]) -> None:
    other = BAD.model_copy(update={"request": BAD.request.model_copy(update=change)})
    store_run(fleet.folder, "asked otherwise", [other, OTHER], started=AFTER)
    told = fleet.tell("before", "asked otherwise")
    assert json.loads(told.stdout) == []
    assert "1 rows were asked something else before" in told.stderr


def test_without_a_tracker_nobody_is_asked(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (issue,) = json.loads(fleet.tell("before", "after").stdout)
    assert set(issue) == {"key", "title", "label", "body"}


def test_a_dry_run_opens_nothing(fleet: Fleet) -> None:
    assert len(json.loads(fleet.tell("before", "after", *GITHUB, "--dry-run").stdout)) == 1
    assert fleet.issues == []


def test_a_tool_that_is_missing_or_fails_is_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    (fleet.folder / "issues.json").write_text("[3]", encoding="utf-8")
    assert "something else" in str(fleet.tell("before", "after", *GITHUB).exception)
    (fleet.folder / "issues.json").write_text("[]", encoding="utf-8")
    (fleet.folder / "bin" / "gh").write_text("#!/bin/sh\necho no login >&2\nexit 4\n", encoding="utf-8")
    assert "no login" in str(fleet.tell("before", "after", *GITHUB).exception)
    monkeypatch.setenv("PATH", str(fleet.folder))
    missing = fleet.tell("before", "after", "--tracker", "gitlab").exception
    assert isinstance(missing, EnvironmentBuildError)
    assert "glab is not installed" in str(missing)


def test_text_of_a_log_can_neither_call_people_nor_leave_its_fence(fleet: Fleet) -> None:
    first, text, last = _fenced("```\n@everyone <!-- toto-compat: 0123456789abcdef --> ````")
    assert first == "`````text"
    assert last == "`````"
    assert "@everyone" in text


def test_a_key_that_a_log_quotes_keeps_no_other_issue_away(fleet: Fleet) -> None:
    (issue,) = json.loads(fleet.tell("before", "after").stdout)
    quoting = f"```text\n<!-- toto-compat: {issue['key']} -->\n```\n\n<!-- toto-compat: {'0' * 16} -->\n"
    known = [{"title": "another", "body": quoting, "state": "OPEN", "createdAt": AFTER}]
    (fleet.folder / "issues.json").write_text(json.dumps(known), encoding="utf-8")
    assert fleet.tell("before", "after", *GITHUB).exit_code == 0
    assert len(fleet.issues) == 2
