"""The composed configuration of a pre-training run, from the sections that live beside their owners."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from discern.config.base import Section
from discern.data.config import DataConfig
from discern.model import encoders
from discern.model.config import ModelConfig
from discern.model.embeddings import PlacedEmbeddings
from discern.objectives import objectives
from discern.objectives.config import ObjectiveConfig
from discern.training.config import OptimizerConfig, TrainConfig

_SEGMENTS_OF_TWO_PARTS = 3  # text and A, B, [CLS]


class PretrainConfig(Section):
    """Everything that decides what a pre-training run computes, apart from its data set."""

    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: SerializeAsAny[ObjectiveConfig]
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    @field_validator("objective", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """The objective's own configuration class, found by its name."""
        if isinstance(value, dict) and "name" in value:
            return objectives.load(value["name"]).Config.model_validate(value)
        return value

    @model_validator(mode="after")
    def _rows_suit(self) -> PretrainConfig:
        """Rows, encoder, objective and batch go together."""
        data, train = self.data, self.train
        self.objective.check(data, self.model)
        if data.packing == "two-part" and data.reversed_rows and not _reads_backwards(self.model):
            raise ValueError(
                f"half of the rows of data.packing 'two-part' run backwards, which model.encoder '{self.model.encoder}' cannot "
                "be told; set data.reversed_rows=false"
            )
        if data.packing == "two-part" and _has_segment_table(self.model) and self.model.num_token_types < _SEGMENTS_OF_TWO_PARTS:
            raise ValueError(
                f"rows of data.packing 'two-part' have {_SEGMENTS_OF_TWO_PARTS} segments, but model.num_token_types is "
                f"{self.model.num_token_types}; set model.num_token_types={_SEGMENTS_OF_TWO_PARTS}"
            )
        if not self.objective.reads_in_order:
            return self
        if data.reversed_rows and train.sequences_per_step % 2:
            raise ValueError(
                f"train.sequences_per_step {train.sequences_per_step} cannot be as many slots forwards as backwards; set "
                f"train.sequences_per_step={train.sequences_per_step + 1}, or data.reversed_rows=false"
            )
        if train.micro_batch_size is not None and train.sequences_per_step % train.micro_batch_size:
            raise ValueError(
                f"the {train.sequences_per_step} slots of train.sequences_per_step are no multiple of train.micro_batch_size "
                f"{train.micro_batch_size}; set train.micro_batch_size to a number that divides them"
            )
        return self


def _reads_backwards(model: ModelConfig) -> bool:
    return encoders.load(model.encoder).reads_backwards  # type: ignore[attr-defined, no-any-return]


def _has_segment_table(model: ModelConfig) -> bool:
    return issubclass(encoders.load(model.encoder).embeddings_class, PlacedEmbeddings)  # type: ignore[attr-defined]
