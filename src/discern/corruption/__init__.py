"""Choice of positions to corrupt and of replacements: pure functions on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from discern.registry import Registry

if TYPE_CHECKING:
    from discern.corruption.masking import Chosen, MaskingContext
    from discern.types import TokenBatch

# Naming a masking imports no torch.
maskings: Registry[Callable[[TokenBatch, MaskingContext], Chosen]] = Registry("masking")
for _name in ("uniform", "with-replacement", "whole-word", "span", "rarity", "entropy"):
    maskings.register(_name, f"{__name__}.masking:{_name.replace('-', '_')}")
