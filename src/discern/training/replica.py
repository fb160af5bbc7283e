"""What a rank trains: the whole objective, alone or beside equal ones on the other ranks; and the average of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from discern.errors import ConfigError
from discern.objectives.base import Objective
from discern.training.checkpoint import model_tensors
from discern.training.config import TrainConfig
from discern.training.optimizer import Optimizer, clip_gradients, parameter_groups
from discern.training.precision import full_weights, lower_weights
from discern.training.rank_environment import rank_environment
from discern.training.state import State, TrainContext, save_checkpoint

Prepare = Callable[[Objective], None]
"""Compiles the networks of an objective, if the run asks for it."""


class Replica:
    """The whole objective on this rank. Several ranks average their gradients by DistributedDataParallel, or with weights in
    bfloat16, whose gradients it would add up in bfloat16, after the last micro-batch by themselves.

    Args:
        context: of the run; the phase has frozen what it does not train.
        prepare: called with the objective before its weights are sharded or replicated.

    Attributes:
        objective: whose parameters are trained.
        model: the module to run forward.
        optimizer: updates the parameters.
    """

    model: nn.Module

    def __init__(self, context: TrainContext, prepare: Prepare) -> None:
        self._context, self.objective, ranks = context, context.objective, context.ranks
        prepare(self.objective)
        averages = ranks.world_size > 1 and context.train.weight_precision != "float32"
        if averages:
            for tensor in model_tensors(self.objective).values():
                dist.broadcast(tensor, 0)  # as DistributedDataParallel does
        masters = lower_weights(self.objective, context.train.weight_precision)
        self.model = self.objective
        if ranks.world_size > 1 and not averages:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.objective, device_ids=ids)
        groups = parameter_groups(self.objective, context.optimizer, context.precision)
        self.optimizer = Optimizer(groups, context.optimizer, masters, context.train.seed)
        self._set_names(list(self.objective.parameters()) if averages else [])

    def _set_names(self, unsynchronized: list[nn.Parameter]) -> None:
        """Keep the parameters by name, and those whose gradients torch does not exchange."""
        self._names = {parameter: name for name, parameter in self.objective.named_parameters()}
        self._unsynchronized = unsynchronized

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
        average_over_ranks([parameter.grad for parameter in self._unsynchronized if parameter.grad is not None])

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `limit` (0: no limit). Return the norm before."""
        return clip_gradients(self.objective.parameters(), limit)

    def update_state(self, step: int, sums: Mapping[str, Tensor]) -> None:
        """`Objective.update_state`."""
        self.objective.update_state(step, sums)

    def update_average(self, state: State) -> None:
        """Add the present weights to the moving average of the state."""
        weights = full_weights(self.objective, state.masters)
        update_average(state.average, weights, self._context.train.weight_average, state.averaged)

    def gather_full_state(self, state: State) -> None:
        """Gather weights, moments and average on every rank, for a checkpoint or an evaluation of the run's objective."""

    def release_full_state(self) -> None:
        """Free the memory that `gather_full_state` used, before the next step."""

    def save(self, state: State) -> None:
        """Write a checkpoint of the run, or begin to write it in the background.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        save_checkpoint(self._context, state, self.moments)

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

    def moments(self) -> Mapping[str, Tensor]:
        """The optimizer's moments by parameter name, after `gather_full_state`."""
        return self.optimizer.tensors(self._names)


def average_over_ranks(gradients: Sequence[Tensor]) -> None:
    """Replace gradients by their means over all ranks, which have them in the same order."""
    for exchange in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        exchange.wait()
    if gradients:
        torch._foreach_div_(list(gradients), dist.get_world_size())


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


def num_shards(train: TrainConfig, world_size: int) -> int:
    """Number of ranks that the weights are sharded among; 1 if they are not.

    Raises:
        ConfigError: with 'hsdp', the ranks cannot be divided into at least two equal groups of at least two.
    """
    if world_size == 1 or train.parallel != "hsdp":
        return world_size if train.parallel == "fsdp" else 1
    size = train.shard_ranks or rank_environment().local_world_size
    if world_size % size or size in (1, world_size):
        raise ConfigError(
            "train.parallel is 'hsdp', which needs at least two equal groups of at least two processes; "
            f"found {world_size} processes, in groups of {size}",
            hint="set train.shard_ranks (by default the processes of this machine), or --set train.parallel=fsdp",
        )
    return size


def build_replica(context: TrainContext, prepare: Prepare) -> Replica:
    """What this rank trains, by `train.parallel` and the number of ranks."""
    if not context.train.divides_weights(context.ranks.world_size):
        return Replica(context, prepare)
    from discern.training.sharding import ShardedReplica  # imports torch.distributed.fsdp

    return ShardedReplica(context, prepare)
