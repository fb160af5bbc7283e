"""Metrics of a run: means, throughput and waits of its steps, whether an update may happen, and the log of all records.

Between two records of the log the host learns nothing from the device: reading a value would make it wait until all work so far
is done, and the device would then wait for the host to submit more. On the CPU, where the two are one, every step is read.

metrics.jsonl has one JSON object per line. It is appended during the run and consistent with the checkpoint after a resume.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from discern.errors import CheckpointError, ConfigError, DataError, counted
from discern.parsing import is_number, json_value
from discern.storage.checksums import record_checksums, update_checksums, verify
from discern.storage.files import write_text
from discern.training.config import TrackerName
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
        new_event: returns an event with the methods of `torch.Event`.
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
    """A clock for this device; None if it is not a GPU of CUDA or ROCm."""
    if device.type != "cuda":
        return None
    return DeviceClock(partial(torch.get_device_module(device).Event, enable_timing=True))


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


METRICS_FILE = "metrics.jsonl"
EXAMPLES_FILE = "examples.jsonl"
HELD_OUT = "heldout_"
BY_SOURCE = "heldout_by_source"
"""Key of a record, and of the metrics of an evaluation, for the held-out metrics of each source of a mixture."""
_OF_TRAINING = set(
    "step tokens seconds tokens_per_second data_share host_share device_share learning_rate grad_norm flops "
    "energy_joules peak_memory_bytes generator_entropy".split()
)


class MetricsLog:
    """Writer of a run's metrics.jsonl.

    Args:
        folder: folder of the run.
        step: step from which the run continues; later records, of steps that will be repeated, are dropped.
        tensorboard: also write TensorBoard events under `folder/tensorboard`.
        tracker: name of a tracker that also receives the records.
        warn: called if the tracker fails.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        *,
        tensorboard: bool = False,
        tracker: TrackerName = "none",
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._path, self._examples = paths = folder / METRICS_FILE, folder / EXAMPLES_FILE
        records = {path: read_records(path) for path in paths if path.exists()}  # compares them with their checksums
        update_checksums(folder, {path.name: None for path in paths})  # until the log is closed
        for path, lines in records.items():
            write_text(path, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
        self._stream = self._path.open("a", encoding="utf-8")
        self._trackers: list[TensorBoard | Service] = [TensorBoard(folder / "tensorboard")] if tensorboard else []
        if tracker != "none":
            self._trackers.append(Service(tracker, folder, warn))

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; values that are not finite become null.

        Raises:
            CheckpointError: the file could not be written.
        """
        clean = _finite(record)
        try:
            self._stream.write(json.dumps(clean) + "\n")
            self._stream.flush()
        except OSError as problem:
            raise CheckpointError(
                f"could not write {self._path}: {problem.strerror or problem}",
                hint="free some space and run the same command again: training continues from the last checkpoint",
            ) from problem
        numbers = {key: value for key, value in clean.items() if key != "step" and isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(record["step"], numbers)

    def write_examples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the example rows of an evaluation to examples.jsonl, if there are any. A failure to write them is ignored."""
        if rows:
            with suppress(OSError), self._examples.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, "rows": rows}, separators=(",", ":")) + "\n")

    def sync(self) -> None:
        """Force the written records onto the disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file, and record its checksum."""
        with suppress(OSError, DataError):  # an error of a full disk was reported when the record was written
            self._stream.close()
            record_checksums(self._path.parent, (path.name for path in (self._path, self._examples) if path.is_file()))
        for tracker in self._trackers:
            tracker.close()


def read_metrics(folder: Path, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The records of a run, oldest first; each has a step. Damaged lines, and a last line that a kill cut short, are left out.

    Args:
        warn: called with the number of damaged lines and the first of them.

    Raises:
        DataError: the file cannot be read.
    """
    return read_records(folder / METRICS_FILE, warn)


def read_records(path: Path, warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The records of a file of JSON lines with a step, as `read_metrics` reads them."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}", hint="check its permissions") from problem
    verify(path, content)
    lines = content.split(b"\n")
    found: list[dict[str, Any] | None] = []
    for line in lines:
        value = None
        with suppress(json.JSONDecodeError, UnicodeDecodeError):
            value = json_value(line)
        found.append(value if isinstance(value, dict) and isinstance(value.get("step"), int) else None)
    # After the last line break there is nothing, or a line that a kill cut short.
    damaged = [number for number, (line, record) in enumerate(zip(lines[:-1], found, strict=False), 1) if line and record is None]
    if damaged and warn is not None:
        lines_out = counted(len(damaged), "damaged line")
        warn(f"{path}: left out {lines_out}, the first is line {damaged[0]}: expected a JSON object with a step")
    return [record for record in found if record is not None]


def _finite(value: Any) -> Any:
    """A value for JSON: None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def add_held_out(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the metrics of an evaluation beside those of training.

    Both have losses, so held-out losses are named `heldout_...`, whether or not this step also has training losses.
    """
    return {**record, **{f"{HELD_OUT}{key}" if _is_loss(key) or key in record else key: metrics[key] for key in metrics}}


def held_out_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the evaluation in a record, under the names that they have there; empty without an evaluation."""
    twins = {key.removeprefix(HELD_OUT) for key in record if key.startswith(HELD_OUT)}
    if not twins:
        return {}
    return {
        key: value for key, value in record.items() if key not in _OF_TRAINING | twins and not _is_loss(key) and is_number(value)
    }


_HEADLINES = (
    *("loss", "heldout_loss", "perplexity", "mlm_accuracy", "permutation_lm_accuracy", "generator_accuracy"),
    *("discriminator_auc", "discriminator_precision", "discriminator_recall"),
)


def headlines(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that matter most, at most five: of a pre-training objective, or the first ones of a task."""
    numbers = {name: value for name, value in metrics.items() if is_number(value)}
    names = [name for name in _HEADLINES if name in numbers] if {"loss", "heldout_loss"} & set(numbers) else list(numbers)
    return {name: numbers[name] for name in names[:5]}


def _is_loss(key: str) -> bool:
    return not key.startswith(HELD_OUT) and (key == "loss" or key.endswith("_loss"))


_PROJECT = "discern"


class TensorBoard:
    """TensorBoard events in a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """A package with the functions `init`, `log` and `finish`, as wandb and trackio have them.

    The record is in metrics.jsonl in any case: an error of the service is reported once and does not stop the training.

    Args:
        name: name of the package.
        folder: folder of the run, whose name the run has in the tracker.
        warn: called with the first error.
    """

    def __init__(self, name: TrackerName, folder: Path, warn: Callable[[str], None]) -> None:
        self._name, self._warn, self._failed = name, warn, False
        self._package: Any = import_module(name)
        # A resumed run goes on where it was: trackio knows it by its name, wandb by an id. Other runs may be in folders of the
        # same name, such as the seeds of fine-tunings.
        path = folder.resolve()
        unique = f"{path.name}-{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
        names = {"name": path.name, "id": unique} if name == "wandb" else {"name": unique}
        self._try(lambda: self._package.init(project=_PROJECT, resume="allow", **names))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._package.log(dict(values), step=step))

    def close(self) -> None:
        self._try(lambda: self._package.finish())

    def _try(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            with redirect_stdout(sys.stderr):  # trackio greets on stdout, which belongs to --json
                call()
        except Exception as problem:  # of any kind: the service is not ours
            self._failed = True
            with suppress(Exception):
                self._warn(
                    f"train.tracker: {self._name} failed and receives no more records: {' '.join(str(problem).split())[:200]}"
                )


def check_trackers(name: TrackerName, *, tensorboard: bool) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        ConfigError: one is not.
    """
    if tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("train.tensorboard is set, but TensorBoard is not installed", hint="pip install 'discern-nlp[track]'")
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"train.tracker is {name!r}, but the package {name} is not installed", hint=f"pip install {name}")
