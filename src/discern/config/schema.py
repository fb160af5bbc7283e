"""The keys of a configuration (sections and fields by dotted name, the chosen variants included) and the values they accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", tuple: "a list"}
OTHER_NAME = "other_name"
"""Key of a field's `json_schema_extra`: the name of the same setting elsewhere, which a user may write by mistake."""
_LIMITS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


@dataclass(frozen=True)
class Variant:
    """A section whose keys depend on one of its values, as [objective] depends on its name.

    Attributes:
        key: the field that decides.
        model: maps the value of that field to the section's model; raises ConfigError for an unknown value.
        known: returns all values that `model` accepts.
        kind: what the values name, for messages: "objective".
    """

    key: str
    model: Callable[[str], type[BaseModel]]
    known: Callable[[], Sequence[str]]
    kind: str = "variant"

    def having(self, name: str) -> list[str]:
        """The values whose model has a field of this name."""
        return [value for value in self.known() if name in self.model(value).model_fields]


@dataclass(frozen=True)
class Schema:
    """Every key of a configuration.

    Attributes:
        root: the composed model.
        sections: the model of each section by dotted name; "" is the root.
        fields: each leaf by dotted name.
        chosen: the value that selected the model of a section, by section: {"objective": "name = 'mlm'"}.
    """

    root: type[BaseModel]
    sections: Mapping[str, type[BaseModel]]
    fields: Mapping[str, FieldInfo]
    chosen: Mapping[str, str]

    @classmethod
    def of(cls, root: type[BaseModel], models: Mapping[str, type[BaseModel]], chosen: Mapping[str, str]) -> Schema:
        """The keys under `root`, with the section models in `models` in place of the declared ones."""
        sections: dict[str, type[BaseModel]] = {"": root}
        fields: dict[str, FieldInfo] = {}
        pending = [("", root)]
        while pending:
            prefix, model = pending.pop(0)
            for name, field in model.model_fields.items():
                key = f"{prefix}{name}"
                section = models.get(key) or section_model(field)
                if section is None:
                    fields[key] = field
                else:
                    sections[key] = section
                    pending.append((f"{key}.", section))
        return cls(root, sections, fields, chosen)

    def names(self, section: str) -> list[str]:
        """The names in a section, including its sub-sections."""
        return list(self.sections[section].model_fields)

    def note(self, section: str) -> str:
        """Which variant of a section applies, for messages: " with name = 'mlm'", or nothing."""
        return f" with {self.chosen[section]}" if section in self.chosen else ""


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section; None for a plain value."""
    models = [kind for kind in alternatives(field) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def alternatives(field: FieldInfo) -> list[Any]:
    """The types that a field accepts: the members of its unions; a Literal is kept, a list is `list`."""
    pending, found = [field.annotation], []
    while pending:
        kind = pending.pop(0)
        origin = get_origin(kind)
        if origin in (Union, UnionType):
            pending += get_args(kind)
        elif origin is Annotated:
            pending.append(get_args(kind)[0])
        else:
            found.append(kind if origin in (None, Literal) else origin)
    return found


def choices(field: FieldInfo) -> list[str]:
    """The words that a field accepts, if it accepts only certain words."""
    return [str(word) for kind in alternatives(field) if get_origin(kind) is Literal for word in get_args(kind)]


def takes_none(field: FieldInfo) -> bool:
    """Whether a field may be empty, which is written as 'none' because TOML has no null."""
    return NoneType in alternatives(field)


def takes_number_only(field: FieldInfo) -> bool:
    """Whether a field accepts numbers but not true and false, which pydantic would read as 1 and 0."""
    kinds = alternatives(field)
    return (int in kinds or float in kinds) and bool not in kinds


def other_names(field: FieldInfo | None) -> tuple[str, ...]:
    """The names that the setting of a field has elsewhere, in other variants or other programs."""
    extra = None if field is None else field.json_schema_extra
    return tuple(str(extra[OTHER_NAME]).split()) if isinstance(extra, dict) and OTHER_NAME in extra else ()


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
        words.append(("one of " if len(named) > 1 else "") + ", ".join(f"'{word}'" for word in named))
    if takes_none(field):
        words.append("'none'")
    if len(words) > 1:
        words = [word for each in words for word in (("true", "false") if each == _TYPES[bool] else (each,))]
        words = [", ".join(words[:-1]), words[-1]]
    return " or ".join(words) or "another value"


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


class Section(BaseModel):
    """A section of the configuration: frozen, strict about unknown keys, and self-describing through its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def unread(self) -> dict[str, str]:
        """Settings that have no effect beside the others, with the setting each of them needs."""
        return {}
