"""What a cell is told of the gates: the limits that it must keep to PASS."""

from collections.abc import Mapping

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Demand, Device
from toto_compat.matrix.gates import Gate


def demands_of(limits: Mapping[Gate, GateLimit], *, device: Device, mode: str) -> tuple[Demand, ...]:
    """Return the limits that a cell on this device and in this mode must keep to PASS, whatever else is measured.

    Not those that a noisy machine or upstream eager itself can break: they may come to decide nothing.
    """
    return tuple(
        Demand(gate=gate.value, suite=gate.rule.suite, figure=gate.figure, limit=limits[gate])
        for gate in Gate
        if gate in limits
        and gate.rule.only_on in (None, device)
        and mode not in gate.rule.not_in_modes
        and not gate.rule.is_a_time
        and not gate.rule.reference
    )
