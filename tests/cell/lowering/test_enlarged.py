"""Blocks of interpreted kernels: few programs, and never a block that Inductor's missing masks would not allow."""

import pytest

from tests.cell.lowering.cuda_build import needs_cuda_build

pytestmark = [pytest.mark.cell, needs_cuda_build]


def enlarged(blocks: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    from toto_compat.cell.lowering import interpreter  # Inductor's side of Triton, which a CPU build lacks

    return interpreter.enlarged(blocks, sizes)


def test_many_programs_become_few() -> None:
    assert enlarged({"XBLOCK": 8}, {"xnumel": 3000, "r0_numel": 128}) == {"XBLOCK": 512}


def test_a_block_that_does_already_is_inductors_own() -> None:
    assert enlarged({"XBLOCK": 256}, {"xnumel": 1500}) == {"XBLOCK": 256}


def test_no_block_is_larger_than_those_that_inductor_leaves_masks_out_for() -> None:
    assert enlarged({"XBLOCK": 64}, {"xnumel": 10**6}) == {"XBLOCK": 4096}
    assert enlarged({"XBLOCK": 16, "YBLOCK": 16}, {"xnumel": 64, "ynumel": 10**6}) == {"XBLOCK": 16, "YBLOCK": 1024}


@pytest.mark.parametrize("reduced", [{"r0_numel": 5000}, {"r0_numel": 10**6}])
def test_a_program_holds_no_more_than_triton_allows(reduced: dict[str, int]) -> None:
    blocks = {"XBLOCK": 1, "R0_BLOCK": 4096} if reduced["r0_numel"] > 8192 else {"XBLOCK": 1}
    larger = enlarged(blocks, {"xnumel": 4096, **reduced})
    assert larger["XBLOCK"] * (larger.get("R0_BLOCK") or 8192) <= 2**17


def test_what_is_no_block_stays() -> None:
    assert enlarged({"XBLOCK": 1, "RSPLIT": 4}, {"xnumel": 64}) == {"XBLOCK": 8, "RSPLIT": 4}
