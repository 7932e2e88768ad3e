"""Spreads containers over the processors."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class CpuShares:
    """Hands out processors: cells that run at the same time sit on different ones as long as there are enough."""

    def __init__(self, engine_cpus: int, *, local: bool) -> None:
        usable = sorted(os.sched_getaffinity(0)) if local and hasattr(os, "sched_getaffinity") else []
        self._all = usable or list(range(engine_cpus))
        self._used: Counter[int] = Counter()
        self._guard = threading.Lock()

    def some(self, count: int) -> str:
        """Name some processors for what is no cell, as a cpuset."""
        return ",".join(str(cpu) for cpu in self._all[:count])

    @contextmanager
    def taken(self, count: int) -> Iterator[str]:
        """Take the least used processors, as a cpuset; fewer than asked for where the machine has fewer."""
        with self._guard:
            chosen = sorted(sorted(self._all, key=lambda cpu: (self._used[cpu], cpu))[:count])
            self._used.update(chosen)
        try:
            yield ",".join(str(cpu) for cpu in chosen)
        finally:
            with self._guard:
                self._used.subtract(chosen)
