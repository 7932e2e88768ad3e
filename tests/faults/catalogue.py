"""Every fault that a campaign knows, by name."""

from collections.abc import Mapping

from tests.faults import kills
from tests.faults.outcome import Fault

FAULTS: Mapping[str, Fault] = {
    "runner killed": kills.runner,
    "runner and supervisors killed": kills.runner_and_supervisors,
    "cell killed": kills.cell,
    "supervisor killed": kills.supervisor,
}
