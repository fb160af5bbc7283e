"""Base class of all configuration models. The models themselves live beside the code that uses them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration: frozen, strict about unknown keys, and self-describing through its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
