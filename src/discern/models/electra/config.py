"""Settings of the encoder of BERT and ELECTRA."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from discern.models.config import ModelConfig


class ElectraConfig(ModelConfig):
    """Settings of encoder 'bert', which BERT and ELECTRA share."""

    changeable: ClassVar[frozenset[str]] = ModelConfig.changeable | {"initialization"}

    normalization: Literal["post", "pre"] = Field(
        "post",
        description="Position of the LayerNorms. 'post': after each residual, as in BERT and ELECTRA. 'pre': before each "
        "sub-layer, and once at the end; learns sooner at small scale.",
    )
    initialization: Literal["released", "local"] = Field(
        "released",
        description="Weights at step 0. 'released': as in the released code. 'local': each attention head begins by attending "
        "to a near neighbor, which lets small networks leave the unigram plateau.",
    )
