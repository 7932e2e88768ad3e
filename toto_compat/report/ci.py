"""What CI systems show: JUnit XML, a GitHub step summary, a shields-style badge."""

import re
import xml.etree.ElementTree as ET
from typing import Any

from toto_compat.contract.request import Device
from toto_compat.report.table import markdown_table, plain_markdown
from toto_compat.verdict.decision import Answer
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status
from toto_compat.verdict.judged_run import JudgedRun

# XML 1.0 has no way to write these, and torch colours its errors with one of them
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SUMMARY_BYTES = 1_000_000  # GitHub drops a step summary above 1 MiB whole
_BADGE = {
    Answer.ENABLE: ("can be enabled", "brightgreen"),
    Answer.ENABLE_WITH_SETTINGS: ("can be enabled with settings", "green"),
    Answer.WORTH_A_PRODUCTION_CHECK: ("worth a production check", "blue"),
    Answer.KEEP_OFF: ("keep off", "red"),
    Answer.NOT_ENOUGH_EVIDENCE: ("not enough evidence", "lightgrey"),
}


def junit_xml(judged: JudgedRun) -> str:
    """Write one test suite per cell, one test per gate. What was not measured is skipped with its reason."""
    root = ET.Element("testsuites", name=_xml(judged.run.info.name))
    totals = {"tests": 0, "failures": 0, "skipped": 0, "errors": 0}
    for cell in judged.cells:
        suite = _junit_suite(cell, judged.run.info.started)
        root.append(suite)
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    for name, total in totals.items():
        root.set(name, str(total))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def step_summary(judged: JudgedRun) -> str:
    """Write Markdown for $GITHUB_STEP_SUMMARY: answer, then table, cut where GitHub would drop all of it."""
    counts = ", ".join(
        f"{sum(cell.verdict is status for cell in judged.cells)} {status.value}"
        for status in (Status.PASS, Status.FAIL, Status.INCONCLUSIVE)
    )
    answer = "\n".join(f"- {plain_markdown(device.sentence)}" for device in judged.decision.devices.values())
    head = f"## torch.compile for Toto: {plain_markdown(judged.run.info.name)}\n\n{answer}\n\n{counts}\n\n"
    table, _, _ = markdown_table(judged).rpartition("\n\n")
    lines, left = [], _SUMMARY_BYTES - len(head.encode())
    for line in table.splitlines():
        left -= len(line.encode()) + 1
        if left < 0:
            lines.append("\nThe rest of the table is in compatibility.md of the run.")
            break
        lines.append(line)
    return head + "\n".join(lines) + "\n"


def badge(judged: JudgedRun) -> dict[str, Any]:
    """Write the endpoint format of shields.io. CUDA speaks where it was tried: that is where production runs."""
    devices = judged.decision.devices
    tried = [device for device in (Device.CUDA, Device.CPU) if device in devices and devices[device].contenders]
    device = tried[0] if tried else Device.CUDA
    message, colour = _BADGE[devices[device].answer]
    if judged.decision.stale:
        message, colour = f"stale: {message}", "lightgrey"
    return {"schemaVersion": 1, "label": f"torch.compile on {device.value}", "message": message, "color": colour}


def _junit_suite(cell: JudgedCell, started: str) -> ET.Element:
    cases = [_junit_case(cell, gate) for gate in cell.gates.values()]
    if cell.result.failure:
        failed = ET.Element("testcase", classname=_xml(cell.result.cell), name="the cell ran", time="0")
        ET.SubElement(failed, "error", type=cell.result.failure.kind, message=_xml(cell.reason)).text = _xml(
            "\n".join([cell.result.failure.message, *cell.result.failure.last_lines])
        )
        cases.append(failed)
    suite = ET.Element("testsuite", name=_xml(cell.result.cell), timestamp=_xml(started.removesuffix("Z")))
    for attribute, tag in (("failures", "failure"), ("skipped", "skipped"), ("errors", "error")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{sum(evidence.seconds for evidence in cell.result.evidence.values()):.3f}")
    properties = ET.SubElement(suite, "properties")
    for name, value in (("verdict", cell.verdict.value), ("device", cell.result.request.speaks_of.value)):
        ET.SubElement(properties, "property", name=name, value=value)
    suite.extend(cases)
    return suite


def _junit_case(cell: JudgedCell, judged: JudgedGate) -> ET.Element:
    case = ET.Element("testcase", classname=_xml(cell.result.cell), name=judged.gate.value, time="0")
    told = _xml(judged.reason)
    match judged.status:
        case Status.FAIL:
            ET.SubElement(case, "failure", type="FAIL", message=told).text = told
        case Status.INCONCLUSIVE:
            again = f"; get it with: {judged.next_command}" if judged.next_command else ""
            ET.SubElement(case, "skipped", message=_xml(f"INCONCLUSIVE: {judged.reason}{again}"))
        case Status.NOT_APPLICABLE:
            ET.SubElement(case, "skipped", message=f"NOT_APPLICABLE: {told}")
        case Status.PASS:
            ET.SubElement(case, "system-out").text = told
    return case


def _xml(text: str) -> str:
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
