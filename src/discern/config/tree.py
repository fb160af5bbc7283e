"""A configuration as flat keys, as TOML, and beside another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

NONE = "none"
"""How a configuration spells an empty value, which TOML has no word for."""


class Absent:
    """In a difference: this side has no such key."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = Absent()


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Every value by dotted key ("train.max_steps"), in the order of the models."""
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: tables in tables."""
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
    """Flat values in TOML's types. None stays None where it is the default, and is spelt out where it is not."""
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
    """A leaf in the types that TOML and JSON have."""
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def toml_value(value: Any) -> str:
    """One value as TOML writes it, on one line."""
    lines = tomli_w.dumps({"x": plain(value)}).removeprefix("x = ").splitlines()
    return " ".join(line.strip() for line in lines)


def diff(left: BaseModel, right: BaseModel) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with the value of each side; `ABSENT` where a side has no such key."""
    first, second = flatten(left), flatten(right)
    pairs = [(key, first.get(key, ABSENT), second.get(key, ABSENT)) for key in {**first, **second}]
    return [pair for pair in pairs if pair[1] != pair[2]]
