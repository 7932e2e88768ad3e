"""What the suites of one process share: the trial, how hard to try, and the one model that they put on trial."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from toto_compat.cell.quiet import QuietLock
from toto_compat.cell.trial import Trial
from toto_compat.contract.demands import broken_demand
from toto_compat.contract.request import CellProfile, CellRequest, Demand, SymbolSeries
from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Group, Suite
from toto_compat.model.bound import BoundModel


@dataclass
class Session:
    """A process's own view of the cell. The candidate is made when the first suite asks for it, and kept."""

    trial: Trial
    profile: CellProfile
    bound: BoundModel | None = None  # the candidate, once it was asked for
    work: Path = Path()  # the cell's folder, where its processes leave files for each other
    demands: tuple[Demand, ...] = ()  # what the cell must keep to PASS
    symbols: tuple[SymbolSeries, ...] = ()  # the user's own series
    cache_class_elsewhere: str = ""  # what a process that this one started has bound
    changed_elsewhere: tuple[str, ...] = ()  # switches of torch that the candidate changed there
    no_samples: str = ""  # what torch says where upstream eager itself cannot draw: nothing is sampled then
    asked_sampling: tuple[str, ...] = ()  # the request's own, for suites that need no upstream to compare with

    @classmethod
    def of(cls, request: CellRequest, quiet: QuietLock) -> Self:
        trial = Trial.of(request, quiet)
        # asked here, before any cache of a user is imported
        no_samples = trial.why_upstream_cannot_draw()
        return cls(
            replace(trial, workload=trial.workload.without_samples) if no_samples else trial,
            request.profile,
            work=Path(request.work_folder),
            demands=request.demands,
            symbols=request.symbols,
            no_samples=no_samples,
            asked_sampling=trial.workload.sampling,
        )

    def measured(self, suite: Suite, group: Group) -> Mapping[str, Any]:
        """Return what an earlier process of this cell measured for a suite."""
        left: dict[str, Any] = json.loads((self.work / f"{group.value}.json").read_text(encoding="utf-8"))
        measurement: Mapping[str, Any] = left["measurements"][suite.value]
        return measurement

    def evidence(self, suite: Suite, group: Group) -> SuiteEvidence | None:
        """Return what an earlier process of this cell finished of a suite; None where it did not run or was lost."""
        try:
            left = json.loads((self.work / f"{group.value}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        known = left["evidence"].get(suite.value)
        return SuiteEvidence.model_validate(known) if known is not None else None

    def why_it_cannot_pass(self) -> str:
        """Name the limit that an earlier process of this cell broke; '' while the cell can still PASS."""
        evidence: dict[Suite, SuiteEvidence] = {}
        for group in (Group.OBSERVE, Group.COMPARE):
            try:
                left = json.loads((self.work / f"{group.value}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if left["changed"]:
                return ""  # its figures will be taken back, and so break nothing
            evidence |= {Suite(name): SuiteEvidence.model_validate(one) for name, one in left["evidence"].items()}
        return broken_demand(self.demands, evidence)

    @property
    def cache_class(self) -> str:
        """The class that was bound; empty while nothing is."""
        return self.bound.cache_class if self.bound is not None else self.cache_class_elsewhere

    @property
    def candidate(self) -> BoundModel:
        """The compiled model, told which batches the workload will use."""
        if self.bound is None:
            self.bound = self.trial.compiled(batch_sizes=self.trial.batch_sizes)
        return self.bound
