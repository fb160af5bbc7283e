"""Settings of the encoder of DeBERTa."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from discern.models.config import LONGEST_SEQUENCE, HeadLayers, ModelConfig


class DebertaConfig(ModelConfig):
    """Settings of encoder 'deberta'. Their names are those of transformers; the defaults are those of DeBERTaV3.

    Reference: He et al. 2021 (DeBERTa; DeBERTaV3), and their released configurations.
    """

    changeable: ClassVar[frozenset[str]] = ModelConfig.changeable | {"mask_decoder"}

    encoder: str = Field("deberta", description="Architecture, by its name in the registry of encoders.")
    max_positions: int = Field(
        512,
        ge=3,
        le=LONGEST_SEQUENCE,
        description="Rows of the table of absolute positions; without one, the longest sequence that an export states.",
    )
    num_token_types: int = Field(0, ge=0, le=1024, description="Rows of the segment table; 0: segments are not told apart.")
    layer_norm_epsilon: float = Field(1e-7, gt=0, description="Epsilon that LayerNorm adds to the variance. DeBERTa: 1e-7.")
    position_buckets: int = Field(
        256,
        ge=0,
        le=LONGEST_SEQUENCE,
        description="Buckets of distances in each direction: those up to half as many tokens have one each, longer ones share "
        "them on a logarithmic scale. 0: a bucket for each distance below max_relative_positions.",
    )
    max_relative_positions: int = Field(
        0, ge=0, le=LONGEST_SEQUENCE, description="Distance from which on all have the same vector; 0: max_positions."
    )
    pos_att_type: Literal["c2p|p2c", "c2p", "p2c"] = Field(
        "c2p|p2c",
        description="Terms of the attention scores with positions: content to position, position to content, or both.",
    )
    share_att_key: bool = Field(
        True, description="Project the vectors of distances with the matrices of queries and keys, not with their own."
    )
    norm_rel_ebd: Literal["layer_norm", "none"] = Field(
        "layer_norm", description="Normalization of the vectors of distances before they are projected."
    )
    position_biased_input: bool = Field(False, description="Add absolute positions to the embeddings. DeBERTaV3: false.")
    conv_kernel_size: int = Field(
        0, ge=0, le=1025, description="Tokens that a convolution beside the first block reads; 0: none. DeBERTa-v2-xlarge: 3."
    )
    conv_act: Literal["tanh", "gelu"] = Field("tanh", description="Activation of that convolution.")
    mask_decoder: bool = Field(
        False,
        description="Predict words through the enhanced mask decoder, as DeBERTaV3's generator does: the last block runs twice, "
        "its queries beginning as the states before it plus absolute positions.",
    )

    @model_validator(mode="after")
    def _positions_go_together(self) -> DebertaConfig:
        if self.conv_kernel_size and self.conv_kernel_size % 2 == 0:
            raise ValueError(f"conv_kernel_size is {self.conv_kernel_size}; it must be odd, or 0")
        if 0 < self.position_buckets < 4:
            raise ValueError(f"position_buckets is {self.position_buckets}; it must be 4 or more, or 0")
        if self.position_buckets and self.position_buckets // 2 >= self.longest_distance - 1:
            raise ValueError(
                f"position_buckets is {self.position_buckets}, too many for distances below {self.longest_distance}; set it to "
                f"at most {2 * self.longest_distance - 3}, or to 0"
            )
        if self.mask_decoder and self.position_biased_input:
            raise ValueError("mask_decoder adds the positions that position_biased_input adds already; set one of them to false")
        return self

    @property
    def longest_distance(self) -> int:
        """Distance from which on all have the same vector."""
        return self.max_relative_positions or self.max_positions

    @property
    def distance_rows(self) -> int:
        """Rows of the table of vectors of distances."""
        return 2 * (self.position_buckets or self.longest_distance)

    def head_layers(self) -> HeadLayers:
        return HeadLayers(token_norm="context")
