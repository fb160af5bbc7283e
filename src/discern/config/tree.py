"""A configuration as flat keys and as TOML, and the difference between two configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

NONE = "none"
"""How an empty value is written in a configuration; TOML has no null."""


class Absent:
    """Marks a key that one side of a difference does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = Absent()


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """All values by dotted key ("train.max_steps"), in the order of the models."""
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return tree


def to_toml(config: BaseModel) -> str:
    """The whole configuration as TOML, defaults included; reading it back gives the same configuration."""
    return tomli_w.dumps(nest({key: value for key, value in _written(config).items() if value is not None}))


def _written(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Flat values in TOML's types. None stays None if it is the default, and otherwise becomes 'none'."""
    values: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value, key = getattr(config, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            values |= _written(value, f"{key}.")
        elif value is None:
            values[key] = None if field.get_default(call_default_factory=True, validated_data={}) is None else NONE
        else:
            values[key] = plain(value)
    return values


def plain(value: Any) -> Any:
    """A value in the types of TOML and JSON."""
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def toml_value(value: Any) -> str:
    """One value in TOML syntax, on one line."""
    lines = tomli_w.dumps({"x": plain(value)}).removeprefix("x = ").splitlines()
    return " ".join(line.strip() for line in lines)


def diff(left: BaseModel, right: BaseModel) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with both values; `ABSENT` if a side does not have the key."""
    first, second = flatten(left), flatten(right)
    pairs = [(key, first.get(key, ABSENT), second.get(key, ABSENT)) for key in {**first, **second}]
    return [pair for pair in pairs if pair[1] != pair[2]]
