"""One field of a configuration model: what it takes, in words."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", tuple: "a list"}
OTHER_NAME = "other_name"
"""Key of a field's `json_schema_extra`: the name that elsewhere stands for the same, which somebody may write instead."""
_LIMITS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def alternatives(field: FieldInfo) -> list[Any]:
    """The types that a field takes, unions taken apart; a Literal stays whole, a list is `list`."""
    pending, found = [field.annotation], []
    while pending:
        kind = pending.pop(0)
        origin = get_origin(kind)
        if origin in (Union, UnionType):
            pending += get_args(kind)
        else:
            found.append(kind if origin in (None, Literal) else origin)
    return found


def choices(field: FieldInfo) -> list[str]:
    """The words that a field takes, where it takes only certain words."""
    return [str(word) for kind in alternatives(field) if get_origin(kind) is Literal for word in get_args(kind)]


def takes_none(field: FieldInfo) -> bool:
    """Whether a field may be empty; TOML has no word for it, so we write 'none'."""
    return NoneType in alternatives(field)


def takes_number_only(field: FieldInfo) -> bool:
    """Whether true and false are wrong for a field that pydantic would let them be 1 and 0 in."""
    kinds = alternatives(field)
    return (int in kinds or float in kinds) and bool not in kinds


def other_name(field: FieldInfo | None) -> str | None:
    """The name that elsewhere stands for what a field says."""
    extra = None if field is None else field.json_schema_extra
    return str(extra[OTHER_NAME]) if isinstance(extra, dict) and OTHER_NAME in extra else None


def _limits(field: FieldInfo) -> str:
    """The smallest and the largest value: "from 1 to 1,024", "above 0 and below 1"."""
    found = {name: getattr(item, name) for item in field.metadata for name in _LIMITS if hasattr(item, name)}
    said = {name: f"{limit:,}" if isinstance(limit, int) else f"{limit:g}" for name, limit in found.items()}
    if said.keys() == {"ge", "le"}:
        return f"from {said['ge']} to {said['le']}"
    return " and ".join(f"{_LIMITS[name]} {limit}" for name, limit in said.items())


def expectation(field: FieldInfo) -> str:
    """The types and limits of a field in words: "a number above 0 and below 1"."""
    kinds = alternatives(field)
    words = [name for kind, name in _TYPES.items() if kind in kinds and not (kind is int and float in kinds)]
    if words and (limits := _limits(field)):
        words[0] += f" {limits}"
    if named := choices(field):
        words.append("one of " + ", ".join(f"'{word}'" for word in named))
    if takes_none(field):
        words.append("'none'")
    return " or ".join(words) or "another value"
