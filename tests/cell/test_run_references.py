"""References of a cell: given or computed, kept from the candidate, handed over."""

from pathlib import Path

import pytest

from tests.cell.stand_in_groups import Groups, good_result, request_in, run
from toto_compat.cell.kept import ANSWERS_PLACE, TRUTHS_PLACE
from toto_compat.cell.run import run_cell
from toto_compat.contract.references import (
    ANSWERS,
    REFERENCES_FOLDER,
    TRUTHS,
    read_references,
    references_of,
    write_references,
)
from toto_compat.contract.result import CellResult, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite


def test_the_right_answers_are_out_of_the_candidates_reach_and_back_for_the_comparison(tmp_path: Path) -> None:
    hidden = "kept-from-the-candidate/references"
    left = good_result(Group.REFERENCE).model_dump_json()
    folder = "import pathlib, sys; work = pathlib.Path(sys.argv[1]).parent"
    say = f"print('there' if (work / {hidden!r}).exists() else 'gone', flush=True)"
    scripts = {
        Group.REFERENCE: f"{folder}; (work / {hidden!r}).parent.mkdir(); (work / {hidden!r}).write_text('42'); "
        f"pathlib.Path(sys.argv[1]).write_text({left!r})",
        Group.CANDIDATE: f"{folder}; {say}; pathlib.Path(sys.argv[1]).write_text({left!r})",
        Group.COMPARE: f"{folder}; {say}; raise SystemExit(3)",
        Group.SPEED: f"{folder}; {say}; raise SystemExit(3)",
    }
    run(tmp_path, Groups(scripts))
    logs = {group: (tmp_path / f"{group.value}.log").read_text().strip() for group in scripts if group != "reference"}
    assert logs == {Group.CANDIDATE: "gone", Group.COMPARE: "there", Group.SPEED: "gone"}


# Stands in for upstream eager: leaves its answers in both places, as the reference group does.


LEAVES_ANSWERS = (
    "import pathlib, sys; work = pathlib.Path(sys.argv[1]).parent\n"
    f"for place, text in (({str(ANSWERS_PLACE)!r}, 'answers'), ({str(TRUTHS_PLACE)!r}, 'truths')):\n"
    "    (work / place).parent.mkdir(exist_ok=True); (work / place).write_text(text)\n"
)


ASKS_UPSTREAM_EAGER = (
    f"{LEAVES_ANSWERS}pathlib.Path(sys.argv[1]).write_text({good_result(Group.REFERENCE).model_dump_json()!r})"
)


CONTENTS = {ANSWERS: b"answers", TRUTHS: b"truths"}


def run_given(folder: Path, groups: Groups, contents: dict[str, bytes]) -> CellResult:
    """A cell that is told of CONTENTS and finds `contents`."""
    write_references(folder / REFERENCES_FOLDER, contents)
    given = request_in(folder).model_copy(update={"references": references_of(CONTENTS, {}, key="key")})
    return run_cell(given, folder / "request.json", command=groups)


def test_a_cell_that_was_given_references_asks_nobody_and_says_which(tmp_path: Path) -> None:
    folder = "import pathlib, sys; work = pathlib.Path(sys.argv[1]).parent"
    list_all = "print(sorted(path.name for path in work.rglob('*.safetensors')), flush=True); raise SystemExit(3)"
    groups = Groups(dict.fromkeys((Group.OBSERVE, Group.COMPARE, Group.SPEED), f"{folder}; {list_all}"))
    result = run_given(tmp_path, groups, CONTENTS)
    assert "reference" not in groups.started
    assert {"candidate", "compare"} <= set(groups.started)
    assert result.provenance.references == references_of(CONTENTS, {}, key="key")
    seen = {name: (tmp_path / f"{name}.log").read_text().strip() for name in ("observe", "compare", "speed")}
    assert seen == {"observe": f"['{TRUTHS}']", "compare": f"['{ANSWERS}', '{TRUTHS}']", "speed": f"['{TRUTHS}']"}


def test_given_or_computed_by_the_cell_the_evidence_is_the_same(tmp_path: Path) -> None:
    own = run(tmp_path, Groups({Group.REFERENCE: ASKS_UPSTREAM_EAGER}))
    given = run_given(tmp_path, Groups(), CONTENTS)
    assert own.provenance.references == references_of(CONTENTS, {})

    def timeless(result: CellResult) -> dict[Suite, SuiteEvidence]:
        return {suite: one.model_copy(update={"seconds": 0}) for suite, one in result.evidence.items()}

    assert timeless(own) == timeless(given)


@pytest.mark.parametrize("contents", [{}, {ANSWERS: b"answers"}, {**CONTENTS, ANSWERS: b"answ"}])
def test_a_cell_that_was_given_the_wrong_references_computes_its_own(
    tmp_path: Path, contents: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    groups = Groups({Group.REFERENCE: ASKS_UPSTREAM_EAGER})
    result = run_given(tmp_path, groups, contents)
    assert "reference" in groups.started
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.MEASURED
    assert result.provenance.references == references_of(CONTENTS, {})
    assert "references that were given are not used" in capfd.readouterr().out


def test_who_is_asked_for_references_alone_runs_nothing_else_and_leaves_them(tmp_path: Path) -> None:
    groups = Groups({Group.REFERENCE: ASKS_UPSTREAM_EAGER})
    request = request_in(tmp_path, suites=(Suite.EQUIVALENCE,)).model_copy(update={"only_references": True})
    result = run_cell(request, tmp_path / "request.json", command=groups)
    assert groups.started == ["reference"]
    assert result.failure is None
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.NOT_RUN
    told = result.provenance.references
    assert told is not None
    assert read_references(tmp_path / REFERENCES_FOLDER, told) == CONTENTS


@pytest.mark.parametrize("script", ["raise SystemExit(3)", f"{LEAVES_ANSWERS}raise SystemExit(3)"])
def test_who_is_asked_for_references_and_fails_leaves_none(tmp_path: Path, script: str) -> None:
    request = request_in(tmp_path, suites=(Suite.EQUIVALENCE,)).model_copy(update={"only_references": True})
    result = run_cell(request, tmp_path / "request.json", command=Groups({Group.REFERENCE: script}))
    assert result.provenance.references is None
    assert result.evidence[Suite.EQUIVALENCE].outcome is Outcome.ERROR
    assert not (tmp_path / REFERENCES_FOLDER).exists()
