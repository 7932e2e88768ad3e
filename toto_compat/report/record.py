"""The decision record: what to do with compile, on what evidence, since when, and when to look again. Markdown."""

from toto_compat.contract.result import Figure
from toto_compat.matrix.gates import Gate
from toto_compat.report.table import escaped_markdown, plain_markdown
from toto_compat.verdict.conditions import conditions
from toto_compat.verdict.decision import Answer, DeviceDecision
from toto_compat.verdict.gain import gain_text
from toto_compat.verdict.judge import JudgedCell, Status
from toto_compat.verdict.judged_run import JudgedRun
from toto_compat.verdict.verdict_rows import settings_to_copy

ANSWERS = {
    Answer.ENABLE: "Enable compile",
    Answer.ENABLE_WITH_SETTINGS: "Enable compile with these settings",
    Answer.WORTH_A_PRODUCTION_CHECK: "Worth a production check",
    Answer.KEEP_OFF: "Keep compile off",
    Answer.NOT_ENOUGH_EVIDENCE: "Not enough evidence",
}


def decision_record(judged: JudgedRun) -> str:
    """Write the record of one run, dated by the run and not by the day it is printed."""
    info = judged.run.info
    date = (info.finished or info.started)[:10]
    lines = [
        "# Decision record: torch.compile for Toto",
        "",
        f"Date: {date}. Run: `{info.name}`, profile {info.profile}, {plain_markdown(info.runtime)} runtime, "
        f"{len(judged.cells)} cells"
        + (
            f", revision `{info.git_revision[:12]}`{' with local changes' if info.git_dirty else ''}"
            if info.git_revision
            else ""
        )
        + ".",
        "",
        plain_markdown(judged.decision.sentence),
    ]
    for device, decided in judged.decision.devices.items():
        lines += ["", f"## {device.value.upper()}: {ANSWERS[decided.answer]}", "", *_device_lines(decided)]
    lines += ["", "## Limits it was judged by", "", "| gate | limit |", "|---|---|"]
    lines += [f"| {gate.value} | {judged.gates[gate].text} |" for gate in Gate if gate in judged.gates]
    lines += ["", "## When to look again", "", *_look_again(judged)]
    return "\n".join(lines) + "\n"


def forecasts_text(figure: Figure | None) -> str:
    """Say a break-even as people do: '1,234 forecasts', or why there is none."""
    if figure is None:
        return "not measured"
    if figure.value is None:
        return figure.missing or "not measured"
    return f"{figure.value:,.0f} forecasts"


def _device_lines(decided: DeviceDecision) -> list[str]:
    lines = [f"- Why: {plain_markdown(decided.reason)}."]
    if decided.decided_by:
        lines.append(f"- Decided by: `{decided.decided_by.value}`.")
    if decided.contender:
        lines.append(f"- Cache and mode: `{decided.contender.name}`, {decided.contender.history.text}.")
        lines.append(f"- Measured in: {', '.join(decided.environments)}.")
    if decided.answer in (Answer.ENABLE, Answer.ENABLE_WITH_SETTINGS):
        lines.append(
            f"- Compile time is paid back after {forecasts_text(decided.break_even_cold)} from a cold start, "
            f"{forecasts_text(decided.break_even_warm)} from a warm one."
        )
    lines += _checklist(decided)
    lines += ["", "Set in production:", "", "```", *settings_to_copy(decided), "```"]
    if decided.contenders:
        lines += [
            "",
            "| cache / mode | over the releases | newest row | decided by | what it rests on |",
            "|---|---|---|---|---|",
        ]
        lines += [
            _contender_line(contender.name, contender.history.text, contender.cells[-1])
            for contender in decided.contenders
        ]
    if decided.next_commands:
        lines += ["", "Run next:", "", "```", *decided.next_commands, "```"]
    return lines


def _contender_line(name: str, history: str, newest: JudgedCell) -> str:
    deciding = newest.deciding
    evidence = deciding.reason if deciding else _passed_on(newest)
    gate = deciding.gate.value if deciding else "all gates"
    return f"| {name} | {history} | {newest.verdict.value} | {gate} | {escaped_markdown(evidence)} |"


def _passed_on(cell: JudgedCell) -> str:
    gain = f", {text}" if (text := gain_text([cell])) else ""
    return f"{sum(judged.status is Status.PASS for judged in cell.gates.values())} gates measured and passed{gain}"


def _checklist(decided: DeviceDecision) -> list[str]:
    marks = {True: "[x]", False: "[ ]", None: "[ ]"}
    lines = ["", "Conditions under which compile was switched off:", ""]
    for condition in conditions(decided):
        not_met = "" if condition.met else "not met: " if condition.met is False else "not known: "
        lines.append(f"- {marks[condition.met]} {condition.text} ({not_met}{plain_markdown(condition.evidence)})")
    return lines


def _look_again(judged: JudgedRun) -> list[str]:
    lines = [
        f"- At the latest on {judged.decision.review_by}; after that day this record is shown as stale.",
        "- With every new PyTorch or toto-ts release: `toto-compat releases --check`.",
        "- When the model, the GPU, the driver or the pins of production change.",
        "- When production logs show compiler events again: `toto-compat analyze LOG`.",
    ]
    if any(decided.answer is Answer.NOT_ENOUGH_EVIDENCE for decided in judged.decision.devices.values()):
        lines.insert(0, "- As soon as the missing evidence above can be measured.")
    return lines
