"""The two scanners find the same places, wherever literals stand in a block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.logs.scan import Scanner, finding_scanner, hyperscan_scanner

LITERALS = (b"hit config.", b"_limit (", b"cudagr", b"aa", b"aab")


def both() -> list[Scanner]:
    quick = hyperscan_scanner(LITERALS)
    return [finding_scanner(LITERALS), *([quick] if quick else [])]


def lines_with_a_hit(scan: Scanner, block: bytes, end: int) -> list[int]:
    """Walk over the lines as the parser does: the beginnings of those in which the scan found something."""
    places, found, begins = scan(bytearray(block), end), [], 0
    while (hit := places.next_at(begins)) >= 0:
        assert begins <= hit < end
        found.append(block.rfind(b"\n", begins, hit) + 1 or begins)
        ends = block.find(b"\n", hit, end)
        begins = end if ends < 0 else ends + 1
    return found


blocks = st.lists(st.sampled_from([*LITERALS, b"\n", b"a", b"_limit", b" (", b"hit con", b"fig.", b"\x00", b"\xff"]))


@settings(deadline=None)
@given(blocks.map(b"".join), st.integers(0, 60))
def test_every_scanner_finds_the_lines_that_hold_a_literal(block: bytes, cut: int) -> None:
    end = min(cut, len(block))
    expected, begins = [], 0
    for line in block[:end].split(b"\n"):
        if any(literal in line for literal in LITERALS):
            expected.append(begins)
        begins += len(line) + 1
    for scan in both():
        assert lines_with_a_hit(scan, block, end) == expected


def test_hyperscan_is_used_where_it_is_installed() -> None:
    pytest.importorskip("hyperscan", reason="pip install 'toto-compat[logs]'")
    assert hyperscan_scanner(LITERALS) is not None


def test_without_hyperscan_python_searches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hyperscan", None)
    assert hyperscan_scanner(LITERALS) is None
