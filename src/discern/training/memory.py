"""Peak memory of this process, and the error for a step that does not fit."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from discern.errors import ConfigError
from discern.training.config import TrainConfig


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: of tensors on a GPU, or else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # getrusage would include the peak of the process that started this one.
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def lacks_memory(problem: BaseException) -> bool:
    """Whether an error means that the memory of the device, or of the machine, is used up."""
    return isinstance(problem, torch.OutOfMemoryError) or (
        isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem)
    )


def out_of_memory(train: TrainConfig, world_size: int, device: torch.device, step: int | None = None) -> ConfigError:
    """The error for a step that does not fit into memory.

    Args:
        step: number of the step, if it belongs to a run.
    """
    rows = train.micro_batch_size or train.sequences_per_step // world_size
    smaller = f"--set train.micro_batch_size={rows // 2}, which computes each step in smaller batches, or " if rows > 1 else ""
    return ConfigError(
        ("" if step is None else f"step {step}: ") + f"there is not enough memory on {device} for {rows:,} rows at once",
        hint=f"{smaller}--set train.gradient_checkpointing=true, a shorter data.sequence_length, or a smaller model",
    )
