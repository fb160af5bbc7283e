"""Where the time of the steps on a GPU goes, from events on the GPU's own clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Shares(NamedTuple):
    """Parts of the time of some steps, which sum to 1.

    Attributes:
        data: the device was idle, because the rows of a step had not been read.
        host: the device had caught up with the host, and had to wait for the work that the host launched.
        device: the device had work to do.
    """

    data: float
    host: float
    device: float


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

    def read(self) -> Shares | None:
        """Wait for the device and return the shares of the steps since the last call; None if there was no step."""
        steps, self._steps = [step for step in self._steps if step.end is not None], []
        self.interrupt()
        if not steps:
            return None
        steps[-1].end.synchronize()
        data = host = device = 0.0
        for step in steps:
            gap = 0.0 if step.idle_before is None else step.idle_before.elapsed_time(step.begin) / 1000
            took = step.begin.elapsed_time(step.end) / 1000
            data += min(gap, step.waited)
            host += max(gap - step.waited, 0.0) + (took if step.ran_dry else 0.0)
            device += 0.0 if step.ran_dry else took
        whole = max(data + host + device, 1e-9)
        return Shares(data / whole, host / whole, device / whole)

    def _event(self) -> Any:
        event = self._new_event()
        event.record()
        return event


def device_clock(device: torch.device) -> DeviceClock | None:
    """A clock for this device; None if it is not a GPU."""
    if device.type != "cuda":
        return None
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
