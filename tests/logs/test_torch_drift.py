"""The table of differences between releases: made from data, and its lines are lines that the parser knows."""

from toto_compat.contract.events import EventKind
from toto_compat.contract.log_line import LogLine
from toto_compat.contract.torch_messages import parse_messages
from toto_compat.contract.torch_releases import CONFIG_NAMES
from toto_compat.logs.release_hint import limit_warning_lines
from toto_compat.logs.torch_drift import WORDINGS, drift_markdown, drifts


def test_every_wording_is_read_as_the_event_that_it_is_said_to_be() -> None:
    for wording in WORDINGS:
        lines = [
            LogLine(number=1, text=wording.line, torch_prefix=True),
            LogLine(number=2, text='  File "a.py", line 1, in f'),
        ]
        kinds = [event.kind for event in parse_messages(lines, "log")]
        assert kinds == [EventKind(wording.kind)], wording


def test_every_renamed_setting_and_every_source_line_is_on_the_page() -> None:
    page = drift_markdown()
    for names in CONFIG_NAMES.values():
        assert all(f"`{name}`" in page for _, name in names)
    lines = limit_warning_lines()
    assert (lines["2.5.1"], lines["2.9.0"], lines["2.13.0"]) == (844, 1358, 1994)
    assert all(f"| {release} | `torch/_dynamo/convert_frame.py:{line}]` |" in page for release, line in lines.items())


def test_releases_come_in_order_and_say_why_they_matter() -> None:
    found = drifts()
    releases = [tuple(map(int, one.since.split("."))) for one in found]
    assert releases == sorted(releases)
    assert all(one.matters.endswith(".") for one in found)
