"""Weights, gradients and moments sharded among the ranks, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each block of an encoder is a unit, and everything else is another: embeddings, which networks may share, and heads. A unit's
matrices are gathered when it runs, forward and backward, and its gradients are reduced and sharded again. Vectors (biases, norms)
are replicated on every rank, because a block may end with the norm of the next one; they are less than a hundredth of a network.

A copy of the objective is sharded and trained. The run's own objective is not: `ShardedReplica.gather_full_state` brings
it up to date for checkpoints and evaluations, which are therefore those of a single process.

With `train.weight_precision = 'bfloat16-masters'`, shards are updated in float32, and gathered in bfloat16.

Reference: Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from discern.errors import CheckpointError
from discern.training.checkpoint import AVERAGE_FILE, CARRY_FILE, MODEL_FILE, OPTIMIZER_FILE, load_model_tensors
from discern.training.distributed import LONGEST_WORK
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.precision import matrices
from discern.training.replica import Prepare, Replica, num_shards, update_average
from discern.training.sharded_checkpoint import ShardedCheckpointWriter
from discern.training.state import State, TrainContext, described_state
from discern.training.update_rules import SHARD, full_norms, full_tensor, local, local_part


class ShardedReplica(Replica):
    """A shard of the objective on this rank; see the module."""

    model: FSDPModule  # type: ignore[assignment]

    def __init__(self, context: TrainContext, prepare: Prepare) -> None:
        self._context, self._full, ranks = context, context.objective, context.ranks
        self.objective = copy.deepcopy(context.objective)
        prepare(self.objective)

        # Shard
        shards = num_shards(context.train, ranks.world_size)
        sizes = {"replicate": ranks.world_size // shards, SHARD: shards}
        if context.train.parallel == "fsdp":
            sizes = {SHARD: shards}
        mesh = init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        policy, vectors = MixedPrecisionPolicy(), {weight for weight in self.objective.parameters() if weight.ndim < 2}
        if context.train.weight_precision == "bfloat16-masters":
            # Matrices are gathered as bfloat16 copies of the float32 shards, and their gradients summed in float32.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            vectors = set(self.objective.parameters()).difference(matrices(self.objective))
        blocks = {block: None for network in self.objective.networks().values() for block in network.encoder.repeated_blocks()}
        for module in (*blocks, self.objective):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=vectors)
        assert isinstance(self.objective, FSDPModule)
        self.model = self.objective

        # Optimizer and moments
        groups = parameter_groups(self.objective, context.optimizer, context.precision)
        self.optimizer = Optimizer(groups, context.optimizer)
        self._set_names([weight for weight in self.objective.parameters() if not isinstance(weight, DTensor)])
        self._moments: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}

        # Groups of 'hsdp' have the same weights, so the first one writes the checkpoints.
        writers = mesh.mesh.reshape(-1, shards)[0].tolist()
        group = dist.new_group(writers, backend="gloo", timeout=LONGEST_WORK)
        self._writer = ShardedCheckpointWriter(group) if ranks.rank in writers else None
        self.release_full_state()

    def begin_average(self, state: State) -> None:
        weights = tensors_of(self.objective)
        self._average = {name: local_part(tensor, weights[name]).clone() for name, tensor in state.average.items()}

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    def clip(self, limit: float) -> Tensor:
        weights = [weight for weight in self.objective.parameters() if weight.grad is not None]
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(full_norms(gradients, weights)))
        if limit > 0:
            torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def update_state(self, step: int, sums: Mapping[str, Tensor]) -> None:
        super().update_state(step, sums)
        self._full.update_state(step, sums)  # which corrupts the rows

    def update_average(self, state: State) -> None:
        weights = {name: local(tensor) for name, tensor in tensors_of(self.objective).items()}
        update_average(self._average, weights, self._context.train.weight_average, state.averaged)

    def gather_full_state(self, state: State) -> None:
        weights = tensors_of(self.objective)
        self._full.to(self._context.ranks.device)
        with torch.no_grad():
            full = {name: full_tensor(local(tensor), tensor) for name, tensor in weights.items()}
            load_model_tensors(self._full, full, "the sharded model")
        carried = self.objective.carry_state()
        if carried:
            self._full.load_carry_state(carried)
        if self._average:
            state.average = {name: full_tensor(tensor, weights[name]) for name, tensor in self._average.items()}
        self._moments = self.optimizer.tensors(self._names)

    def release_full_state(self) -> None:
        self._moments = {}
        if self._context.ranks.device.type != "cpu":
            self._full.to("cpu")

    def moments(self) -> Mapping[str, Tensor]:
        return self._moments

    def save(self, state: State) -> None:
        context, weights = self._context, tensors_of(self.objective)
        self._wait_for_all()
        carried = context.ranks.gather_first(self.objective.carry_state())
        if context.metrics_log is not None:
            context.metrics_log.sync()
        if self._writer is not None:
            files = {
                MODEL_FILE: {name: (local(tensor), tensor) for name, tensor in weights.items()},
                AVERAGE_FILE: {name: (tensor, weights[name]) for name, tensor in self._average.items()},
                OPTIMIZER_FILE: self.optimizer.shards(self._names),
                # Each rank has the memory of its own rows; what all share comes from rank 0.
                CARRY_FILE: {name: (tensor, tensor) for memory in reversed(carried) for name, tensor in memory.items()},
            }
            folder, keep = context.folder / "checkpoints", context.train.keep_checkpoints
            self._writer.begin(folder, files, described_state(context, state), keep)
        if state.finished:
            self._wait_for_all()

    def complete_write(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        self._wait_for_all()
        if self._writer is not None:
            self._writer.close()

    def _wait_for_all(self) -> None:
        failure: CheckpointError | None = None
        try:
            self.complete_write()
        except CheckpointError as problem:
            failure = problem
        for error in self._context.ranks.gather(failure, waits=True):
            if error is not None:
                raise error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once by name, sharded or not."""
    return dict([*model.named_parameters(), *model.named_buffers()])
