"""FLOPs of a module's matrix products, counted by its type; a module of unknown type is an error."""

from __future__ import annotations

from torch import nn

from discern.errors import ConfigError
from discern.models.fused_ops import Dropout

_CONTAINERS = (nn.ModuleList, nn.Sequential)
# Lookups and element-wise operations count as 0, because they are not matrix products.
_NO_PRODUCTS = (nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, Dropout)


def module_flops(module: nn.Module, length: int) -> float:
    """FLOPs of the matrix products of a module's forward pass, per token of rows of `length` tokens.

    A product of m x n numbers counts 2 m n. A class of discern, or of another package, provides its count by a method
    `forward_flops(length)`.

    Raises:
        ConfigError: the type of the module, or of one inside it, is unknown here and has no such method.
    """
    count = getattr(module, "forward_flops", None)
    if count is not None:
        return float(count(length))
    if isinstance(module, nn.Linear):
        return 2.0 * module.in_features * module.out_features
    if isinstance(module, _CONTAINERS):
        return sum(module_flops(part, length) for part in module)
    if isinstance(module, _NO_PRODUCTS):
        return 0.0
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    raise ConfigError(
        f"the FLOPs of {name} are unknown",
        hint=f"give {type(module).__name__} a method forward_flops(length) that returns the FLOPs per token of a row",
    )


def parts_flops(length: int, *parts: nn.Module | None) -> float:
    """`module_flops` of several modules together."""
    return sum(module_flops(part, length) for part in parts if part is not None)


class SumOfParts(nn.Module):
    """A module whose products are those of its parts."""

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of a row of `length` tokens."""
        return parts_flops(length, *self.children())
