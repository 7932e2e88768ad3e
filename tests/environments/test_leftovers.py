"""Only what a dead process of this machine left is taken for a leftover."""

from toto_compat.environments.leftovers import runner_label, runner_lives


def test_only_dead_runners_of_this_machine_leave_leftovers() -> None:
    host, pid, start, namespace = runner_label().split(":", 3)
    assert runner_lives(runner_label())
    assert not runner_lives(f"{host}:{pid}:1:{namespace}")  # the number is used again by a younger process
    assert runner_lives("another-machine:1:1")
    assert runner_lives(f"{host}:{pid}:1:pid:[1]")  # in a container on this machine, whose numbers mean others here
    assert runner_lives(f"{host}:{pid}:{start}")  # as earlier releases wrote it
    assert not runner_lives(f"{host}:{pid}:1")
    assert runner_lives("no label of ours")
