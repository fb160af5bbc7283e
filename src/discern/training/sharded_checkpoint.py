"""Checkpoints that several ranks write together while training goes on, by `torch.distributed.checkpoint`.

Every rank writes its shards of the tensors to a safetensors file of its own, in a thread: training waits only until they are
copied to host memory. Rank 0 publishes the checkpoint when all files are complete, so that until then the one before is the
newest. Any number of processes can read it, one included.
"""

from __future__ import annotations

import copy
import socket
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from discern.errors import CheckpointError
from discern.storage.checksums import checksum
from discern.storage.files import sync_file
from discern.training import checkpoint


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
                tensors[checkpoint.sharded_name(file, name)] = tensor
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
