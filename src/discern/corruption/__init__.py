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
maskings.register("uniform", "discern.corruption.masking:uniform")
maskings.register("with-replacement", "discern.corruption.masking:with_replacement")
maskings.register("whole-word", "discern.corruption.masking:whole_word")
maskings.register("span", "discern.corruption.masking:span")
maskings.register("rarity", "discern.corruption.masking:rarity")
maskings.register("entropy", "discern.corruption.masking:entropy")
