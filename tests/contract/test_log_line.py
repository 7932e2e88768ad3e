"""What a log line is read for."""

import pytest

from toto_compat.contract.log_line import without_its_source


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("mutated inputs (2 instances). Found from : ", "mutated inputs (2 instances)"),
        # 2.9.0, in the reason that it keeps with a graph
        (
            'incompatible op aten._local_scalar_dense.default Found from   File "/x/y.py", line 80, in _length',
            "incompatible op aten._local_scalar_dense.default",
        ),
        ("cpu device (arg0_1)", "cpu device (arg0_1)"),
    ],
)
def test_a_reason_ends_where_the_machines_files_begin(said: str, reason: str) -> None:
    assert without_its_source(said) == reason
