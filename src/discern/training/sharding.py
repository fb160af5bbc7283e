"""Weights, gradients and moments sharded among the ranks, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each block of an encoder is a unit, and everything else is another: embeddings, which networks may share, and heads. A unit's
matrices are gathered when it runs, forward and backward, and its gradients are reduced and sharded again. Vectors (biases, norms)
are replicated on every rank, because a block may end with the norm of the next one; they are less than a hundredth of a network.

A copy of the objective is sharded and trained. The run's own objective is not: `ShardedReplica.gather_full_state` brings
it up to date for checkpoints and evaluations, which are therefore those of a single process.

The ranks write a checkpoint together while training goes on, by `torch.distributed.checkpoint`: every rank writes its shards to
a safetensors file of its own, in a thread, so training waits only until they are copied to host memory. Rank 0 publishes the
checkpoint when all files are complete; until then the one before is the newest. Any number of processes can read it.

Reference: Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

import copy
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from discern.errors import CheckpointError
from discern.storage.checksums import checksum
from discern.storage.files import sync_file
from discern.training import checkpoint
from discern.training.checkpoint import AVERAGE_FILE, CARRY_FILE, MODEL_FILE, OPTIMIZER_FILE, load_model_tensors, model_tensors
from discern.training.distributed import LONGEST_WORK
from discern.training.execution import compile_encoders
from discern.training.optimizer import Optimizer, full_tensor, local, local_part, parameter_groups
from discern.training.state import Replica, State, TrainContext, described_state, update_average


class ShardedReplica(Replica):
    """A shard of the objective on this rank; see the module."""

    model: FSDPModule  # type: ignore[assignment]

    def __init__(self, context: TrainContext) -> None:
        self._context, self._full, ranks = context, context.objective, context.ranks
        self.objective = copy.deepcopy(context.objective)
        if context.compiled:
            compile_encoders(self.objective)
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        blocks = {block: None for network in self.objective.networks().values() for block in network.encoder.repeated_blocks()}
        vectors = {weight for weight in self.objective.parameters() if weight.ndim < 2}
        for module in (*blocks, self.objective):
            fully_shard(module, mesh=mesh, ignored_params=vectors)
        assert isinstance(self.objective, FSDPModule)
        self.model = self.objective
        self.optimizer = Optimizer(parameter_groups(self.objective, context.optimizer, context.precision), context.optimizer)
        self._average: dict[str, Tensor] = {}
        self._writer = ShardedCheckpointWriter(dist.new_group(backend="gloo", timeout=LONGEST_WORK))
        self.release_full_state()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield
        if last:  # the gradients of vectors, which FSDP leaves alone
            vectors = [weight for weight in self.objective.parameters() if not isinstance(weight, DTensor)]
            gradients = [weight.grad for weight in vectors if weight.grad is not None]
            for exchange in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
                exchange.wait()
            torch._foreach_div_(gradients, dist.get_world_size())

    def update_average(self, state: State) -> None:
        weights = model_tensors(self.objective)
        if not self._average:  # of an earlier session
            self._average = {name: local_part(tensor, weights[name]).clone() for name, tensor in state.average.items()}
        parts = {name: local(tensor) for name, tensor in weights.items()}
        update_average(self._average, parts, self._context.train.weight_average, state.averaged)

    def gather_full_state(self, state: State) -> None:
        weights = model_tensors(self.objective)
        self._full.to(self._context.ranks.device)
        with torch.no_grad():
            full = {name: full_tensor(local(tensor), tensor) for name, tensor in weights.items()}
            load_model_tensors(self._full, full, "the sharded model")
        carried = self.objective.carry_state()
        if carried:
            self._full.load_carry_state(carried)
        if self._average:
            state.average = {name: full_tensor(tensor, weights[name]) for name, tensor in self._average.items()}

    def release_full_state(self) -> None:
        if self._context.ranks.device.type != "cpu":
            self._full.to("cpu")

    def save(self, state: State) -> None:
        context, weights = self._context, model_tensors(self.objective)
        self._wait_for_all()
        carried = context.ranks.gather_first(self.objective.carry_state())
        if context.metrics_log is not None:
            context.metrics_log.sync()
        files = {
            MODEL_FILE: {name: (local(tensor), tensor) for name, tensor in weights.items()},
            AVERAGE_FILE: {name: (tensor, weights[name]) for name, tensor in self._average.items()},
            OPTIMIZER_FILE: self.optimizer.shards(),
            # Each rank has the memory of its own rows; what all share comes from rank 0.
            CARRY_FILE: {name: (tensor, tensor) for memory in reversed(carried) for name, tensor in memory.items()},
        }
        keep = context.train.keep_checkpoints
        self._writer.begin(context.folder / "checkpoints", files, described_state(context, state), keep)
        if state.finished:
            self._wait_for_all()

    def complete_write(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        self._wait_for_all()
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


class ShardedCheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    Args:
        group: the ranks that write, with a backend for host memory; rank 0 is the first of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._processes: list[str] = self._gather(f"process {dist.get_rank()} on {socket.gethostname()}")

    def begin(
        self, folder: Path, files: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], state: Mapping[str, Any], keep: int
    ) -> None:
        """Copy the tensors to host memory and begin to write `folder/step-XXXXXXXX`. No other checkpoint may be pending.

        Args:
            files: this rank's rows and a tensor that is sharded in the same way, by name, by the file in which one process writes
                them. If that tensor is no DTensor, the rows are the full tensor, which only one rank needs to give.
            state: as in `checkpoint.Contents`.
            keep: number of newest checkpoints to keep.
        """
        tensors: dict[str, Tensor] = {}
        for file, shards in files.items():
            for name, (rows, like) in shards.items():
                tensor = rows.detach().to("cpu", copy=True).contiguous()
                if isinstance(like, DTensor):
                    tensor = DTensor.from_local(
                        tensor, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
                    )
                tensors[f"{file.removesuffix('.safetensors')}/{name}"] = tensor
        self._pending = self._thread.submit(self._write, folder, tensors, copy.deepcopy(dict(state)), keep)

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete.

        Raises:
            CheckpointError: it could not be written, on some rank; the earlier checkpoints are intact.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the thread, whether or not its work succeeded."""
        self._thread.shutdown()

    def _write(self, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], keep: int) -> None:
        first, step = dist.get_rank() == 0, int(state["step"])
        try:
            # Rank 0 makes a folder, which all must see.
            self._on_all_ranks(lambda: checkpoint.make_partial(folder, step) if first else None)
            partial = checkpoint.partial_folder(self._gather(folder.absolute())[0], step)
            self._on_all_ranks(partial.stat)
            # Every rank writes its shards.
            sums = self._on_all_ranks(lambda: self._write_shards(partial, tensors))
            # Rank 0 publishes. The others learn whether it has: all ranks stop, or none.
            checksums = {name: value for own in sums for name, value in own.items()}
            self._on_all_ranks(lambda: checkpoint.publish(folder, state, checksums, keep) if first else None)
        except OSError as problem:
            if first:
                checkpoint.discard_partial(folder, step)
            raise checkpoint.not_written(folder, step, str(problem)) from None

    def _write_shards(self, partial: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Write this rank's shards. Return the checksums of its files by name."""
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group)
        sums: dict[str, str] = {}
        for path in partial.glob(f"shard-{dist.get_rank(self._group) + 1:05d}-*.safetensors"):
            with path.open("rb") as file:
                sync_file(file)
            sums[path.name] = checksum(path)
        return sums

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action on all ranks. Return its results by rank; raise OSError on all ranks if it fails on one."""
        result, problems = None, list[str]()
        try:
            result = action()
        except CheckpointException as error:  # without the tracebacks that torch adds
            reasons = {rank: " ".join(str(reason).split())[:300] for rank, (reason, _) in error.failures.items()}
            problems = [f"{self._processes[rank]}: {reason}" for rank, reason in sorted(reasons.items())] or [str(error)]
        except OSError as error:
            problems = [f"{self._processes[dist.get_rank(self._group)]}: {error}"]
        results = self._gather((result, problems))
        failed = next((problems for _, problems in results if problems), None)
        if failed:
            raise OSError("; ".join(failed))
        return [result for result, _ in results]

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


def read_sharded(folder: Path) -> dict[str, Tensor]:
    """The full tensors of a checkpoint that several ranks have written, by name. No process group is needed.

    Raises:
        CheckpointError: a file is damaged or cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        metadata = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what no_dist says
            state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=True)
    except (OSError, ValueError, RuntimeError, CheckpointException) as problem:
        raise CheckpointError(
            f"{folder} cannot be read: {problem}", hint="to use the previous checkpoint, remove this folder"
        ) from problem
    return tensors
