"""Which arithmetic the forward pass runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch


def resolve_precision(name: str, device: torch.device) -> str:
    """'float32' or 'bfloat16'; 'auto' takes bfloat16 where the device multiplies it faster than float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if device.type == "cpu" and _cpu_has_bfloat16() else "float32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in bfloat16; weights, softmax and losses stay float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _cpu_has_bfloat16() -> bool:
    """True where the processor has instructions for it; emulated, it would be slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
