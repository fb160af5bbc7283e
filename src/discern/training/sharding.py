"""Weights, gradients and moments divided among the ranks, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each block of an encoder is a unit, and everything else is another: embeddings, which networks may share, and heads. A unit's
matrices are gathered when it runs, forward and backward, and its gradients are summed and divided again. Vectors (biases, norms)
stay whole on every rank, because a block may end with the norm of the next one; they are less than a hundredth of a network.

A copy of the objective is divided and trained. The run's own objective stays whole: `ShardedReplica.gather_full_state` brings
it up to date for checkpoints and evaluations, which are therefore those of a single process.

With `train.weight_precision = 'bfloat16-masters'`, what is divided and updated is float32, and what is gathered is bfloat16.

Reference: Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from discern.errors import CheckpointError, ConfigError
from discern.training.average import update_average
from discern.training.checkpoint import AVERAGE_FILE, CARRY_FILE, MODEL_FILE, OPTIMIZER_FILE, divided_name, load_model_tensors
from discern.training.config import TrainConfig
from discern.training.distributed import LONGEST_WORK, Ranks
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.precision import matrices
from discern.training.rank_environment import rank_environment
from discern.training.replica import Prepare, Replica, average_over_ranks
from discern.training.sharded_checkpoint import DividedWriter, Part
from discern.training.state import State, TrainContext, described_state
from discern.training.update_rules import Division

_REPLICATE, _SHARD = "replicate", "shard"


class ShardedReplica(Replica):
    """A part of the objective on this rank; see the module."""

    model: FSDPModule  # type: ignore[assignment]
    optimizer: ShardedOptimizer

    def _build(self, context: TrainContext, prepare: Prepare) -> None:
        ranks = context.ranks
        self._whole = context.objective
        self.objective = copy.deepcopy(context.objective)
        prepare(self.objective)
        mesh, policy = mesh_of(context.train, ranks), MixedPrecisionPolicy()
        vectors = {parameter for parameter in self.objective.parameters() if parameter.ndim < 2}
        if context.train.weight_precision == "bfloat16-masters":
            # Matrices are gathered as bfloat16 copies of the float32 parts, and their gradients summed in float32.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            vectors = set(self.objective.parameters()).difference(matrices(self.objective))
        blocks = {block: None for network in self.objective.networks().values() for block in network.encoder.repeated_blocks()}
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=vectors)
        self.model = fully_shard(self.objective, mesh=mesh, mp_policy=policy, ignored_params=vectors)
        self._group = mesh.get_group(_SHARD)
        self.optimizer = ShardedOptimizer(
            parameter_groups(self.objective, context.optimizer, context.precision), context.optimizer
        )
        self._moments: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._collected = -1
        self._writer = _writer(ranks, mesh)
        ranks.closing.append(_forget_meshes)
        self.release_full_state()

    def begin_average(self, state: State) -> None:
        own = tensors_of(self.objective)
        self._average = {name: part_of(tensor, own[name]).clone() for name, tensor in state.average.items()}

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    def finish_gradients(self) -> None:
        parameters = self.objective.parameters()
        average_over_ranks([each.grad for each in parameters if not isinstance(each, DTensor) and each.grad is not None])

    def clip(self, limit: float) -> Tensor:
        gradients = [each.grad for each in self.objective.parameters() if each.grad is not None]
        divided = [local(each) for each in gradients if isinstance(each, DTensor)]
        undivided = [each for each in gradients if not isinstance(each, DTensor)]
        square = _sum_of_squares(divided, self._context.ranks.device)
        dist.all_reduce(square, group=self._group)
        norm = (square + _sum_of_squares(undivided, square.device)).sqrt()
        if limit > 0 and gradients:
            torch._foreach_mul_([*divided, *undivided], torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def update_state(self, step: int, sums: Mapping[str, Tensor]) -> None:
        super().update_state(step, sums)
        self._whole.update_state(step, sums)  # which corrupts the rows

    def update_average(self, state: State) -> None:
        own = {name: local(tensor) for name, tensor in tensors_of(self.objective).items()}
        update_average(self._average, own, self._context.train.weight_average, state.averaged)

    def gather_full_state(self, state: State) -> None:
        if self._collected == state.step:
            return
        device, own = self._context.ranks.device, tensors_of(self.objective)
        self._whole.to(device)
        with torch.no_grad():
            load_model_tensors(
                self._whole, {name: whole(local(tensor), tensor) for name, tensor in own.items()}, "the divided model"
            )
        carried = self.objective.carry_state()
        if carried:
            self._whole.load_carry_state(carried)
        if self._average:
            state.average = {name: whole(tensor, own[name]) for name, tensor in self._average.items()}
        self._moments = self.optimizer.tensors(self._names)
        self._collected = state.step

    def save(self, state: State) -> None:
        context = self._context
        self._settle()
        carried = context.ranks.gather_first(self.objective.carry_state())
        parts: dict[str, Tensor | Part] = {}
        own = tensors_of(self.objective)
        for name, tensor in own.items():
            parts[divided_name(MODEL_FILE, name)] = _part(local(tensor), tensor)
        for name, tensor in self._average.items():
            parts[divided_name(AVERAGE_FILE, name)] = _part(tensor, own[name])
        for name, moment in self.optimizer.parts(self._names).items():
            parts[divided_name(OPTIMIZER_FILE, name)] = moment
        for each in reversed(carried):  # each rank has the memory of its own rows; what all share comes from rank 0
            parts |= {divided_name(CARRY_FILE, name): tensor for name, tensor in each.items()}
        if context.metrics_log is not None:
            context.metrics_log.sync()
        if self._writer is not None:
            folder, keep = context.folder / "checkpoints", context.train.keep_checkpoints
            self._writer.begin(folder, parts, described_state(context, state), keep)
        if state.finished:
            self._settle()

    def complete_write(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        self._settle()
        if self._writer is not None:
            self._writer.close()

    def _settle(self) -> None:
        """Wait for the checkpoint that was begun, on all ranks."""
        problem: CheckpointError | None = None
        try:
            if self._writer is not None:
                self._writer.wait()
        except CheckpointError as found:
            problem = found
        problem = next((each for each in self._context.ranks.gather(problem, waits=True) if each is not None), None)
        if problem is not None:
            raise problem

    def release_full_state(self) -> None:
        self._moments, self._collected = {}, -1
        if self._context.ranks.device.type != "cpu":
            self._whole.to("cpu")

    def moments(self) -> Mapping[str, Tensor]:
        return self._moments


class ShardedOptimizer(Optimizer):
    """Updates the parts of weights that this rank keeps; its moments are divided like them.

    Rules that look at a whole tensor get what they need of it, see `Shards`: for Muon the direction of its momentum is gathered,
    and every rank computes the same matrix and keeps its part.
    """

    def _gradient_of(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return local(parameter.grad)

    def _weight_of(self, parameter: nn.Parameter) -> Tensor:
        return local(parameter)

    def _division(self, moved: list[nn.Parameter]) -> Division:
        return Shards(moved)

    def _empty_moment(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(local(parameter), dtype=torch.float32)

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        return {
            key: whole(each.values, each.like) if isinstance(each, Part) else each.clone()
            for key, each in self.parts(names).items()
        }

    def parts(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor | Part]:
        """This rank's parts of the moments by parameter name, and those of weights that are whole on every rank."""
        own = {name: parameter for parameter, name in names.items()}
        return {key: _part(value, own[key.rpartition(".")[0]]) for key, value in super().tensors(names).items()}

    def _loaded_moment(self, value: Tensor, parameter: Tensor) -> Tensor:
        return part_of(value.to(local(parameter).device), parameter).clone()


@final
class Shards(Division):
    """Weights of which each rank has some rows, and others that are whole on every rank."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights

    def whole(self, number: int, part: Tensor) -> Tensor:
        return whole(part, self._weights[number])

    def part(self, number: int, whole: Tensor) -> Tensor:
        return part_of(whole, self._weights[number])

    def norms(self, parts: list[Tensor]) -> list[Tensor]:
        divided = [weight for weight in self._weights if isinstance(weight, DTensor)]
        if not divided:
            return super().norms(parts)
        own = torch.stack([torch.linalg.vector_norm(part) for part in parts]).square()
        sums = own.clone()
        dist.all_reduce(sums, group=_shards(divided[0]))
        is_divided = torch.tensor([isinstance(weight, DTensor) for weight in self._weights], device=own.device)
        return list(torch.where(is_divided, sums, own).sqrt().unbind())

    def sizes(self, parts: list[Tensor]) -> list[int]:
        return [weight.numel() for weight in self._weights]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once by name, divided or not."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def mesh_of(train: TrainConfig, ranks: Ranks) -> DeviceMesh:
    """The ranks among which weights are divided, and with 'hsdp' the groups of ranks that each have all of them.

    Raises:
        ConfigError: the ranks cannot be divided into at least two equal groups of at least two.
    """
    kind, size = ranks.device.type, ranks.world_size
    if train.parallel == "fsdp":
        return init_device_mesh(kind, (size,), mesh_dim_names=(_SHARD,))
    shards = shard_ranks(train, ranks)
    return init_device_mesh(kind, (size // shards, shards), mesh_dim_names=(_REPLICATE, _SHARD))


def shard_ranks(train: TrainConfig, ranks: Ranks) -> int:
    """Number of ranks in a group of 'hsdp'.

    Raises:
        ConfigError: the ranks cannot be divided into at least two equal groups of at least two.
    """
    size, machine = ranks.world_size, rank_environment().local_world_size
    chosen = train.shard_ranks or machine
    if size % chosen or chosen in (1, size):
        possible = [str(each) for each in range(2, size) if size % each == 0]
        origin = "train.shard_ranks" if train.shard_ranks else "the processes of this machine"
        raise ConfigError(
            "train.parallel is 'hsdp', which needs at least two equal groups of at least two processes; "
            f"found {size} processes, in groups of {chosen} ({origin})",
            hint=f"--set train.shard_ranks={possible[-1]}" if possible else "--set train.parallel=fsdp",
        )
    return chosen


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: all of it if it is not divided."""
    # Not by an operation of DTensor: their caches would keep the process group, with its threads, beyond its end.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, gathered from the ranks.

    Args:
        part: the part on this rank.
        like: the parameter that is divided in the same way; if it is not divided, the part is the whole.
    """
    if not isinstance(like, DTensor):
        return part
    group, rows = _shards(like), _rows(like)
    padded = part.new_zeros(rows, *like.shape[1:])
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered)[: len(like)]


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank keeps of a parameter `like` it."""
    if not isinstance(like, DTensor):
        return tensor
    begin = dist.get_rank(_shards(like)) * _rows(like)
    return tensor[begin : begin + _rows(like)]


def _shards(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that a parameter is divided among."""
    return parameter.device_mesh.get_group(_SHARD)


def _rows(parameter: DTensor) -> int:
    """Rows of a parameter on each rank; the last ranks may have fewer."""
    return -(-len(parameter) // dist.get_world_size(_shards(parameter)))


def _part(values: Tensor, like: Tensor) -> Tensor | Part:
    return Part(values, like) if isinstance(like, DTensor) else values


def _writer(ranks: Ranks, mesh: DeviceMesh) -> DividedWriter | None:
    """The writer of checkpoints; None on ranks whose weights others have, too, and write."""
    first = mesh.mesh.reshape(-1, mesh.size(-1))[0].tolist()
    group = dist.new_group(first, backend="gloo", timeout=LONGEST_WORK)
    if ranks.rank not in first:
        return None
    ranks.waiting.append(group)
    return DividedWriter(group)


def _forget_meshes() -> None:
    """Empty the caches of DTensor, which would keep process groups, with their threads, beyond their end."""
    gc.collect()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(present)).square().sum()
