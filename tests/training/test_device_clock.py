"""Where the time of the steps goes: on the CPU by the host's clock, on a GPU by its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from discern.diagnosis.health import diagnose_waiting
from discern.training import metrics as clock
from discern.training.metrics import DeviceClock, StepMeter, device_clock


@dataclass
class Timeline:
    """A device whose events happen at the given seconds, one after the other."""

    times: list[float]
    asked_at: float = 0.0
    waited: list[float] = field(default_factory=list)

    def event(self) -> Event:
        return Event(self)


@dataclass
class Event:
    """As `torch.cuda.Event`; `query` asks at `asked_at`."""

    line: Timeline
    at: float = 0.0

    def record(self) -> None:
        self.at = self.line.times.pop(0)

    def query(self) -> bool:
        return self.at <= self.line.asked_at

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)

    def synchronize(self) -> None:
        self.line.waited.append(self.at)


def test_a_device_that_is_kept_busy() -> None:
    """Two steps of 4 s, back to back; the host has launched the second when the device is still in the first."""
    line = Timeline([0.0, 4.0, 4.0, 8.0], asked_at=-1.0)
    meter = DeviceClock(line.event)
    for _ in range(2):
        meter.begin(0.5)  # the host waited, but the device had work
        meter.end()
    assert line.waited == []
    assert list(meter.read().values()) == [0.0, 0.0, 1.0]
    assert line.waited == [8.0]
    assert meter.read() == {}


def test_a_device_that_waits_for_data_and_for_the_host() -> None:
    """Steps of 2 s. 3 s between them: the host waited 2 s of it for data. In the second step the device has caught up."""
    line = Timeline([0.0, 2.0, 5.0, 7.0], asked_at=-1.0)
    meter = DeviceClock(line.event)
    meter.begin(0.0)
    meter.end()
    line.asked_at = 6.0
    meter.begin(2.0)
    meter.end()
    assert list(meter.read().values()) == pytest.approx([2 / 7, (1 + 2) / 7, 2 / 7])


def test_other_work_between_steps_is_not_waiting() -> None:
    line = Timeline([0.0, 2.0, 100.0, 102.0], asked_at=-1.0)
    meter = DeviceClock(line.event)
    meter.begin(0.0)
    meter.end()
    meter.interrupt()
    meter.begin(0.0)
    meter.end()
    assert list(meter.read().values()) == [0.0, 0.0, 1.0]


def test_on_the_cpu_there_is_only_waiting_and_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    meter = StepMeter(0.0)
    now[0] = 1.0
    assert meter.waits_shown() == {}
    with meter.waiting():
        now[0] = 4.0
    now[0] = 10.0
    assert meter.shares() == {"data_share": 0.3, "device_share": 0.7}
    assert meter.waits_shown() == {"waiting for data": "30%"}
    saved = meter.interval()
    now[0] = 1000.0
    assert meter.waits_shown() == {"waiting for data": "0%"}  # what is shown once stays in the display
    assert StepMeter(10.0, saved).shares() == {"data_share": 0.3, "device_share": 0.7}
    assert device_clock(torch.device("cpu")) is None


def test_the_doctor_says_what_a_run_waits_for() -> None:
    data, host = diagnose_waiting({"data_share": 0.4, "host_share": 0.1, "device_share": 0.5})
    assert (data.verdict, host.verdict) == ("high", "fine")
    assert data.cause.startswith("40% of the time, the run waits for data")
    data, host = diagnose_waiting({"data_share": 0.01, "host_share": 0.6})
    assert (data.verdict, host.verdict) == ("fine", "high")
    (data,) = diagnose_waiting({"data_share": 0.01, "device_share": 0.99})
    assert data.verdict == "fine"
    assert diagnose_waiting({}) == []
