"""What the devices of this machine are called, and how much energy they use.

This is the only module that names `torch.cuda` or `torch.mps`.

torch calls NVIDIA's and AMD's GPUs "cuda", and Apple's "mps". Elsewhere, `torch.get_device_module` reaches what "cuda" alone has.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from discern.training.process import rank_environment


def best_device() -> str:
    """The device that 'auto' stands for."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu"


def gpu_names() -> list[str]:
    """The GPUs of this machine, by device: "cuda:0 (NVIDIA H200)"."""
    if torch.mps.is_available():
        return [f"mps ({processor_name()})"]
    return [f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(torch.cuda.device_count())]


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor, of which Apple's GPU is a part."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    name = info.read_text(errors="replace").partition("model name")[2].partition("\n")[0].lstrip("\t :") if info.exists() else ""
    return name or platform.processor() or platform.machine()


def energy(device: torch.device, root: Path = Path("/sys/class/powercap")) -> Iterator[float]:
    """Yield the joules that the processors of this machine and a GPU have used since the first reading; NaN if it does not tell.

    Processors: Linux's counters of whole packages (RAPL), which often only root may read. They include what other programs use,
    and begin anew after minutes, so they must be read more often. GPU: NVML, if the package pynvml is installed; without it, the
    energy of the processors alone would be misleading.

    Args:
        root: folder of the processors' counters.
    """
    gpu = partial(_gpu_millijoules, device)
    counters: list[Any] = [(gpu, 1 << 64, 1e3)] if device.type == "cuda" else []
    for name in root.glob("intel-rapl:*/name"):
        if name.read_text().startswith("package-"):
            limit = int(name.with_name("max_energy_range_uj").read_text())
            # The ranks of a machine read the same, so each counts its part.
            counters.append((name.with_name("energy_uj").read_text, limit, 1e6 * rank_environment().local_world_size))
    last: dict[Any, int] = {}
    used = 0.0
    while True:
        for read, limit, unit in counters:
            with suppress(Exception):  # of any kind: permission, package and driver are not ours
                now = int(read())
                used += (now - last.get(read, now)) % limit / unit
                last[read] = now
        counters = [counter for counter in counters if counter[0] in last]  # those that the first reading could read
        yield used if last and (device.type != "cuda" or gpu in last) else math.nan


def _gpu_millijoules(device: torch.device) -> int:
    nvml = import_module("pynvml")
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return int(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
