"""A check for weights that are not finite, with which a network outputs NaN or a constant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from discern.errors import NumericsError


def check_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Check that no tensor contains NaN or infinite values.

    Args:
        source: file that contains the tensors.

    Raises:
        NumericsError: a tensor does; the message names it.
    """
    for name, tensor in tensors.items():
        # A finite sum has finite terms only, which takes one pass and no copy. A sum may overflow even if all terms are finite.
        if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float32)):
            continue
        wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        if wrong:
            kind = "NaN" if torch.isnan(tensor).any() else "infinite values"
            raise NumericsError(
                f"{source}: '{name}' holds {kind} ({wrong:,} of {tensor.numel():,} values are not finite)",
                hint="training diverged, or the file is damaged: go back to an earlier checkpoint, or create the model again",
            )
