"""Settings of the XLNet encoder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from discern.models.config import LONGEST_SEQUENCE, ModelConfig


class XLNetConfig(ModelConfig):
    """Settings of encoder 'xlnet'. It has no tables of positions and segments, and reads neither of their sizes."""

    encoder: str = Field("xlnet", description="Architecture, by its name in the registry of encoders.")
    activation: Literal["gelu", "gelu-tanh", "relu", "silu"] = Field(
        "gelu",
        description="Activation of the feed-forward layers. 'gelu': by the error function; 'gelu-tanh': by the hyperbolic "
        "tangent, as XLNet's released code computes it.",
    )
    clamp_length: int = Field(
        0,
        ge=0,
        le=LONGEST_SEQUENCE,
        description="Distances beyond this many tokens are clamped to it; 0: no clamping. XLNet: 0.",
    )
