"""Every fault that a campaign knows, by name."""

from collections.abc import Mapping

from tests.faults import cells, containers, installs, kills, slurm, storage
from tests.faults.outcome import Fault

FAULTS: Mapping[str, Fault] = {
    "runner killed": kills.runner,
    "runner and supervisors killed": kills.runner_and_supervisors,
    "cell killed": kills.cell,
    "supervisor killed": kills.supervisor,
    "disk full at one call": storage.full_at_each_call,
    "disk full from a call on": storage.full_from_a_call_on,
    "disk breaks at one call": storage.breaks_at_some_calls,
    "small disk": storage.small_disk,
    "limit on file size": storage.file_size_limit,
    "results read-only": storage.read_only_from_a_call_on,
    "results gone": storage.gone_from_a_call_on,
    "results removed": storage.removed_results,
    "results slow": storage.slow_disk,
    "clock jumps": storage.clock_jumps,
    "stored cell damaged": storage.damaged_files,
    "stored references damaged": storage.damaged_references,
    "run damaged": storage.damaged_run,
    "stored cells of an older layout": storage.older_layouts,
    "run of a later version": storage.later_run,
    "two runners": storage.two_runners,
    "two runners, one name": storage.two_runners_of_one_name,
    "cell never ends": cells.never_ends,
    "cell floods its log": cells.floods_its_log,
    "cell takes all memory": cells.takes_all_memory,
    "the same in a control group": cells.takes_all_memory_of_its_group,
    "torch segfaults at import": cells.torch_segfaults,
    "package index goes away": installs.index_goes_away,
    "builder killed": installs.builder_killed,
    "runner of containers killed": containers.runner_killed,
    "container killed": containers.container_killed,
    "container's log breaks off": containers.log_breaks_off,
    "engine killed": containers.engine_killed,
    "runner killed as it submits": slurm.runner_killed_as_it_submits,
}
