"""The largest memory that this process has taken."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process otherwise; the largest until now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # What getrusage tells includes the process that started this one, where that was larger.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
