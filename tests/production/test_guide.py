"""The guide, its alerts and its dashboard speak of what the code has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from toto_compat.production.metrics import PREFIX, ROWS
from toto_compat.production.reference import reference, with_reference

DOCS = Path(__file__).parents[2] / "docs"
ALERTS = DOCS / "monitoring" / "alerts.yaml"
NAMES = {PREFIX + row.name for row in ROWS}


def test_the_reference_is_what_the_code_says() -> None:
    guide = (DOCS / "production.md").read_text(encoding="utf-8")
    assert with_reference(guide) == guide, "python -m toto_compat.production.reference docs/production.md"
    assert "| `recompiles` | `10` |" in reference()


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}\w+", expression))


def test_every_alert_is_about_a_metric_that_there_is_and_says_what_to_do() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        assert metrics_in(rule["expr"]) and metrics_in(rule["expr"]) <= NAMES, rule
        assert rule["annotations"]["action"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_prometheus_takes_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True)


def test_every_panel_is_about_a_metric_that_there_is() -> None:
    dashboard = json.loads((DOCS / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    shown = {name for panel in dashboard["panels"] for one in panel["targets"] for name in metrics_in(one["expr"])}
    assert shown and shown <= NAMES
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
