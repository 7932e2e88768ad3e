"""What the suites of one process share: the trial, how hard to try, and the one model that they put on trial."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from toto_compat.cell.quiet import QuietLock
from toto_compat.cell.trial import Trial, blaming_the_candidate, synchronise
from toto_compat.contract.request import CellProfile, CellRequest
from toto_compat.contract.suites import Group, Suite
from toto_compat.model.bound import BoundModel


@dataclass
class Session:
    """A process's own view of the cell. The candidate is made when the first suite asks for it, and kept."""

    trial: Trial
    profile: CellProfile
    bound: BoundModel | None = None  # the candidate, once it was asked for
    work: Path = Path()  # the cell's folder, where its processes leave files for each other
    _first_forecast_s: float | None = field(default=None, init=False)

    @classmethod
    def of(cls, request: CellRequest, quiet: QuietLock) -> Self:
        return cls(Trial.of(request, quiet), request.profile, work=Path(request.work_folder))

    def measured(self, suite: Suite, group: Group) -> Mapping[str, Any]:
        """Return what an earlier process of this cell measured for a suite."""
        left: dict[str, Any] = json.loads((self.work / f"{group.value}.json").read_text(encoding="utf-8"))
        measurement: Mapping[str, Any] = left["measurements"][suite.value]
        return measurement

    @property
    def cache_class(self) -> str:
        """The class that was bound; empty while nothing is."""
        return self.bound.cache_class if self.bound is not None else ""

    @property
    def candidate(self) -> BoundModel:
        """The compiled model, told which batches the workload will use."""
        if self.bound is None:
            self.bound = self.trial.compiled(batch_sizes=self.trial.batch_sizes)
        return self.bound

    def first_forecast_seconds(self) -> float:
        """Take the candidate's first forecast in this process, once, and say how long it took."""
        if self._first_forecast_s is None:
            candidate, trial = self.candidate, self.trial
            context, horizon = trial.workload.context_patches[0], trial.workload.horizon_patches[0]
            series = trial.series(candidate.patch_size, context, horizon)
            with blaming_the_candidate():
                start = time.perf_counter()
                candidate.generate_mean(series, horizon * candidate.patch_size)
                synchronise(trial.device)
                self._first_forecast_s = time.perf_counter() - start
        return self._first_forecast_s
