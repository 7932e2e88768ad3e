"""Where torch logs from, per release."""

import pytest

from toto_compat.environments.torch_sources.log_lines import load_log_lines, log_lines_of

CONVERT_FRAME = "torch/_dynamo/convert_frame.py"


@pytest.mark.parametrize(("line", "release"), [(844, "2.5.1"), (964, "2.7.0"), (1358, "2.9.0"), (1994, "2.13.0")])
def test_the_limit_warning_stands_where_it_was_measured(line: int, release: str) -> None:
    said = load_log_lines().statements(CONVERT_FRAME, line)
    assert any("hit config" in statement.says and release in statement.releases for statement in said)


def test_the_limit_warning_has_one_place_in_every_release() -> None:
    table = load_log_lines()
    lines: dict[str, list[int]] = {release: [] for release in table.releases}
    for (file, line), statements in table.places.items():
        for statement in statements:
            if file == CONVERT_FRAME and "hit config" in statement.says:
                for release in statement.releases:
                    lines[release].append(line)
    assert {release: len(found) for release, found in lines.items()} == dict.fromkeys(table.releases, 1)


def test_a_statement_is_known_by_its_words_or_its_source_and_placed_where_python_reports_it() -> None:
    source = b"""
log.warning(
    "torch._dynamo hit config.%s (%s)\\n"
    "  more", a, b)
recompiles_log.debug(message)
(
    graph_break_log
    .info(f"gave up on {name}")
)
math.log(2)
print("no log")
"""
    found = log_lines_of([(CONVERT_FRAME, source), ("torch/nn/other.py", source)])
    assert found == {
        CONVERT_FRAME: {
            "torch._dynamo hit config.": [2],
            "= recompiles_log.debug(message)": [5],
            "gave up on": [8],
        }
    }
