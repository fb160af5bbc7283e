"""What a rank trains: the whole objective, alone or beside equal ones on the other ranks; and the average of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from discern.training.checkpoint import model_tensors
from discern.training.compilation import compile_encoders
from discern.training.config import TrainConfig
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.state import State, TrainContext, save_checkpoint


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
