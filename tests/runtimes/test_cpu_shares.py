"""Cells that run at the same time get processors of their own as long as there are enough."""

from toto_compat.runtimes.cpu_shares import CpuShares


def test_cells_at_the_same_time_get_different_processors() -> None:
    shares = CpuShares(4, local=False)
    with shares.taken(2) as first, shares.taken(2) as second:
        assert (first, second) == ("0,1", "2,3")
    with shares.taken(3) as again:
        assert again == "0,1,2"


def test_a_machine_with_fewer_processors_gives_what_it_has() -> None:
    with CpuShares(1, local=False).taken(8) as cpuset:
        assert cpuset == "0"
