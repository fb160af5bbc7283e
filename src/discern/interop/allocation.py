"""Allocation of memory for a model's weights, only if the files are large enough to fill it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from discern.errors import CheckpointError
from discern.interop.names import CONFIG_NAME

_SUFFIXES = (".safetensors", ".bin")


def allocate(network: nn.Module, folder: Path) -> None:
    """Give a network that was built on the device `meta` its memory on the CPU, its values not yet set.

    Args:
        folder: that the weights stand in.

    Raises:
        CheckpointError: config.json speaks of more parameters than the files have bytes: it is damaged, or of another model.
    """
    needed = sum(parameter.numel() for parameter in network.parameters())
    present = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if needed > present:
        raise CheckpointError(
            f"{folder / CONFIG_NAME} describes {needed:,} parameters, but the weights beside it are {present:,} bytes",
            hint=f"{CONFIG_NAME} and the weights must come from the same model: export or download it again",
        )
    network.to_empty(device="cpu")
