"""How long a run takes and what its losses are, interval by interval."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Meter:
    """Clock of the run, and running means since the last record; evaluation and saving don't count as training.

    Args:
        seconds: of the run in earlier sessions.
        interval: what `interval` gave when the earlier session was saved, so that its means go on as if uninterrupted.
    """

    def __init__(self, seconds: float, interval: Mapping[str, Any] | None = None) -> None:
        self._offset = seconds
        self._begin = time.perf_counter()
        self.last: dict[str, float] = {}
        self.restart()
        if interval:
            self._sums.update(interval["sums"])
            self._steps, self._tokens = int(interval["steps"]), int(interval["tokens"])
            self._since -= float(interval["seconds"])

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

    def interval(self) -> dict[str, Any]:
        """The interval so far, as plain JSON: a run that is resumed goes on with it."""
        seconds = time.perf_counter() - self._since
        return {"sums": self._sums, "steps": self._steps, "tokens": self._tokens, "seconds": round(seconds, 3)}

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
