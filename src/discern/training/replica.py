"""What a rank trains: the whole objective, alone or beside equal ones on the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from discern.objectives.base import Objective
from discern.training.average import update_average
from discern.training.checkpoint import model_tensors
from discern.training.config import TrainConfig
from discern.training.distributed import Ranks
from discern.training.optimizer import Optimizer, clip_gradients, parameter_groups
from discern.training.precision import full_weights, lower_weights
from discern.training.state import State, TrainContext, save_checkpoint

_MOST_AT_ONCE = 1 << 23  # gradients that are exchanged together: 32 MiB

Prepare = Callable[[Objective], None]
"""Compiles the networks of an objective, if the run asks for it."""


class Replica:
    """The whole objective on this rank. Several ranks average their gradients by DistributedDataParallel, or with weights in
    bfloat16, whose gradients it would add up in bfloat16, after the last micro-batch by themselves.

    Args:
        context: of the run; the phase has frozen what it does not train.
        prepare: called with the objective before its weights are divided or shared.

    Attributes:
        objective: whose parameters are trained.
        model: the module to run forward.
        optimizer: updates the parameters.
    """

    objective: Objective
    model: nn.Module
    optimizer: Optimizer

    def __init__(self, context: TrainContext, prepare: Prepare) -> None:
        self._context = context
        self._build(context, prepare)
        self._names = {parameter: name for name, parameter in self.objective.named_parameters()}

    def _build(self, context: TrainContext, prepare: Prepare) -> None:
        self.objective = context.objective
        prepare(self.objective)
        self._averages = context.ranks.world_size > 1 and context.train.weight_precision != "float32"
        if self._averages:
            for tensor in model_tensors(self.objective).values():
                dist.broadcast(tensor.detach(), 0)  # as DistributedDataParallel does
        masters = lower_weights(self.objective, context.train.weight_precision)
        self.model = self.objective
        if context.ranks.world_size > 1 and not self._averages:
            ids = [context.ranks.device.index] if context.ranks.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.objective, device_ids=ids)
        groups = parameter_groups(self.objective, context.optimizer, context.precision)
        self.optimizer = Optimizer(groups, context.optimizer, masters, context.train.seed)

    def load_moments(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Continue from moments by parameter name; those of parameters that are not trained now are left out."""
        frozen = {name for parameter, name in self._names.items() if not parameter.requires_grad}
        used = {key: value for key, value in moments.items() if key.rpartition(".")[0] not in frozen}
        self.optimizer.load_tensors(used, self._names, updates)

    def begin_average(self, state: State) -> None:
        """Take over the moving average of an earlier session."""

    def backward(self, *, last: bool) -> AbstractContextManager[object]:
        """A context for the forward and backward pass of a micro-batch. Ranks exchange gradients in the `last` one of a step."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not last else nullcontext()

    def finish_gradients(self) -> None:
        """Exchange the gradients that torch has not exchanged."""
        if self._averages:
            average_over_ranks([each.grad for each in self.objective.parameters() if each.grad is not None])

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `limit` (0: no limit). Return the norm before."""
        return clip_gradients(self.objective.parameters(), limit)

    def update_state(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """`Objective.update_state`."""
        self.objective.update_state(step, sums)

    def reset_memory(self) -> None:
        """`Objective.reset_memory`."""
        self.objective.reset_memory()

    def update_average(self, state: State) -> None:
        """Add the present weights to the moving average of the state."""
        own = full_weights(self.objective, state.masters)
        update_average(state.average, own, self._context.train.weight_average, state.averaged)

    def gather_full_state(self, state: State) -> None:
        """Bring weights, moments and average together on every rank, for a checkpoint or an evaluation of the run's objective."""

    def release_full_state(self) -> None:
        """Free what `gather_full_state` took, before the next step."""

    def save(self, state: State) -> None:
        """Write a checkpoint of the run, or begin to.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        save_checkpoint(self._context, state, self.moments)

    def complete_write(self) -> None:
        """Wait for this rank's part of a checkpoint that was begun, but for no other rank, which may be elsewhere.

        Raises:
            CheckpointError: it could not be written.
        """

    def close(self) -> None:
        """Wait until the checkpoints that were begun are complete.

        Raises:
            CheckpointError: one could not be written.
        """

    def moments(self) -> Mapping[str, Tensor]:
        """The optimizer's moments by parameter name, after `gather_full_state`."""
        return self.optimizer.tensors(self._names)


def average_over_ranks(gradients: Sequence[Tensor]) -> None:
    """Replace gradients by their means over all ranks, which have them in the same order."""
    part: list[Tensor] = []
    for number, gradient in enumerate(gradients):
        part.append(gradient)
        if number + 1 < len(gradients) and sum(each.numel() for each in part) < _MOST_AT_ONCE:
            continue
        flat = torch.cat([each.flatten() for each in part])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = torch.split(flat, [each.numel() for each in part])
        torch._foreach_copy_(part, [mean.view_as(each) for mean, each in zip(means, part, strict=True)])
        part = []


def check_groups(train: TrainConfig, ranks: Ranks) -> None:
    """Check that the ranks can be divided into the groups that `train.parallel` needs.

    Raises:
        ConfigError: they cannot.
    """
    if ranks.world_size > 1 and train.parallel == "hsdp":
        from discern.training.sharding import shard_ranks  # imports torch.distributed.fsdp

        shard_ranks(train, ranks)


def shards_of(train: TrainConfig, ranks: Ranks) -> int:
    """Number of GPUs that the weights are divided among; 1 if they are not divided, or the ranks share this machine's memory."""
    if ranks.device.type != "cuda" or not train.divides_weights(ranks.world_size):
        return 1
    if train.parallel == "fsdp":
        return ranks.world_size
    from discern.training.sharding import shard_ranks  # imports torch.distributed.fsdp

    return shard_ranks(train, ranks)


def build_replica(context: TrainContext, prepare: Prepare) -> Replica:
    """What this rank trains, by `train.parallel` and the number of ranks."""
    if not context.train.divides_weights(context.ranks.world_size):
        return Replica(context, prepare)
    from discern.training.sharding import ShardedReplica  # imports torch.distributed.fsdp

    return ShardedReplica(context, prepare)
