"""Rotary positions: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The angles of the positions of a batch, for heads of width d.

    Attributes:
        cosine: (#B, L, d / 2) of each token, float32.
        sine: (#B, L, d / 2), likewise.
    """

    cosine: Float[Tensor, "#B L half"]
    sine: Float[Tensor, "#B L half"]

    def __call__(self, states: Float[Tensor, "B H L d"]) -> Float[Tensor, "B H L d"]:
        """Queries or keys, with their halves rotated against each other; in their own precision, computed in float32."""
        return _rotated(states, self.cosine[:, None], self.sine[:, None])

    def of_tokens(self, states: Float[Tensor, "T H d"]) -> Float[Tensor, "T H d"]:
        """The same for the tokens of all rows, T = B * L."""
        return _rotated(states, self.cosine.flatten(0, 1)[:, None], self.sine.flatten(0, 1)[:, None])


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.float().chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(states.dtype)


def frequencies(theta: float, width: int, device: torch.device | None = None) -> Float[Tensor, "half"]:
    """Radians per position of each pair of a head of `width`, the fastest first: theta^(-2j / width).

    Reference: Su et al. 2021 (RoFormer), section 3.2.2; computed as transformers does, for equal rounding.
    """
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)


def rotation(theta: float, width: int, positions: Int[Tensor, "#B L"]) -> Rotation:
    """The rotation of heads of `width` at these positions."""
    angles = positions[..., None].float() * frequencies(theta, width, positions.device)
    return Rotation(angles.cos(), angles.sin())
