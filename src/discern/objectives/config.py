"""Settings that objectives share. Each objective's own settings stand in its file and extend these."""

from __future__ import annotations

from pydantic import Field, model_validator

from discern.config.base import Section


class ObjectiveConfig(Section):
    """What every objective has: its name in the registry."""

    name: str = Field(description="Objective, by its name in the registry.")


class MaskingConfig(ObjectiveConfig):
    """Settings of the objectives that choose positions and hide what stands there."""

    masking: str = Field("uniform", description="How positions are chosen, by its name in the registry of maskings.")
    mask_probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Fraction of maskable tokens chosen per sequence. ELECTRA, table 6: 0.15 small and base, 0.25 large.",
    )
    mask_token_probability: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the chosen positions that become [MASK]. Paper: 1; released ELECTRA: 0.85; BERT: 0.8.",
    )
    random_token_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the chosen positions that become a random token. BERT: 0.1. The rest stays as it was.",
    )

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> MaskingConfig:
        total = self.mask_token_probability + self.random_token_probability
        if total > 1 + 1e-9:
            raise ValueError(f"mask_token_probability + random_token_probability is {total:g}, more than 1")
        return self
