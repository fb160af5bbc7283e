"""Reject weights that are not finite: with them, a network outputs NaN, null or a constant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from discern.errors import NumericsError


def check_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Make sure that no tensor holds NaN or an infinity.

    Args:
        source: the file that they stand in.

    Raises:
        NumericsError: one does; it is named.
    """
    for name, tensor in tensors.items():
        # A sum that is finite has finite terms only: one pass, and no copy. It may overflow where all terms are finite.
        if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float32)):
            continue
        wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        if wrong:
            kind = "NaN" if torch.isnan(tensor).any() else "infinite values"
            raise NumericsError(
                f"{source}: '{name}' holds {kind} ({wrong:,} of {tensor.numel():,} values are not finite)",
                hint="training diverged, or the file is damaged: go back to an earlier checkpoint, or make the model again",
            )
