"""The context of the training loop, and the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from discern.data.batching.stream import Integers, RowStream
from discern.diagnosis.health import HealthMonitor
from discern.objectives.base import Objective
from discern.progress import Progress
from discern.training import checkpoint
from discern.training.checkpoint import Contents, model_tensors
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.flops import RunFlops
from discern.training.interrupt import StopRequest
from discern.training.metrics import TimeBudget
from discern.training.metrics_log import MetricsLog
from discern.training.schedule import StepSizes
from discern.types import TokenBatch


@runtime_checkable
class BatchSource(Protocol):
    """Rows to train on, by their index in an endless sequence of examples."""

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """Return the examples of these indices as one batch."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a run whose held-out metric no longer improves. Larger values of the metric are better.

    Attributes:
        metric: name of the metric.
        patience: evaluations without improvement after which the run ends; 0: it never does.
        keep: keep the weights of the best evaluation under `folder/best`.
        loss: name of the held-out loss that decides between equal values of the metric; None: the earliest value is the best.
    """

    metric: str
    patience: int = 0
    keep: bool = False
    loss: str | None = None


@dataclass(frozen=True)
class TrainContext:
    """Everything that the training loop works with, apart from the state of the run.

    Attributes:
        source: rows to train on.
        heldout: rows for evaluation; None if there are none.
        precision: 'float32' or 'bfloat16'.
        folder: folder of the run, for checkpoints.
        metrics_log: metrics.jsonl; None on ranks that do not write, and if nothing is to be written.
        header: description of the run, written into every checkpoint.
        early_stopping: rule to stop early; None: the run lasts for all its steps.
        flops: FLOPs of the run, for the log; None if rows differ in length.
        health_monitor: warns of unusual held-out metrics.
        time_budget: schedules work by the clock.
        sizes: rows of every step; None: `train.sequences_per_step` throughout.
        compiled: whether the networks are compiled.
    """

    objective: Objective
    source: BatchSource
    heldout: RowStream | None
    optimizer: OptimizerConfig
    train: TrainConfig
    ranks: Ranks
    precision: str
    folder: Path
    metrics_log: MetricsLog | None
    progress: Progress
    stop: StopRequest
    header: dict[str, Any] = field(default_factory=dict)
    early_stopping: EarlyStopping | None = None
    flops: RunFlops | None = None
    health_monitor: HealthMonitor | None = None
    time_budget: TimeBudget = field(default_factory=lambda: TimeBudget(0.0, ()))
    sizes: StepSizes | None = None
    compiled: bool = False

    def rows_of(self, step: int) -> range:
        """The rows of a step, over all ranks, by their index in the sequence of examples."""
        if self.sizes is None:
            rows = self.train.sequences_per_step
            return range(step * rows, (step + 1) * rows)
        first = self.sizes.examples_before(step)
        return range(first, first + self.sizes.at(step).rows)

    def micro_batch_size(self, step: int) -> int | None:
        """Rows per rank and forward pass; None: all of them. Of rows shorter than the last, as many as have its tokens."""
        size = self.train.micro_batch_size
        if size is None or self.sizes is None:
            return size
        return size * self.sizes.segments[-1].length // self.sizes.at(step).length


Moments = Callable[[], Mapping[str, Tensor]]
"""Returns the optimizer's moments by parameter name, gathered if they are sharded: all ranks call it."""

_SAVED = """
    step tokens seconds phase_seconds updates averaged interval pending best best_loss evaluations_since_best
""".split()
"""Attributes of `State` that a checkpoint's state.json holds."""


@dataclass
class State:
    """Progress of a run.

    Attributes:
        step: number of updates so far.
        tokens: number of real tokens read so far.
        seconds: duration of the training, over all sessions.
        updates: updates of the current optimizer, which a new phase may have created.
        optimizer: moments to continue from, by parameter name.
        average: moving average of the weights, by name; empty without one.
        averaged: number of updates that it contains.
        best: best value of the metric of early stopping.
        best_loss: held-out loss at that evaluation.
        evaluations_since_best: number of evaluations since then.
        finished: whether the run has reached its last step, the end of its time budget or its patience, or was interrupted.
        interrupted: whether it was asked to stop before its end.
        interval: losses since the last record of an earlier session (see `StepMeter.interval`).
        pending: record of this step that is not yet in metrics.jsonl, under `line`, and under `evaluates` whether an evaluation
            belongs to it. The checkpoint is saved before both, so a resumed run completes them.
        phase_seconds: value of `seconds` at the beginning of the current phase.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    updates: int = 0
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    averaged: int = 0
    best: float | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    finished: bool = False
    interrupted: bool = False
    interval: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] | None = None
    phase_seconds: float = 0.0

    @property
    def logged_step(self) -> int:
        """The last step whose records in metrics.jsonl are complete."""
        return self.step if self.pending is None else self.step - 1

    @classmethod
    def from_checkpoint(cls, contents: Contents) -> State:
        """State of a run that is resumed from a checkpoint."""
        values = {name: contents.state[name] for name in _SAVED if name in contents.state}
        return cls(**values, optimizer=dict(contents.optimizer), average=dict(contents.average))


def described_state(context: TrainContext, state: State) -> dict[str, Any]:
    """The state of a run as plain JSON, for a checkpoint."""
    return {name: getattr(state, name) for name in _SAVED} | context.header


def save_checkpoint(context: TrainContext, state: State, moments: Moments, folder: Path | None = None) -> None:
    """Write a checkpoint of the current state. Rank 0 writes; the others wait.

    Args:
        folder: folder of the checkpoint; by default `checkpoints` in the folder of the run.

    Raises:
        CheckpointError: it could not be written; the earlier checkpoints are intact.
    """
    # Each rank has the memory of its own rows. Tensors that all ranks share come from rank 0, hence the reversed order.
    carried, optimizer = context.ranks.gather_first(context.objective.carry_state()), moments()
    if context.ranks.writes:
        contents = Contents(
            model=model_tensors(context.objective),
            optimizer=optimizer,
            carry={name: tensor for part in reversed(carried) for name, tensor in part.items()},
            state=described_state(context, state),
            average=state.average,
        )
        if context.metrics_log is not None:
            # After a power failure, a checkpoint must not exist without the records before it.
            context.metrics_log.sync()
        checkpoint.save(folder or context.folder / "checkpoints", contents, context.train.keep_checkpoints)
    context.ranks.barrier()
