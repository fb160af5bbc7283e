"""The composed configuration of a pre-training run, from the sections that live beside their owners."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator

from discern.config.base import Section
from discern.data.config import DataConfig
from discern.model.config import ModelConfig
from discern.objectives import objectives
from discern.objectives.config import ObjectiveConfig
from discern.training.config import OptimizerConfig, TrainConfig


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
