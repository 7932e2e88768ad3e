"""The mark of tests that need a CUDA build of torch; they need no GPU."""

import pytest

from toto_compat.cell.lowering.described_gpu import why_not_here

needs_cuda_build = pytest.mark.skipif(
    bool(why_not_here()),
    reason=f"{why_not_here()}; to run these tests: `pip install torch==2.15.0 pytest` in an environment with toto-ts, "
    "then `python -m pytest --side=cell tests/cell/lowering` there",
)
