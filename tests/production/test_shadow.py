"""The daily MAE outlives a restart, and a rise is told from chance."""

import random
from pathlib import Path

import pytest

from toto_compat.production.shadow import ShadowHistory, rises


def test_a_rise_over_days_is_seen_and_noise_is_not() -> None:
    assert rises([0.01, 0.012, 0.02, 0.03, 0.05, 0.08])
    assert not rises([0.01, 0.02, 0.04])  # three days are no trend
    assert not rises([0.010, 0.011, 0.012, 0.013, 0.014])  # up, but by less than half
    assert not rises([0.08, 0.05, 0.03, 0.02, 0.01])
    assert not rises([0.01] * 30)
    generator = random.Random(5)  # noqa: S311 - noise, no secret
    alarms = sum(rises([generator.random() for _ in range(14)]) for _ in range(2000))
    assert alarms <= 20


def test_days_are_kept_in_a_file_and_only_the_newest(tmp_path: Path) -> None:
    file = tmp_path / "shadow.json"
    history = ShadowHistory(file)
    for day in range(100):
        history.add(f"2026-{day // 28 + 1:02}-{day % 28 + 1:02}", day / 100)
    again = ShadowHistory(file)
    assert again.days == history.days
    assert len(again.days) == 90
    assert again.rises


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"days": 3}', '{"days": {"x": []}}', '{"days": {"x": ["a", 1, 2]}}']
)
def test_a_damaged_file_begins_anew(tmp_path: Path, content: str) -> None:
    file = tmp_path / "shadow.json"
    file.write_text(content, encoding="utf-8")
    history = ShadowHistory(file)
    assert history.days == {}
    history.add("2026-11-17", 0.5)
    assert ShadowHistory(file).days["2026-11-17"].mean == 0.5
