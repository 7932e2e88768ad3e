"""YAML read as plain data: where each key stands, what `<<` and aliases come to, and how mistakes are told."""

import math
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from toto_compat.errors import MatrixFileError
from toto_compat.matrix.document import (
    Document,
    Mistake,
    describe_mistakes,
    describe_value,
    nearest_name,
    read_document,
)

Read = Callable[[str], Document]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_text(text: str) -> Document:
        path = tmp_path / "matrix.yaml"
        path.write_text(text, encoding="utf-8")
        return read_document(path)

    return read_text


def told(document: Document) -> list[tuple[int, int, str, str]]:
    return [(mistake.line, mistake.column, mistake.path, mistake.found) for mistake in document.mistakes]


# --- positions --------------------------------------------------------------------------------------------------------


def test_every_key_and_every_item_has_a_position(read: Read) -> None:
    document = read("modes:\n  - default\n  - x: {y: 1}\nschema: 1\n")
    assert {path: (mark.line, mark.column) for path, mark in document.positions.items()} == {
        ("modes",): (0, 0),
        ("modes", 0): (1, 4),
        ("modes", 1): (2, 4),
        ("modes", 1, "x"): (2, 4),
        ("modes", 1, "x", "y"): (2, 8),
        ("schema",): (3, 0),
    }


def test_a_mistake_stands_where_its_key_does_counted_from_one(read: Read) -> None:
    mistake = read("a:\n  - b\n  - c: 1\n").mistake(("a", 1, "c"), "x", "y", "z")
    assert mistake == Mistake(line=3, column=5, path="a[1].c", found="x", accepted="y", nearest="z")


def test_a_key_that_is_missing_is_told_at_the_nearest_key_above(read: Read) -> None:
    mistake = read("first: 1\nprofiles:\n  quick: {}\n").mistake(("profiles", "quick", "csv", "path"), "", "")
    assert (mistake.line, mistake.column, mistake.path) == (3, 3, "profiles.quick.csv.path")


def test_a_section_that_is_missing_is_told_at_the_beginning(read: Read) -> None:
    mistake = read("\n\nfirst: 1\n").mistake(("modes",), "nothing", "a list")
    assert (mistake.line, mistake.column) == (1, 1)


def test_a_merged_key_has_the_position_where_it_is_written(read: Read) -> None:
    positions = read("a: &a\n  x: 1\nb:\n  <<: *a\n  y: 2\n").positions
    assert (positions["b", "x"].line, positions["b", "y"].line) == (1, 4)


# --- merge keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "merging",
    [
        "{<<: *a, x: own}",
        "{x: own, <<: *a}",
        "{<<: [*a, *b]}",
        "{<<: [*b, *a], z: own}",
        "{<<: *c}",
        "{<<: {x: inline}}",
        "{'<<': a key like any other}",
    ],
)
def test_merging_gives_what_a_plain_yaml_reader_gives(read: Read, merging: str) -> None:
    text = f"a: &a {{x: a, y: a}}\nb: &b {{x: b, z: b}}\nc: &c {{<<: [*b, *a], y: c}}\nd: {merging}\n"
    document = read(text)
    assert document.data == yaml.safe_load(text)
    assert document.mistakes == ()


@pytest.mark.parametrize("source", ["3", "[*a, 3]", "[[*a]]"])
def test_only_mappings_can_be_merged(read: Read, source: str) -> None:
    document = read(f"a: &a {{x: 1}}\nb:\n  <<: {source}\n")
    assert told(document) == [(3, 3, "b.<<", "something else")]


def test_what_can_be_merged_is_merged_beside_what_cannot(read: Read) -> None:
    assert read("a: &a {x: 1}\nb: {<<: [3, *a]}\n").data["b"] == {"x": 1}


def test_a_mapping_that_merges_itself_through_another_is_a_mistake(read: Read) -> None:
    document = read("a: &a\n  b: &b\n    <<: *a\n  <<: *b\n")
    assert {(mistake.line, mistake.path) for mistake in document.mistakes} >= {(3, "a.<<")}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_of_a_key_written_three_times_the_first_counts_and_each_other_is_told(read: Read) -> None:
    document = read("x: 1\ny: 2\nx: 3\nx: 4\n")
    assert document.data == {"x": 1, "y": 2}
    again = "the key a second time (first in line 1)"
    assert told(document) == [(3, 1, "x", again), (4, 1, "x", again)]


def test_the_same_key_in_two_mappings_is_no_duplicate(read: Read) -> None:
    assert read("a: {x: 1}\nb: {x: 1}\n").mistakes == ()


@pytest.mark.parametrize(("key", "kind"), [("2.13", "float"), ("1", "int"), ("yes", "bool"), ("~", "null")])
def test_a_key_that_yaml_does_not_read_as_text_is_told_with_the_quotes_it_lacks(
    read: Read, key: str, kind: str
) -> None:
    [mistake] = read(f"{key}: x\n").mistakes
    assert mistake.found == f"{key}, which YAML reads as {kind}"
    assert mistake.accepted == f'text as a key: "{key}"'
    assert read(f'"{key}": x\n').mistakes == ()


@pytest.mark.parametrize("key", ["[a, b]", "{a: b}"])
def test_a_list_or_mapping_as_a_key_is_left_out_and_told(read: Read, key: str) -> None:
    document = read(f"outer:\n  ? {key}\n  : 1\n  c: 2\n")
    assert document.data == {"outer": {"c": 2}}
    assert told(document) == [(2, 5, "outer", "a list or mapping as a key")]


# --- aliases and tags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "data"),
    [
        ("a: &a [1, *a]\n", "a[1]", {"a": [1, None]}),
        ("a: &a {b: *a}\n", "a.b", {"a": {"b": None}}),
        ("a: &a {b: [{c: *a}]}\n", "a.b[0].c", {"a": {"b": [{"c": None}]}}),
    ],
)
def test_an_alias_that_contains_itself_is_cut_off_and_told_where(read: Read, text: str, path: str, data: Any) -> None:
    document = read(text)
    assert document.data == data
    assert [(mistake.path, mistake.found) for mistake in document.mistakes] == [(path, "an alias that contains itself")]


def test_an_alias_used_side_by_side_does_not_contain_itself(read: Read) -> None:
    document = read("a: &a [1]\nb: [*a, *a]\nc: *a\n")
    assert document.data == {"a": [1], "b": [[1], [1]], "c": [1]}
    assert document.mistakes == ()


def test_a_mistake_behind_an_alias_is_told_once_for_each_place_that_uses_it(read: Read) -> None:
    document = read("a: &a\n  x: !secret y\nb: *a\n")
    assert [(line, path) for line, _, path, _ in told(document)] == [(2, "a.x"), (2, "b.x")]


@pytest.mark.parametrize(
    ("written", "tag"),
    [
        ("!secret text", "!secret"),
        ("!!python/name:os.system text", "tag:yaml.org,2002:python/name:os.system"),
        ("!!int text", "tag:yaml.org,2002:int"),
    ],
)
def test_a_value_that_its_tag_cannot_make_is_null_and_told(read: Read, written: str, tag: str) -> None:
    document = read(f"a:\n  b: {written}\n")
    assert document.data == {"a": {"b": None}}
    assert told(document) == [(2, 6, "a.b", f"'text' with the tag {tag}")]


def test_a_date_that_does_not_exist_is_told_like_a_tag_that_does_not_fit(read: Read) -> None:
    [mistake] = read("a: 2025-13-45\n").mistakes
    assert mistake.found.startswith("'2025-13-45' with the tag")


@pytest.mark.parametrize("written", ["text", "'3'", "3", "0x1f", "3.10", ".inf", "true", "~", "2025-10-30", "!!str 3"])
def test_a_plain_value_is_what_a_plain_yaml_reader_makes_of_it(read: Read, written: str) -> None:
    expected = yaml.safe_load(written)
    found = read(f"a: {written}\n").data["a"]
    assert (found, type(found)) == (expected, type(expected))


def test_mistakes_come_in_the_order_of_the_file(read: Read) -> None:
    document = read("z: !a 1\na: {y: !b 2, x: !c 3}\n")
    assert [mistake.path for mistake in document.mistakes] == ["z", "a.y", "a.x"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n"])
def test_a_file_without_content_is_told_what_to_begin_with(read: Read, text: str) -> None:
    with pytest.raises(MatrixFileError, match="found an empty file; accepted a mapping that begins with schema: 1"):
        read(text)


def test_a_file_that_cannot_be_opened_is_told_with_what_the_system_says(tmp_path: Path) -> None:
    with pytest.raises(MatrixFileError, match="cannot be read: Is a directory"):
        read_document(tmp_path)


def test_bytes_that_are_no_text_are_told_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(b"schema: 1\nx: \xff")
    with pytest.raises(MatrixFileError, match=r"not UTF-8 text \(byte 13\)"):
        read_document(path)


def test_a_character_that_yaml_forbids_is_told_with_its_line(read: Read, tmp_path: Path) -> None:
    with pytest.raises(MatrixFileError) as caught:
        read("a: 1\nb: 2\nc: \x07\n")
    assert f"{tmp_path / 'matrix.yaml'}:3: found unacceptable character" in caught.value.message


# --- nearest names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fixed_sise", "fixed_size"),
        ("FIXED_SIZE", "fixed_size"),
        ("rollingcache", "RollingCache"),
        ("up_stream", "upstream"),
        ("bfloat", "BFLOAT16"),
        ("sliding_window", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant_or_none(name: str, nearest: str | None) -> None:
    assert nearest_name(name, ["upstream", "fixed_size", "fixed_length", "RollingCache", "BFLOAT16"]) == nearest


def test_among_no_names_none_is_near() -> None:
    assert nearest_name("upstream", []) is None


@given(st.lists(st.text("abcde", min_size=1), min_size=1), st.data())
def test_a_name_in_any_case_is_nearest_to_itself(names: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names))
    assert nearest_name(name.upper(), names) == name


# --- values and mistakes in words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("tiny", "'tiny'"),
        ("3", "'3'"),
        (3, "3 (a number)"),
        (3.1, "3.1 (a number)"),
        (math.nan, "nan (a number)"),
        (0, "0 (a number)"),
        (1, "1 (a number)"),
        (False, "false"),
        (True, "true"),
        (None, "null"),
        ([], "an empty list"),
        ([1], "a list"),
        ({}, "an empty mapping"),
        ({"a": 1}, "a mapping"),
        (date(2025, 10, 30), "2025-10-30 (a date)"),
    ],
)
def test_a_value_is_described_as_yaml_read_it(value: Any, words: str) -> None:
    assert describe_value(value) == words


def test_a_long_text_is_cut_to_sixty_characters() -> None:
    assert describe_value("x" * 60) == repr("x" * 60)
    assert describe_value("x" * 61) == repr("x" * 57 + "...")


@pytest.mark.parametrize(
    "text",
    [
        f"x: {'9' * 5000}",
        f"x: {'9' * 100}",
        f"x: 0x{'f' * 5000}",
        f"x: [{'7' * 4200}]",
        f"x: !{'t' * 5000} 1",
        f"x: !{'t' * 5000} [1]",
        f"? {'k' * 5000}\n: !t 1",
        f"? {'9' * 5000}\n: 1",
        f"x: *{'a' * 5000}",
    ],
    ids=lambda text: text[:8].strip(),
)
def test_what_a_mistake_quotes_is_short_however_long_it_is_in_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        mistakes = list(read_document(path).mistakes)
    except MatrixFileError as error:
        assert "undefined alias" in error.message
        assert len(error.message) < 600
    else:
        assert len(mistakes) == 1
        assert len(mistakes[0].describe(Path("m.yaml"))) < 400


def test_a_number_of_any_length_that_is_of_use_is_a_number(read: Read) -> None:
    document = read(f"x: {2**255}\n")
    assert (document.data, document.mistakes) == ({"x": 2**255}, ())


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (Mistake(3, 1, "a.b", "x", "y"), "m.yaml:3: a.b: found x; accepted y"),
        (Mistake(3, 1, "", "x", "y"), "m.yaml:3: found x; accepted y"),
        (Mistake(3, 1, "a", "x", "y", "z"), "m.yaml:3: a: found x; accepted y; did you mean z?"),
    ],
)
def test_a_mistake_is_one_line_that_an_editor_can_jump_to(mistake: Mistake, line: str) -> None:
    assert mistake.describe(Path("m.yaml")) == line


def test_mistakes_are_counted_and_listed_in_the_order_of_the_file() -> None:
    later, right, left = (Mistake(*place, "x", "y") for place in ((12, 1, "c"), (2, 9, "b"), (2, 3, "a")))
    lines = describe_mistakes(Path("m.yaml"), [later, right, left]).splitlines()
    assert lines[0] == "m.yaml has 3 mistakes:"
    assert [line.split(": ")[1] for line in lines[1:]] == ["a", "b", "c"]
    assert all(line.startswith("  m.yaml:") for line in lines[1:])


def test_one_mistake_is_not_told_in_the_plural() -> None:
    assert describe_mistakes(Path("m.yaml"), [Mistake(1, 1, "", "x", "y")]).startswith("m.yaml has 1 mistake:\n")


def test_mistakes_in_one_place_need_no_order_among_their_suggestions() -> None:
    """One has a nearest name and the other none, which Python does not compare."""
    same = [Mistake(1, 1, "a", "x", "y", nearest) for nearest in ("z", None)]
    assert len(describe_mistakes(Path("m.yaml"), same).splitlines()) == 3


@pytest.mark.parametrize(
    "value",
    [
        "!!bool abc",
        "!!timestamp abc",
        "!!int ''",
        "!!map text",
        "!!seq text",
        "!include [a]",
        "!!python/object:os.system {a: 1}",
    ],
)
def test_a_tag_that_is_not_plain_is_a_mistake_and_nothing_else(tmp_path: Path, value: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(f"x: {value}\n", encoding="utf-8")
    [mistake] = read_document(path).mistakes
    assert (mistake.line, mistake.path) == (1, "x")
    assert "tag" in mistake.found


@pytest.mark.parametrize(
    "text",
    [
        'x: "\\U00110000"\n',
        'x: "\\UFFFFFFFF"\n',
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}\n" for n in range(1, 1500)),
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 900)),
    ],
    ids=["no character", "overflow", "chained merges", "chained aliases"],
)
def test_yaml_that_breaks_its_reader_is_told_as_a_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MatrixFileError, match=r"matrix\.yaml"):
        read_document(path)
