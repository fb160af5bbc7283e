"""How long a run takes and what its losses are, interval by interval."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """Clock of the run, and running means since the last record; evaluation and saving don't count as training."""

    def __init__(self, seconds: float) -> None:
        self._offset = seconds
        self._begin = time.perf_counter()
        self.last: dict[str, float] = {}
        self.restart()

    def seconds(self) -> float:
        """Seconds of the run, earlier sessions included."""
        return self._offset + time.perf_counter() - self._begin

    def restart(self) -> None:
        """Begin a new interval."""
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._tokens = 0
        self._since = time.perf_counter()

    def add(self, losses: dict[str, float], tokens: int) -> None:
        """Take in one step."""
        self.last = losses
        self._steps += 1
        self._tokens += tokens
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Mean of each loss over the interval."""
        return {name: value / max(self._steps, 1) for name, value in self._sums.items()}

    def speed(self) -> float:
        """Real tokens a second over the interval, on all ranks together."""
        return self._tokens / max(time.perf_counter() - self._since, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the interval's clock still; the run's clock goes on."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin
