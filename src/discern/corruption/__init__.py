"""Which positions are corrupted, and with what: pure functions on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from discern.registry import Registry

# A masking takes (TokenBatch, mask_probability, Randomness) and gives the chosen positions, bool (B, L).
maskings: Registry[Callable[..., Any]] = Registry("masking")
maskings.register("uniform", "discern.corruption.masking:uniform")
