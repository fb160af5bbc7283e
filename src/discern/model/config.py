"""Sizes of an encoder, and how they shrink for a generator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from discern.config.base import Section

# Far beyond any published encoder: a slip of the hand or a damaged file is refused in words, before any memory is asked for.
_MOST_LAYERS = 1024
_LARGEST_WIDTH = 65_536
LONGEST_SEQUENCE = 1 << 20
"""Positions of a row, at most."""


class ModelConfig(Section):
    """Sizes of an encoder. ELECTRA, table 6; defaults are those of the small model."""

    encoder: str = Field("bert", description="Architecture, by its name in the registry of encoders.")
    num_layers: int = Field(12, ge=1, le=_MOST_LAYERS, description="Transformer blocks.")
    hidden_size: int = Field(256, ge=1, le=_LARGEST_WIDTH, description="Width of the hidden states.")
    embedding_size: int = Field(
        128, ge=1, le=_LARGEST_WIDTH, description="Width of the embeddings; projected where it differs from hidden_size."
    )
    num_heads: int = Field(4, ge=1, le=_LARGEST_WIDTH, description="Attention heads; must divide hidden_size.")
    feedforward_size: int = Field(1024, ge=1, le=16 * _LARGEST_WIDTH, description="Inner width of the feed-forward part.")
    max_positions: int = Field(512, ge=3, le=LONGEST_SEQUENCE, description="Rows of the position table: the longest sequence.")
    num_token_types: int = Field(2, ge=2, le=1024, description="Rows of the segment table.")
    hidden_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of embeddings and of each part's output.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the attention probabilities.")
    activation: Literal["gelu", "gelu-tanh", "relu", "silu"] = Field(
        "gelu",
        description="Between the two products of the feed-forward part. 'gelu': by the error function; 'gelu-tanh': by the "
        "hyperbolic tangent, as XLNet's released code computes it. Encoder 'bert' has 'gelu' alone.",
    )
    clamp_length: int = Field(
        0,
        ge=0,
        le=LONGEST_SEQUENCE,
        description="Encoder 'xlnet' only: distances beyond this many tokens are clamped to it; 0: no clamping. XLNet: 0.",
    )
    normalisation: Literal["post", "pre"] = Field(
        "post",
        description="Where the LayerNorms stand. 'post': after each residual, as in BERT and ELECTRA. 'pre': before each part, "
        "and once at the end; learns sooner at small scale.",
    )
    initialisation: Literal["released", "local"] = Field(
        "released",
        description="Weights at step 0. 'released': as in the released code. 'local': each attention head begins by looking at "
        "a near neighbour, which lets small networks leave the unigram plateau.",
    )
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the normal, cut at two of them.")
    layer_norm_epsilon: float = Field(1e-12, gt=0, description="Added to the variance. BERT and ELECTRA: 1e-12.")

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                f"set num_heads to one of {[n for n in range(1, 33) if self.hidden_size % n == 0]}"
            )
        return self

    def shrunk(self, width: float, depth: float) -> ModelConfig:
        """The same architecture with hidden size, feed-forward size and heads times `width`, layers times `depth`.

        The heads keep their width of 64 (or the hidden size, where that is smaller), as in the released code:
        256/4 heads at 1/4 -> 64/1; 768/12 at 1/3 -> 256/4; 1024/16 at 1/4 -> 256/4. The embedding size stays:
        the generator reads the discriminator's embeddings.
        """
        if width == 1.0 and depth == 1.0:
            return self
        hidden = max(1, round(self.hidden_size * width))
        heads = self.num_heads if width == 1.0 else max(1, hidden // 64)
        while hidden % heads:
            heads -= 1
        feedforward = max(1, round(self.feedforward_size * hidden / self.hidden_size))
        layers = max(1, round(self.num_layers * depth))
        return self.model_copy(
            update={"hidden_size": hidden, "num_heads": heads, "feedforward_size": feedforward, "num_layers": layers}
        )
