"""Caches broken on purpose, as files of a user's: on the GPU too, each must turn its gate red.

Those that come with the package are caught on a CPU by its tests. Two more are right on a CPU and wrong on a GPU only:
they break the rules of a replayed CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from toto_compat.acceptance.campaign import Ended
from toto_compat.contract.caches import SABOTAGES
from toto_compat.contract.result import Outcome
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import JudgedCell, Status

FILE = "sabotaged_caches.py"
PREFIX = "sabotaged_"


@dataclass(frozen=True)
class Sabotage:
    """One cache that is wrong, the gate that has to say so, and whether a rehearsal on a CPU tries it."""

    name: str
    gate: Gate
    class_name: str
    description: str
    of_graphs: bool = False  # wrong where CUDA graphs are replayed, right elsewhere
    rehearsed: bool = False

    @property
    def cache(self) -> str:
        return f"{PREFIX}{self.name}"

    @property
    def source(self) -> str:
        return f"{FILE}:{self.class_name}"


def _known(name: str, *, rehearsed: bool = False) -> Sabotage:
    row = SABOTAGES[name]
    class_name = row.code.rpartition(":")[2]
    return Sabotage(name, Gate(row.gate), class_name, row.description, rehearsed=rehearsed)


def _of_graphs(name: str, class_name: str, gate: Gate, description: str, *, rehearsed: bool = False) -> Sabotage:
    return Sabotage(name, gate, class_name, description, of_graphs=True, rehearsed=rehearsed)


# One or two of each gate. Not those that compile in every step (an hour on a GPU) or turn a switch of torch's, which a
# cell takes its figures back for.
ALL: Sequence[Sabotage] = (
    _known("leaking_mask", rehearsed=True),
    _known("silent_downcast"),
    _known("bucket_per_length"),
    _known("eager_in_disguise", rehearsed=True),
    _known("hoards_memory"),
    _known("leaks_memory"),
    _known("slow"),
    _of_graphs("keeps_old_outputs", "KeepsOldOutputs", Gate.EQUIVALENCE, "reads an output after the next replay"),
    _of_graphs("writes_an_input", "WritesAnInput", Gate.CUDAGRAPHS, "writes to an input that may move", rehearsed=True),
)


def tried(*, rehearsal: bool) -> list[Sabotage]:
    """Pick those that an acceptance tries."""
    return [one for one in ALL if one.rehearsed or not rehearsal]


def sabotaged_caches() -> str:
    """Read the file of all of them, which is written for a cell's environment."""
    return (resources.files("toto_compat.acceptance") / FILE).read_text(encoding="utf-8")


def caught(sabotage: Sabotage, cell: JudgedCell) -> tuple[Ended, str]:
    """Tell whether its gate failed it; a gate that does not apply on a CPU is shown by its prediction.

    One whose forecast raised turns every gate red, which shows nothing of them; but torch itself may refuse what breaks
    the rules of a replay.
    """
    judged, evidence = cell.gates.get(sabotage.gate), cell.result.evidence.get(sabotage.gate.rule.suite)
    what = f"{sabotage.name} ({sabotage.description})"
    if judged is None:
        return Ended.NOT_SHOWN, f"{what}: {sabotage.gate.value} was not judged"
    if evidence and evidence.outcome is Outcome.MODEL_FAILED and not sabotage.of_graphs:
        return Ended.NOT_SHOWN, f"{what}: it did not get as far as {sabotage.gate.value}: {judged.reason}"
    if judged.status is Status.FAIL:
        return Ended.HELD, f"{what}: caught, {sabotage.gate.value} FAIL: {judged.reason}"
    if judged.status is Status.PASS:
        return Ended.BROKEN, f"{what}: NOT caught, {sabotage.gate.value} is PASS"
    predicted = f", predicted {judged.value:g}" if judged.value is not None else ""
    return Ended.NOT_SHOWN, f"{what}: {sabotage.gate.value} is {judged.status.value}{predicted}: {judged.reason}"
