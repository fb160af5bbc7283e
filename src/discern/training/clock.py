"""The clock of a run: its throughput, and the work that a time budget makes due."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from discern.training.device_clock import DeviceClock
from discern.training.parallel import Ranks
from discern.training.step_means import StepMeans

Work = Literal["log", "evaluate", "checkpoint"]
"""Work that may follow a step."""

# As fractions of the budget: enough points for a curve, whatever the budget and the machine.
_INTERVALS: dict[Work, float] = {"log": 0.01, "evaluate": 0.05, "checkpoint": 0.05}
_LONGEST: dict[Work, float] = {"checkpoint": 1800.0}  # seconds
# An evaluation or checkpoint that took a second is not repeated for 20 seconds: each costs at most a twentieth of the time.
_COST_FACTOR = 20.0
_WORTH_SHOWING = 0.1


class StepMeter:
    """Clock of a run, and means over the steps since the last record. Evaluating and saving do not count as training.

    Args:
        seconds: duration of the run in earlier sessions.
        interval: the value of `interval()` that the earlier session saved; its means continue as if uninterrupted.
        device: clock of the device; None on the CPU.
    """

    def __init__(self, seconds: float, interval: Mapping[str, Any] | None = None, device: DeviceClock | None = None) -> None:
        self._offset = seconds
        self._device = device
        self._shows_waits = False
        self._since = time.perf_counter()
        self._begin = time.perf_counter()
        self.last: dict[str, float] = {}
        self.restart()
        if interval:
            self._sums.update(interval["sums"])
            self._steps, self._tokens = int(interval["steps"]), int(interval["tokens"])
            self._since -= float(interval["seconds"])
            self._waited = float(interval.get("waited", 0.0))

    def seconds(self) -> float:
        """Seconds of the run, including earlier sessions."""
        return self._offset + time.perf_counter() - self._begin

    def begin_again(self) -> None:
        """Do not count this session so far: its first step compiled the networks, which is not training."""
        self._begin = time.perf_counter()

    def restart(self) -> None:
        """Begin a new interval. What was not read is dropped."""
        self._sums: dict[str, float] = {}
        self._unread: tuple[Tensor, StepMeans] | None = None
        self._steps = 0
        self._tokens = 0
        self._waited = 0.0
        self._since = time.perf_counter()

    def add(self, means: StepMeans, tokens: int) -> None:
        """Add one step. Its means stay on the device until `read`."""
        if self._device is not None:
            self._device.end()
        self._unread = (means.shares if self._unread is None else self._unread[0] + means.shares), means
        self._steps += 1
        self._tokens += tokens

    def read(self, ranks: Ranks) -> None:
        """Read what was added. Waits for the device."""
        if self._unread is None:
            return
        shares, means = self._unread
        self._unread = None
        self.last = means.read(ranks)
        sums = self.last if shares is means.shares else StepMeans(means.names, shares).read(ranks)
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def interval(self) -> dict[str, Any]:
        """The current interval as plain JSON, from which a resumed run continues it; of what was read."""
        seconds = time.perf_counter() - self._since
        counted = {"sums": self._sums, "steps": self._steps, "tokens": self._tokens}
        return {**counted, "seconds": round(seconds, 3), "waited": round(self._waited, 3)}

    def means(self) -> dict[str, float]:
        """Mean of each loss over the interval, of what was read."""
        return {name: value / max(self._steps, 1) for name, value in self._sums.items()}

    def tokens_per_second(self) -> float:
        """Real tokens per second over the interval, all ranks together."""
        return self._tokens / max(time.perf_counter() - self._since, 1e-9)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        begin = time.perf_counter()
        yield
        waited = time.perf_counter() - begin
        self._waited += waited
        if self._device is not None:
            self._device.begin(waited)

    def waits_shown(self) -> dict[str, str]:
        """For the progress display: how much of the interval was spent waiting for data, if it is worth showing."""
        share = self._data_share()
        self._shows_waits = self._shows_waits or share > _WORTH_SHOWING  # once shown, it has to be kept up to date
        return {"waiting for data": f"{share:.0%}"} if self._shows_waits else {}

    def _data_share(self) -> float:
        return min(1.0, self._waited / max(time.perf_counter() - self._since, 1e-9))

    def shares(self) -> dict[str, float]:
        """Fractions of the interval: waiting for data, waiting for the host (on a GPU only), computing. Waits for the GPU."""
        found = None if self._device is None else self._device.read()
        if found is not None:
            return {f"{name}_share": round(share, 4) for name, share in found._asdict().items()}
        data = self._data_share()
        return {"data_share": round(data, 4), "device_share": round(1 - data, 4)}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock of the interval; that of the run continues."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin
        if self._device is not None:
            self._device.interrupt()


@dataclass(frozen=True)
class Due:
    """The work that follows the current step."""

    log: bool = False
    evaluate: bool = False
    checkpoint: bool = False


class TimeBudget:
    """Schedule work by the clock, in addition to the intervals in steps, which remain upper limits.

    Args:
        budget: seconds of the whole run.
        kinds: the work that the clock schedules: work whose interval the user has not set.
        seconds: duration of the run in earlier sessions.
    """

    def __init__(self, budget: float, kinds: Iterable[Work], seconds: float = 0.0) -> None:
        self._waits = {kind: min(_INTERVALS[kind] * budget, _LONGEST.get(kind, budget)) for kind in kinds}
        # A resumed run keeps to the times of the whole run: in many short sessions, work that waits long would never be due.
        self._last: dict[Work, float] = dict.fromkeys(_INTERVALS, seconds)
        self._last |= {kind: seconds - seconds % wait for kind, wait in self._waits.items() if wait > 0}

    def due(self, seconds: float) -> Due:
        """The work that is due `seconds` into the run."""
        return Due(**{kind: seconds - self._last[kind] >= wait for kind, wait in self._waits.items()})

    def done(self, kind: Work, seconds: float, cost: float = 0.0) -> None:
        """Note that some work was done by now, and that it took `cost` seconds."""
        # Counted as if it had been done later, so that the wait is in proportion to its cost.
        delay = max(0.0, _COST_FACTOR * cost - self._waits.get(kind, 0.0))
        self._last[kind] = seconds + delay
