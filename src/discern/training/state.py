"""The context and the state of a run; what a rank trains; and the moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from discern.data.batching.stream import Integers, RowStream
from discern.diagnosis.health import HealthMonitor
from discern.objectives.base import Objective
from discern.progress import Progress
from discern.training import checkpoint
from discern.training.checkpoint import Contents, model_tensors
from discern.training.config import OptimizerConfig, StepSizes, TrainConfig
from discern.training.distributed import Ranks
from discern.training.execution import compile_encoders
from discern.training.flops import RunFlops
from discern.training.metrics import MetricsLog, TimeBudget
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.process import StopRequest
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
    step tokens seconds joules phase_seconds updates averaged interval pending best best_loss evaluations_since_best
""".split()
"""Attributes of `State` that a checkpoint's state.json holds."""


@dataclass
class State:
    """Progress of a run.

    Attributes:
        step: number of updates so far.
        tokens: number of real tokens read so far.
        seconds: duration of the training, over all sessions.
        joules: energy until the last record or checkpoint, over all ranks and sessions; None: a machine did not tell.
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
    joules: float | None = 0.0
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


class Replica:
    """The whole objective on this rank; several ranks average their gradients by DistributedDataParallel.

    Args:
        context: of the run; the phase has frozen what it does not train.

    Attributes:
        objective: whose parameters are trained.
        model: the module to run forward.
        optimizer: updates the parameters.
    """

    model: nn.Module

    def __init__(self, context: TrainContext) -> None:
        self._context, self.objective, ranks = context, context.objective, context.ranks
        if context.compiled:
            compile_encoders(self.objective)
        self.model = self.objective
        if ranks.world_size > 1:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.objective, device_ids=ids)
        self.optimizer = Optimizer(parameter_groups(self.objective, context.optimizer, context.precision), context.optimizer)

    def backward(self, *, last: bool) -> AbstractContextManager[object]:
        """A context for the forward and backward pass of a micro-batch. Ranks exchange gradients in the `last` one of a step."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not last else nullcontext()

    def update_average(self, state: State) -> None:
        """Add the present weights to the moving average of the state."""
        update_average(state.average, model_tensors(self.objective), self._context.train.weight_average, state.averaged)

    def gather_full_state(self, state: State) -> None:
        """Gather weights and average on every rank, for a checkpoint or an evaluation of the run's objective."""

    def release_full_state(self) -> None:
        """Free the memory that `gather_full_state` used, before the next step."""

    def save(self, state: State) -> None:
        """Write a checkpoint of the run, or begin to write it in the background.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        save_checkpoint(self._context, state, self.optimizer.tensors)

    def complete_write(self) -> None:
        """Wait until this rank has written its part of the pending checkpoint.

        Raises:
            CheckpointError: it could not be written.
        """

    def close(self) -> None:
        """Wait until the pending checkpoint is complete on all ranks.

        Raises:
            CheckpointError: it could not be written.
        """


@torch.no_grad()
def update_average(average: dict[str, Tensor], weights: Mapping[str, Tensor], decay: float, updates: int) -> None:
    """Add the present weights to an average, in place.

    After n updates, the weights k updates ago have weight (1 - decay) decay^k / (1 - decay^n). The weights before the first
    update have none, so that the average is not biased towards them, however short the run.

    Args:
        average: every parameter and buffer by name, in float32; empty before the first update.
        weights: the present ones, in float32.
        updates: n, this update included.
    """
    if updates == 1:
        average.clear()
        average.update({name: tensor.clone() for name, tensor in weights.items()})
        return
    moving = [name for name in average if average[name].is_floating_point()]
    share = (1 - decay) / (1 - decay**updates)
    torch._foreach_lerp_([average[name] for name in moving], [weights[name] for name in moving], share)
    for name in average.keys() - set(moving):
        average[name].copy_(weights[name])


@contextmanager
def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the model has the averaged weights, if there are any; then its own again, to the last bit."""
    weights = {name: tensor.clone() for name, tensor in model_tensors(model).items()} if average else {}
    use_average(model, average)
    try:
        yield
    finally:
        use_average(model, weights)


@torch.no_grad()
def use_average(model: nn.Module, average: Mapping[str, Tensor]) -> None:
    """Copy averaged weights into the model; nothing if there are none."""
    weights = model_tensors(model)
    for name, tensor in average.items():
        weights[name].copy_(tensor)


def average_warning(train: TrainConfig, steps: int) -> str | None:
    """A warning about an average that spans more updates than the run has; None if it does not."""
    span = round(1 / (1 - train.weight_average))
    if not train.weight_average or steps >= span:
        return None
    return (
        f"train.weight_average {train.weight_average:g} averages over about {span:,} updates, but the run has {steps:,}: the "
        "average still contains its early weights. Set train.weight_average to a smaller value, or to 0 to use the last weights"
    )


def build_replica(context: TrainContext) -> Replica:
    """What this rank trains, by `train.parallel` and the number of ranks."""
    if not context.train.divides_weights(context.ranks.world_size):
        return Replica(context)
    from discern.training.sharding import ShardedReplica  # imports torch.distributed.fsdp

    return ShardedReplica(context)
