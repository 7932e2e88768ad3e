"""A cell's name is text with parts, and text that is no name is refused."""

import pickle

import pytest
from pydantic import BaseModel, ValidationError

from toto_compat.contract.cell_name import CellName


class Holder(BaseModel):
    cell: CellName


def test_a_name_mentions_settings_only_when_they_are_not_stock() -> None:
    assert CellName.of("torch-2.13.0-cpu", "upstream", "default") == "torch-2.13.0-cpu/upstream/default"
    tuned = CellName.of("torch-2.13.0-cpu", "compile_friendly", "default", "production")
    assert tuned == "torch-2.13.0-cpu/compile_friendly/default+production"
    assert tuned.mode_and_settings == "default+production"


@pytest.mark.parametrize(
    "text",
    ["torch-2.13.0-cpu/upstream/default", "e/sabotaged:slow/max-autotune+production", "e/c/default+s@w", "e/c/d@w"],
)
def test_a_name_is_parsed_into_what_it_was_made_of(text: str) -> None:
    name = CellName(text)
    assert CellName.of(name.environment, name.cache, name.mode, name.settings, name.workload) == text


def test_a_workload_is_no_part_of_mode_and_settings() -> None:
    name = CellName("e/c/default+s@production")
    assert (name.mode_and_settings, name.for_all_workloads) == ("default+s", "e/c/default+s")


@pytest.mark.parametrize("text", ["", "a/b/c@", "a", "a/b", "a/b/", "/b/c", "a//c", "a/b/c/d", "a/b/c+", "a/b/+s"])
def test_text_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no cell name"):
        CellName(text)
    with pytest.raises(ValidationError):
        Holder.model_validate({"cell": text})


def test_a_name_survives_json_and_pickle_with_its_parts() -> None:
    name = CellName("e/c/m+s")
    assert Holder.model_validate_json(Holder(cell=name).model_dump_json()).cell.settings == "s"
    assert pickle.loads(pickle.dumps(name)).settings == "s"  # noqa: S301 - our own bytes
