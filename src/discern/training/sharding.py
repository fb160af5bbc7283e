"""Weights, gradients and moments divided among the ranks, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each block of an encoder is a unit, and everything else is another: embeddings, which networks may share, and heads. A unit's
matrices are gathered when it runs, forward and backward, and its gradients are summed and divided again. Vectors (biases, norms)
stay whole on every rank, because a block may end with the norm of the next one; they are less than a hundredth of a network.

A copy of the objective is divided and trained. The run's own objective stays whole: `ShardedReplica.collect` brings it up to
date for checkpoints and evaluations, which are therefore those of a single process.

Reference: Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from discern.errors import ConfigError
from discern.training.average import update_average
from discern.training.checkpoint import load_model_tensors, model_tensors
from discern.training.config import TrainConfig
from discern.training.context import State, TrainContext
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.parallel import Ranks
from discern.training.rank_environment import rank_environment
from discern.training.replica import Prepare, Replica
from discern.training.update_rules import UpdateRule

_REPLICATE, _SHARD = "replicate", "shard"


class ShardedReplica(Replica):
    """A part of the objective on this rank; see the module."""

    model: FSDPModule  # type: ignore[assignment]

    def _build(self, context: TrainContext, prepare: Prepare) -> None:
        ranks = context.ranks
        self._whole = context.objective
        self.objective = copy.deepcopy(context.objective)
        prepare(self.objective)
        mesh = mesh_of(context.train, ranks)
        vectors = {parameter for parameter in self.objective.parameters() if parameter.ndim < 2}
        blocks = {block: None for network in self.objective.networks().values() for block in network.encoder.repeated_blocks()}
        for block in blocks:
            fully_shard(block, mesh=mesh, ignored_params=vectors)
        self.model = fully_shard(self.objective, mesh=mesh, ignored_params=vectors)
        self._shards: Any = mesh.get_group(_SHARD) if mesh.ndim > 1 else mesh.get_group()
        self.optimizer = ShardedOptimizer(
            parameter_groups(self.objective, context.optimizer, context.precision), context.optimizer
        )
        self._moments: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._collected = -1
        self.put_away()

    def begin_average(self, state: State) -> None:
        own = model_tensors(self.objective)
        self._average = {name: part_of(tensor, own[name]).clone() for name, tensor in state.average.items()}

    def backward(self, *, last: bool) -> AbstractContextManager[object]:
        return self._synchronized(last=last)

    @contextmanager
    def _synchronized(self, *, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    def finish_gradients(self) -> None:
        vectors = [each.grad for each in self.objective.parameters() if not isinstance(each, DTensor) and each.grad is not None]
        if not vectors:
            return
        flat = torch.cat([gradient.flatten() for gradient in vectors])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = torch.split(flat, [each.numel() for each in vectors])
        torch._foreach_copy_(vectors, [mean.view_as(gradient) for mean, gradient in zip(means, vectors, strict=True)])

    def clip(self, limit: float) -> Tensor:
        gradients = [each.grad for each in self.objective.parameters() if each.grad is not None]
        divided = [each.to_local() for each in gradients if isinstance(each, DTensor)]
        whole = [each for each in gradients if not isinstance(each, DTensor)]
        square = _sum_of_squares(divided, self._context.ranks.device)
        dist.all_reduce(square, group=self._shards)
        norm = (square + _sum_of_squares(whole, square.device)).sqrt()
        if limit > 0 and gradients:
            torch._foreach_mul_([*divided, *whole], torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def absorb(self, step: int, sums: Mapping[str, Tensor]) -> None:
        super().absorb(step, sums)
        self._whole.absorb(step, sums)  # which corrupts the rows

    def update_average(self, state: State) -> None:
        own = {name: local(tensor) for name, tensor in model_tensors(self.objective).items()}
        update_average(self._average, own, self._context.train.weight_average, state.averaged)

    def collect(self, state: State) -> None:
        if self._collected == state.step:
            return
        device, own = self._context.ranks.device, model_tensors(self.objective)
        self._whole.to(device)
        with torch.no_grad():
            load_model_tensors(self._whole, {name: whole(tensor) for name, tensor in own.items()}, "the divided model")
        carried = self.objective.carry_state()
        if carried:
            self._whole.load_carry_state(carried)
        if self._average:
            state.average = {name: whole(tensor, own[name]) for name, tensor in self._average.items()}
        self._moments = self.optimizer.tensors(self._names)
        self._collected = state.step

    def put_away(self) -> None:
        self._moments, self._collected = {}, -1
        if self._context.ranks.device.type != "cpu":
            self._whole.to("cpu")

    def moments(self) -> Mapping[str, Tensor]:
        return self._moments


class ShardedOptimizer(Optimizer):
    """Updates the parts of weights that this rank keeps.

    Rules that look at a whole tensor, such as Muon, get it: gradients and weights are gathered, every rank computes the same, and
    keeps its part. Their moments are whole on every rank; those of AdamW are divided like the weights.
    """

    def _gradient_of(self, parameter: nn.Parameter, rule: UpdateRule) -> Tensor:
        assert parameter.grad is not None
        return self._part(parameter.grad, rule)

    def _weight_of(self, parameter: nn.Parameter, rule: UpdateRule) -> Tensor:
        return self._part(parameter.detach(), rule)

    def _store(self, parameter: nn.Parameter, values: Tensor, rule: UpdateRule, rounding: torch.Generator | None) -> None:
        if rule.needs_whole:
            local(parameter.detach()).copy_(part_of(values, parameter))

    def _part(self, tensor: Tensor, rule: UpdateRule) -> Tensor:
        return whole(tensor) if rule.needs_whole else local(tensor)

    def _empty_moment(self, parameter: Tensor, rule: UpdateRule) -> Tensor:
        shape = parameter.shape if rule.needs_whole else local(parameter).shape
        return torch.zeros(shape, dtype=torch.float32, device=local(parameter).device)

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        rules = {parameter: group["rule"] for group in self.param_groups for parameter in group["params"]}
        own = {name: parameter for parameter, name in names.items()}
        found = {}
        for key, value in super().tensors(names).items():
            parameter = own[key.rpartition(".")[0]]
            found[key] = value.clone() if rules[parameter].needs_whole else whole(value, parameter)
        return found

    def _loaded_moment(self, value: Tensor, parameter: Tensor, rule: UpdateRule) -> Tensor:
        moved = value.to(local(parameter).device)
        return moved.clone() if rule.needs_whole else part_of(moved, parameter).clone()


def mesh_of(train: TrainConfig, ranks: Ranks) -> DeviceMesh:
    """The ranks among which weights are divided, and with 'hsdp' the groups of ranks that each have all of them.

    Raises:
        ConfigError: the ranks cannot be divided into groups of this size.
    """
    kind, size = ranks.device.type, ranks.world_size
    if train.parallel == "fsdp":
        return init_device_mesh(kind, (size,), mesh_dim_names=(_SHARD,))
    shards = shard_ranks(train, ranks)
    return init_device_mesh(kind, (size // shards, shards), mesh_dim_names=(_REPLICATE, _SHARD))


def shard_ranks(train: TrainConfig, ranks: Ranks) -> int:
    """Number of ranks in a group of 'hsdp'.

    Raises:
        ConfigError: the ranks cannot be divided into at least two groups of this size.
    """
    size, machine = ranks.world_size, rank_environment().local_world_size
    chosen = train.shard_ranks or machine
    if size % chosen or chosen in (1, size):
        possible = [str(each) for each in range(2, size) if size % each == 0]
        origin = "train.shard_ranks is" if train.shard_ranks else "this machine has"
        raise ConfigError(
            f"train.parallel is 'hsdp', but {origin} {chosen}, and {size} processes cannot be divided into groups of that size",
            hint=f"--set train.shard_ranks={possible[-1]}" if possible else "--set train.parallel=fsdp",
        )
    return chosen


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: all of it if it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The whole tensor, gathered from the ranks.

    Args:
        like: a parameter that is divided in the same way, if `tensor` is only the local part.
    """
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(
            tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank keeps of a parameter `like` it."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(present)).square().sum()
