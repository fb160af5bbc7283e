"""Settings that every encoder has, how they shrink for a generator, and the lookup of an encoder's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from discern.config.schema import Section
from discern.models import encoders

# Far beyond any published encoder. A typing error or a damaged file is refused with a message, before memory is requested.
_MAX_LAYERS = 1024
_MAX_WIDTH = 65_536
LONGEST_SEQUENCE = 1 << 20
"""Maximum number of positions of a row."""


@dataclass(frozen=True)
class HeadLayers:
    """Layers of the heads on an encoder, before their last one: dense, GELU, LayerNorm.

    Attributes:
        bias: whether the dense layer has a bias.
        norm_bias: whether the LayerNorm has one.
        token_norm: where a head with one number per token has a LayerNorm; a head over the vocabulary always has it after the
            dense layer. 'context': on the sum with the state of the text's first token, before the dense layer (DeBERTaV3).
        dense_std: standard deviation of the initial weights of the dense layer; None: that of any linear layer.
        output_std: that of the last layer of a head with one number per token; None: Glorot uniform.
    """

    bias: bool = True
    norm_bias: bool = True
    token_norm: Literal["none", "dense", "context"] = "none"
    dense_std: float | None = None
    output_std: float | None = None


class ModelConfig(Section):
    """Base of every encoder's `Config`. ELECTRA, table 6; the defaults are those of the small model.

    An encoder adds its own settings in a subclass, see `discern.models.electra.config`.

    Attributes:
        changeable: settings that may differ when training continues from given weights; the weights fix all others.
    """

    changeable: ClassVar[frozenset[str]] = frozenset({"hidden_dropout", "attention_dropout", "initializer_range"})

    encoder: str = Field("bert", description="Architecture, by its name in the registry of encoders.")
    num_layers: int = Field(12, ge=1, le=_MAX_LAYERS, description="Transformer blocks.")
    hidden_size: int = Field(256, ge=1, le=_MAX_WIDTH, description="Width of the hidden states.")
    embedding_size: int = Field(
        128, ge=1, le=_MAX_WIDTH, description="Width of the embeddings; projected if it differs from hidden_size."
    )
    num_heads: int = Field(4, ge=1, le=_MAX_WIDTH, description="Attention heads; must divide hidden_size.")
    feedforward_size: int = Field(1024, ge=1, le=16 * _MAX_WIDTH, description="Inner width of the feed-forward layers.")
    max_positions: int = Field(
        512, ge=3, le=LONGEST_SEQUENCE, description="Rows of the position table, that is, the longest sequence."
    )
    num_token_types: int = Field(2, ge=2, le=1024, description="Rows of the segment table, that is, the number of token types.")
    hidden_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the embeddings and of each sub-layer's output.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the attention probabilities.")
    initializer_range: float = Field(
        0.02,
        gt=0,
        description="Standard deviation of the normal distribution of initial weights, truncated at two standard deviations.",
    )
    layer_norm_epsilon: float = Field(
        1e-12, gt=0, description="Epsilon that LayerNorm adds to the variance. BERT and ELECTRA: 1e-12."
    )

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                f"set num_heads to one of {[n for n in range(1, 33) if self.hidden_size % n == 0]}"
            )
        return self

    def fixed(self) -> dict[str, Any]:
        """The settings that the weights fix, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in self.changeable}

    def linear_std(self, inputs: int) -> float:
        """Standard deviation of the initial weights of a linear layer with this number of inputs."""
        return inputs**-0.5 if getattr(self, "initialization", "released") == "local" else self.initializer_range

    def head_layers(self) -> HeadLayers:
        """Layers of the heads on this encoder. Those of BERT and ELECTRA by default."""
        return HeadLayers()

    @property
    def smaller_than_electra_small(self) -> bool:
        """Whether the encoder is narrower than ELECTRA-Small (12 layers of 256; Clark et al. 2020, table 6), or shallower."""
        return self.hidden_size < 256 or (self.hidden_size == 256 and self.num_layers < 12)

    def shrunk(self, width: float, depth: float) -> ModelConfig:
        """The same architecture with hidden size, feed-forward size and heads times `width`, layers times `depth`.

        The heads keep their width of 64 (or the hidden size, if that is smaller), as in the released code:
        256/4 heads at 1/4 -> 64/1; 768/12 at 1/3 -> 256/4; 1024/16 at 1/4 -> 256/4. The embedding size stays:
        the generator reads the discriminator's embeddings.
        """
        hidden = max(1, round(self.hidden_size * width))
        heads = self.num_heads if width == 1.0 else max(1, hidden // 64)
        while hidden % heads:
            heads -= 1
        feedforward = max(1, round(self.feedforward_size * hidden / self.hidden_size))
        layers = max(1, round(self.num_layers * depth))
        return self.model_copy(
            update={"hidden_size": hidden, "num_heads": heads, "feedforward_size": feedforward, "num_layers": layers}
        )


def config_class(encoder: str) -> type[ModelConfig]:
    """The `Config` of an encoder, by its registered name.

    Raises:
        ConfigError: there is no such encoder; the hint names the nearest.
    """
    return encoders.load(encoder).Config  # type: ignore[no-any-return]


def build_config(values: Mapping[str, Any] | None = None, **more: Any) -> ModelConfig:
    """The validated settings of the encoder that `encoder` names among the values, 'bert' by default.

    Raises:
        ConfigError: there is no such encoder.
        pydantic.ValidationError: a value is wrong, or the encoder has no such setting.
    """
    given = {**(values or {}), **more}
    return config_class(given.get("encoder", ModelConfig.model_fields["encoder"].default)).model_validate(given)
