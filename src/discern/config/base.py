"""The base of every configuration model. Models live beside their owners; this package is machinery only."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration: frozen, strict about unknown keys, and self-describing through its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
