"""Settings of the stream of examples. The data set itself fixes none of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from discern.config.base import Section


class DataConfig(Section):
    """How the tokens of a data set become rows."""

    sequence_length: int = Field(128, ge=8, description="Positions a row. ELECTRA, table 6: 128 small, 512 base and large.")
    packing: Literal["segments", "packed"] = Field(
        "segments",
        description="'segments': two-segment examples as the released code builds them, padded. "
        "'packed': documents back to back without padding, attention kept inside a document.",
    )
    overflow: Literal["carry", "drop"] = Field(
        "carry",
        description="'segments' only: what happens to the tokens of the last sentence beyond the row. 'carry' gives them "
        "to the next example, so that an epoch sees every token once; 'drop' loses them, as the released code does.",
    )
    short_sequence_probability: float = Field(
        0.05,
        ge=0,
        le=1,
        description="'segments' only: share of examples with a random shorter target length. Released code: 0.05.",
    )
    single_segment_probability: float = Field(
        0.1, ge=0, le=1, description="'segments' only: share of examples built as one segment. Released code: 0.1."
    )
