"""Settings of the stream of examples. None of them is fixed by the data set."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from discern.config.schedule import SizeSchedule, check_schedule
from discern.config.schema import OTHER_NAME, Section

_SHORTEST = 8
_SHORTEST_TWO_PART = 10  # a token for each of A and B beside [SEP] [SEP] [CLS] in the second half


class DataConfig(Section):
    """How the tokens of a data set become rows."""

    sequence_length: int = Field(
        128,
        ge=_SHORTEST,
        le=1 << 20,
        description="Positions per row. ELECTRA, table 6: 128 small, 512 base and large.",
        json_schema_extra={OTHER_NAME: "max_seq_length max_length"},
    )
    length_schedule: SizeSchedule = Field(
        (),
        description="Positions per row, in segments that begin at a step or at a fraction of the run: [[0, 128], [0.8, 512]]. "
        "The number of tokens per update stays the same. Empty: sequence_length throughout; otherwise that is the last length, "
        "which held-out rows always have.",
    )
    packing: Literal["segments", "packed", "two-part"] = Field(
        "segments",
        description="'segments': two-segment examples as the released code builds them, padded. "
        "'packed': documents back to back without padding, attention kept inside a document. "
        "'two-part': running text in the first half and `A [SEP] B [SEP] [CLS]` in the second.",
    )
    overflow: Literal["carry", "drop"] = Field(
        "carry",
        description="'segments' only: what happens to tokens beyond the end of the row. 'carry' moves them to the next "
        "example, so that an epoch sees every token once; 'drop' discards them, as the released code does.",
    )
    short_sequence_probability: float = Field(
        0.05,
        ge=0,
        le=1,
        description="'segments' only: fraction of examples with a random shorter target length. The released code: 0.05.",
    )
    single_segment_probability: float = Field(
        0.1, ge=0, le=1, description="'segments' only: fraction of examples built as one segment. The released code: 0.1."
    )
    reuse_length: int | None = Field(
        None,
        description="'two-part' only: positions of the first part, which the memory stores and at whose end the next row begins. "
        "Default: half of the row, the only length at which the memory has not seen the text to predict.",
    )
    reversed_rows: bool = Field(True, description="'two-part' only: read the text backwards in half of the rows.")

    def unread(self) -> dict[str, str]:
        needed = {"overflow": "segments", "short_sequence_probability": "segments", "single_segment_probability": "segments"}
        needed |= {"reuse_length": "two-part", "reversed_rows": "two-part"}
        return {name: f"packing = '{packing}'" for name, packing in needed.items() if packing != self.packing}

    def at_length(self, sequence_length: int) -> DataConfig:
        """These settings for rows of one length.

        Raises:
            ValueError: the packing has no rows of this length.
        """
        if not self.length_schedule and sequence_length == self.sequence_length:
            return self
        changed = {"sequence_length": sequence_length, "length_schedule": (), "reuse_length": None}
        return DataConfig.model_validate(self.model_dump() | changed)

    @model_validator(mode="after")
    def _rows_grow(self) -> DataConfig:
        check_schedule("length_schedule", self.length_schedule, _SHORTEST)
        return self

    @model_validator(mode="after")
    def _parts_are_halves(self) -> DataConfig:
        if self.packing != "two-part":
            return self
        for _, length in self.length_schedule:
            if length % 2 or length < _SHORTEST_TWO_PART:
                raise ValueError(
                    f"packing 'two-part' needs rows of an even length of at least {_SHORTEST_TWO_PART}, but length_schedule "
                    f"has {length}; set {max(_SHORTEST_TWO_PART, length // 2 * 2)} instead"
                )
        if self.sequence_length % 2 or self.sequence_length < _SHORTEST_TWO_PART:
            raise ValueError(
                f"packing 'two-part' needs an even sequence_length of at least {_SHORTEST_TWO_PART}, not {self.sequence_length}; "
                f"set data.sequence_length={max(_SHORTEST_TWO_PART, self.sequence_length // 2 * 2)}"
            )
        if self.reuse_length not in (None, self.sequence_length // 2):
            raise ValueError(
                f"reuse_length {self.reuse_length} is not half of sequence_length {self.sequence_length}; "
                f"set data.reuse_length={self.sequence_length // 2}, or leave it out"
            )
        return self
