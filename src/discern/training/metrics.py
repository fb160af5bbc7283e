"""The losses of a step, and whether its update may happen, as values on the device that the host reads only now and then.

Between two records of the log the host learns nothing from the device: reading a value would make it wait until all work so far
is done, and the device would then wait for the host to submit more. On the CPU, where the two are one, every step is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from discern.training.distributed import Ranks


@dataclass(frozen=True)
class StepMeans:
    """Means of one step: of the losses, and of what else is logged.

    Attributes:
        names: name of each mean; the first is 'loss', the weighted sum.
        shares: (N,) this rank's share of each mean, float64; the shares of all ranks sum to the means.
    """

    names: tuple[str, ...]
    shares: Float[Tensor, "N"]

    def read(self, ranks: Ranks) -> dict[str, float]:
        """The means over all ranks by name. Waits for the device."""
        return dict(zip(self.names, ranks.sum_tensor(self.shares).tolist(), strict=True))


@dataclass(frozen=True)
class StepCounters:
    """How far a run was before a step, in terms of the attributes of its state."""

    step: int
    tokens: int
    updates: int
    averaged: int


Stop = Callable[[StepCounters, Mapping[str, float]], None]
"""Ends the run, given how far it was before the failed step, and the means of that step."""


class NonFiniteGuard:
    """Holds back all updates from the first step on whose gradient is not finite, so that the weights stay those before it.

    On the CPU the host decides at once. Otherwise the device decides, and the host learns of it from `check`, which must be
    called before a checkpoint.

    Args:
        stop: called at a failure.
    """

    def __init__(self, ranks: Ranks, stop: Stop) -> None:
        self._ranks, self._stop = ranks, stop
        self._failure: Tensor | None = None  # step, or -1, then the shares of its means
        self._names: tuple[str, ...] = ()
        self._before: dict[int, StepCounters] = {}

    def allow(self, before: StepCounters, norm: Float[Tensor, ""], means: StepMeans) -> Bool[Tensor, ""] | None:
        """Whether the update of a step may happen; None: it may, as the host has checked already.

        Args:
            before: how far the run was before the step.
            norm: norm of all gradients, the same on all ranks.
        """
        if self._ranks.reads_freely:
            if not math.isfinite(float(norm)):
                self._stop(before, means.read(self._ranks))
            return None
        now = torch.cat([means.shares.new_full((1,), before.step), means.shares])
        if self._failure is None:
            self._failure = torch.full_like(now, -1)
        self._names, self._before[before.step] = means.names, before
        fails = ~torch.isfinite(norm) & (self._failure[0] < 0)
        self._failure = torch.where(fails, now, self._failure)
        return self._failure[0] < 0

    def check(self) -> None:
        """Stop if an update was held back. Waits for the device."""
        if self._failure is not None and (step := int(self._failure[0])) >= 0:
            self._stop(self._before[step], StepMeans(self._names, self._failure[1:]).read(self._ranks))
        self._before.clear()


@dataclass
class _Step:
    """One step on the device.

    Attributes:
        waited: seconds that the host waited for its rows.
        idle_before: event at the end of the step before; None: other work was done in between.
        ran_dry: whether the device had begun this step when the host had launched all of it. Only a device that still works on
            an earlier step is sure to have had work throughout.
    """

    begin: Any
    waited: float
    idle_before: Any
    end: Any = None
    ran_dry: bool = False


class DeviceClock:
    """Records an event before and after each step. The host waits for the device only in `read`.

    Args:
        new_event: returns an event with the methods of `torch.cuda.Event`.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._steps: list[_Step] = []
        self._last_end: Any = None

    def begin(self, waited: float) -> None:
        """Mark the beginning of a step, for whose rows the host has waited this many seconds."""
        self._steps.append(_Step(self._event(), waited, self._last_end))

    def end(self) -> None:
        """Mark the end of a step: the host has launched all of its work."""
        if self._steps and self._steps[-1].end is None:
            step = self._steps[-1]
            step.ran_dry = bool(step.begin.query())
            step.end = self._last_end = self._event()

    def interrupt(self) -> None:
        """Mark the beginning of other work, which is not part of any step."""
        self._last_end = None

    def read(self) -> dict[str, float]:
        """Wait for the device, and divide the time of the steps since the last call; empty if there was no step.

        Returns:
            data_share: the device was idle, because the rows of a step had not been read.
            host_share: the device had caught up with the host, and had to wait for the work that the host launched.
            device_share: the device had work to do.
        """
        steps, self._steps = [step for step in self._steps if step.end is not None], []
        self.interrupt()
        if not steps:
            return {}
        steps[-1].end.synchronize()
        seconds = dict.fromkeys(("data_share", "host_share", "device_share"), 0.0)
        for step in steps:
            gap = 0.0 if step.idle_before is None else step.idle_before.elapsed_time(step.begin) / 1000
            seconds["data_share"] += min(gap, step.waited)
            seconds["host_share"] += max(gap - step.waited, 0.0)
            seconds["host_share" if step.ran_dry else "device_share"] += step.begin.elapsed_time(step.end) / 1000
        return {name: value / max(sum(seconds.values()), 1e-9) for name, value in seconds.items()}

    def _event(self) -> Any:
        event = self._new_event()
        event.record()
        return event


def device_clock(device: torch.device) -> DeviceClock | None:
    """A clock for this device; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


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
        self._device, self._shows_waits = device, False
        self._begin = self._since = time.perf_counter()
        self.shown_loss = ""
        self.restart()
        if interval:
            self._sums.update(interval["sums"])
            self._steps, self._tokens = int(interval["steps"]), int(interval["tokens"])
            self._since -= float(interval["seconds"])
            self._waited = float(interval["waited"])

    def seconds(self) -> float:
        """Seconds of the run, including earlier sessions."""
        return self._offset + time.perf_counter() - self._begin

    def begin_again(self) -> None:
        """Do not count this session so far: its first step compiled the networks, which is not training."""
        self._begin = time.perf_counter()

    def restart(self) -> None:
        """Begin a new interval. What was not read is dropped."""
        self._sums: dict[str, float] = {}
        self._unread: StepMeans | None = None
        self._steps = 0
        self._tokens = 0
        self._waited = 0.0
        self._since = time.perf_counter()

    def add(self, means: StepMeans, tokens: int) -> None:
        """Add one step. Its means stay on the device until `read`."""
        if self._device is not None:
            self._device.end()
        self._unread = StepMeans(means.names, means.shares if self._unread is None else self._unread.shares + means.shares)
        self._steps += 1
        self._tokens += tokens

    def read(self, ranks: Ranks) -> None:
        """Read what was added. Waits for the device."""
        if self._unread is not None:
            for name, value in self._unread.read(ranks).items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._unread, self.shown_loss = None, f"{self.means()['loss']:.3f}"

    def interval(self) -> dict[str, Any]:
        """The current interval as plain JSON, from which a resumed run continues it; of what was read."""
        seconds, waited = round(time.perf_counter() - self._since, 3), round(self._waited, 3)
        return {"sums": self._sums, "steps": self._steps, "tokens": self._tokens, "seconds": seconds, "waited": waited}

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
        data = self._data_share()
        shares = {} if self._device is None else self._device.read()
        shares = shares or {"data_share": data, "device_share": 1 - data}
        return {name: round(share, 4) for name, share in shares.items()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock of the interval; that of the run continues."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin
        if self._device is not None:
            self._device.interrupt()


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

    def due(self, seconds: float) -> set[Work]:
        """The work that is due `seconds` into the run."""
        return {kind for kind, wait in self._waits.items() if seconds - self._last[kind] >= wait}

    def done(self, kind: Work, seconds: float, cost: float = 0.0) -> None:
        """Note that some work was done by now, and that it took `cost` seconds."""
        # Counted as if it had been done later, so that the wait is in proportion to its cost.
        delay = max(0.0, _COST_FACTOR * cost - self._waits.get(kind, 0.0))
        self._last[kind] = seconds + delay
