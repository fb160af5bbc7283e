"""Settings of the encoder of ModernBERT."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from discern.models.config import LONGEST_SEQUENCE, HeadLayers, ModelConfig


class ModernBertConfig(ModelConfig):
    """Settings of encoder 'modernbert'. It has no table of segments, and no table of positions.

    Reference: Warner et al. 2024 (ModernBERT), section 2, and its released configurations.
    """

    changeable: ClassVar[frozenset[str]] = ModelConfig.changeable | {"initialization"}

    encoder: str = Field("modernbert", description="Architecture, by its name in the registry of encoders.")
    max_positions: int = Field(
        8192,
        ge=3,
        le=LONGEST_SEQUENCE,
        description="Longest sequence, as an export states it. Rotary positions set no limit of their own.",
    )
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the embeddings and of each sub-layer's output.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the attention probabilities.")
    layer_norm_epsilon: float = Field(1e-5, gt=0, description="Epsilon that LayerNorm adds to the variance. ModernBERT: 1e-5.")
    full_attention_every: int = Field(
        3,
        ge=1,
        description="In every n-th layer, beginning with the first, a token attends to its whole document; in the other layers, "
        "to a window around it. 1: no windows.",
    )
    local_window: int = Field(
        128,
        ge=2,
        le=LONGEST_SEQUENCE,
        description="Width of that window in tokens: a token attends to half as many on either side.",
    )
    full_rope_theta: float = Field(
        160_000.0, gt=1, description="Base of the rotary frequencies in layers of full attention. ModernBERT: 160,000."
    )
    local_rope_theta: float = Field(
        10_000.0, gt=1, description="Base of the rotary frequencies in layers with a window. ModernBERT: 10,000."
    )
    attention_bias: bool = Field(False, description="Biases in the projections of attention. initialization 'local' needs them.")
    feedforward_bias: bool = Field(False, description="Biases in the feed-forward layers.")
    norm_bias: bool = Field(False, description="Biases in the LayerNorms.")
    classifier_bias: bool = Field(False, description="Bias in the dense layer of the heads.")
    initialization: Literal["released", "local"] = Field(
        "released",
        description="Weights at step 0. 'released': as ModernBERT's. 'local': the biases of queries and keys make each attention "
        "head begin by attending to a near neighbor, which lets small networks leave the unigram plateau, and the layers that "
        "add to the residual are zero.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ModernBertConfig:
        width = self.hidden_size // self.num_heads
        if width % 2:
            even = [heads for heads in range(1, 129) if self.hidden_size % (2 * heads) == 0]
            allowed = f"set num_heads to one of {even}" if even else "choose an even hidden_size"
            raise ValueError(
                f"attention heads of width {width} (hidden_size {self.hidden_size} / num_heads {self.num_heads}) cannot be "
                f"rotated in pairs; {allowed}"
            )
        if self.initialization == "local" and not self.attention_bias:
            raise ValueError(
                "initialization 'local' aims the attention heads by the biases of queries and keys, and attention_bias is false; "
                "set attention_bias=true, or initialization=released"
            )
        return self

    def shrunk(self, width: float, depth: float) -> ModernBertConfig:
        """As for every encoder, with widths that are multiples of 8 if those here are: heads stay even, and products aligned."""
        found = super().shrunk(width, depth)
        sizes = found.model_dump()
        if found.hidden_size != self.hidden_size:
            hidden, inner = (_aligned(sizes[name], getattr(self, name)) for name in ("hidden_size", "feedforward_size"))
            heads = max(1, min(found.num_heads, hidden // 2))
            while hidden % (2 * heads):
                heads -= 1
            sizes |= {"hidden_size": hidden, "feedforward_size": inner, "num_heads": heads}
        return type(self).model_validate(sizes)

    def is_full(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has full attention."""
        return layer % self.full_attention_every == 0

    def output_std(self, inputs: int) -> float:
        """Standard deviation of the initial weights of the layers that add to the residual."""
        return self.linear_std(inputs) / math.sqrt(2 * self.num_layers)

    def head_layers(self) -> HeadLayers:
        return HeadLayers(
            bias=self.classifier_bias,
            norm_bias=self.norm_bias,
            token_norm="dense",
            dense_std=self.output_std(self.hidden_size),
            output_std=self.hidden_size**-0.5,
        )


def _aligned(size: int, whole: int) -> int:
    """The nearest multiple of 8 if the whole is one, else the next even number."""
    return max(8, 8 * round(size / 8)) if whole % 8 == 0 else size + size % 2
