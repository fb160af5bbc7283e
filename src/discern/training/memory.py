"""Peak memory of this process, and the memory of the machine."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch


def machine_memory(device: torch.device) -> int | None:
    """Bytes of memory of the GPU, or else of the machine or the limit of its container; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # no such name on this system
        return None
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return installed
    return min(installed, int(allowed)) if allowed.isdecimal() else installed


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: of tensors on a GPU, or else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # getrusage would include the peak of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def lacks_memory(problem: BaseException) -> bool:
    """Whether an error means that the memory of the device, or of the machine, is used up."""
    return isinstance(problem, torch.OutOfMemoryError) or (
        isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem)
    )
