"""Checkpoints that several ranks write together while training goes on, by `torch.distributed.checkpoint`.

Every rank writes its parts of the tensors to a safetensors file of its own, in a thread: training waits only until they are
copied to host memory. Rank 0 publishes the checkpoint when all files are complete, so that until then the one before is the
newest. Any number of processes can read it, one included.
"""

from __future__ import annotations

import copy
import socket
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from discern.errors import CheckpointError
from discern.storage.checksums import checksum
from discern.storage.files import sync_file
from discern.training import checkpoint


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor that is divided by its first dimension.

    Attributes:
        values: the rows on this rank.
        like: the parameter that is divided in the same way.
    """

    values: Tensor
    like: Tensor


class DividedWriter:
    """Writes the checkpoints of a run, one at a time.

    Args:
        group: the ranks that write, with a backend for host memory; rank 0 is the first of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[None] | None = None
        self._hosts: list[str] = self._gather(socket.gethostname())

    def begin(self, folder: Path, tensors: Mapping[str, Tensor | Part], state: Mapping[str, Any], keep: int) -> None:
        """Copy the tensors to host memory and begin to write `folder/step-XXXXXXXX`, when the one before is complete.

        Args:
            tensors: by name, as in `checkpoint.divided_name`. A whole tensor needs to be given by one rank only.
            state: as in `checkpoint.Contents`.
            keep: number of newest checkpoints to keep.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.wait()
        copies = {name: self._on_host(tensor) for name, tensor in tensors.items()}
        self._begun = self._thread.submit(self._write, folder, copies, copy.deepcopy(dict(state)), keep)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete.

        Raises:
            CheckpointError: it could not be written, on some rank; the earlier checkpoints are intact.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def close(self) -> None:
        """Wait for the thread, whether or not its work succeeded."""
        self._thread.shutdown()

    def _on_host(self, tensor: Tensor | Part) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor.detach().to("cpu", copy=True)
        values = tensor.values.detach().to("cpu", copy=True).contiguous()
        return DTensor.from_local(
            values, self._mesh, [Shard(0)], run_check=False, shape=tensor.like.shape, stride=tensor.like.stride()
        )

    def _write(self, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], keep: int) -> None:
        writes, step = dist.get_rank() == 0, int(state["step"])
        problem: str | None = None
        sums: dict[str, str] = {}
        try:
            if writes:
                checkpoint.make_partial(folder, step)
        except OSError as found:
            problem = str(found)
        partial = checkpoint.partial_folder(Path(self._gather(str(folder.absolute()))[0]), step)
        if problem is None and not partial.is_dir():
            problem = (
                f"{self._name(dist.get_rank())} does not see {partial}; the folder of a run must be on storage that all machines "
                f"share"
            )
        if not any(self._gather(problem)):
            try:
                writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
                state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group)
                own = partial.glob(f"shard-{dist.get_rank(self._group) + 1:05d}-*.safetensors")
                for path in own:
                    with path.open("rb") as file:
                        sync_file(file)
                    sums[path.name] = checksum(path)
            except CheckpointException as found:
                problem = self._reasons(found)
            except OSError as found:
                problem = f"{self._name(dist.get_rank())}: {found}"
        problems = [each for each in self._gather(problem) if each is not None]
        everything = {name: value for each in self._gather(sums) for name, value in each.items()}
        if writes and not problems:
            try:
                checkpoint.publish(folder, state, everything, keep)
            except OSError as found:
                problems.append(str(found))
        # The others learn whether it was published: all ranks stop, or none.
        problems = self._gather(problems)[0]
        if problems:
            if writes:
                checkpoint.discard_partial(folder, step)
            raise checkpoint.not_written(folder, step, problems[0])

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _reasons(self, problem: CheckpointException) -> str:
        """Which processes failed and why, without the tracebacks that torch adds."""
        failures = [f"{self._name(rank)}: {' '.join(str(error).split())[:300]}" for rank, (error, _) in problem.failures.items()]
        return "; ".join(sorted(failures)) or "torch.distributed.checkpoint gives no reason"

    def _name(self, rank: int) -> str:
        """A process, for messages."""
        return f"process {rank} on {self._hosts[rank]}"


def read_divided(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint that several ranks have written, by name. No process group is needed.

    Raises:
        CheckpointError: a file is damaged or cannot be read.
    """
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            for name, each in found.items()
            if isinstance(each, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what no_dist says
            state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (OSError, ValueError, RuntimeError, CheckpointException) as problem:
        raise CheckpointError(
            f"{folder} cannot be read: {problem}", hint="to use the previous checkpoint, remove this folder"
        ) from problem
    return tensors
