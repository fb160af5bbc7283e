"""Values as JSON has them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel


def jsonable(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities become null, arrays and tensors lists, paths and the like text."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, BaseModel):
        return jsonable(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays, without importing either
        return jsonable(value.tolist())
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [jsonable(item) for item in value]
    return str(value)
