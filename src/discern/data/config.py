"""Settings of the stream of examples. None of them is fixed by the data set."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from discern.config.schema import OTHER_NAME, MixtureSchedule, Section, SizeSchedule, check_schedule, toml_value

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
    mixture: MixtureSchedule = Field(
        (),
        description="Weight of each --data in the tokens that are trained on, in segments that begin at a step or at a fraction "
        "of the run: [[0, [0.7, 0.3]], [0.8, [0.2, 0.8]]]. The weights of a segment need not sum to 1. Empty: the weights given "
        "with --data, or those of mixture_temperature.",
    )
    mixture_temperature: float = Field(
        1.0,
        ge=0.1,
        description="Without weights, a data set of n tokens has a weight proportional to n^(1/T). T = 1: by size; larger values "
        "favor small data sets, for example languages with little text. mT5 and XLM-R: n^0.3, T = 3.3.",
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
    reversed_rows: bool = Field(True, description="'two-part' only: read the text backwards in half of the rows.")

    def unread(self) -> dict[str, str]:
        of_segments = ("overflow", "short_sequence_probability", "single_segment_probability")
        needed = dict.fromkeys(of_segments, "segments") | {"reversed_rows": "two-part"}
        unread = {name: f"packing = '{packing}'" for name, packing in needed.items() if packing != self.packing}
        return unread | ({"mixture_temperature": "mixture = []"} if self.mixture else {})

    def at_length(self, sequence_length: int) -> DataConfig:
        """These settings for rows of one length."""
        return self.model_copy(update={"sequence_length": sequence_length, "length_schedule": ()})

    @model_validator(mode="after")
    def _check_rows(self) -> DataConfig:
        check_schedule("length_schedule", self.length_schedule, _SHORTEST)
        check_schedule("mixture", self.mixture, None)
        if any(len(weights) != len(self.mixture[0][1]) or not sum(weights) for _, weights in self.mixture):
            raise ValueError(
                f"mixture is {toml_value(self.mixture)}; expected in each segment a weight for each data set, one above 0, as in "
                "[[0, [0.7, 0.3]], [0.8, [0.2, 0.8]]]"
            )
        for length in (self.sequence_length, *(length for _, length in self.length_schedule)):
            if self.packing == "two-part" and (length % 2 or length < _SHORTEST_TWO_PART):
                raise ValueError(
                    f"packing 'two-part' needs an even sequence_length of at least {_SHORTEST_TWO_PART}, not {length}; set "
                    f"data.sequence_length={max(_SHORTEST_TWO_PART, length // 2 * 2)}, or that in data.length_schedule"
                )
        return self
