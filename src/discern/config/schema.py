"""Configuration models: sections, keys and what they accept, schedules, and configurations as flat values, tables and TOML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

NONE = "none"
"""How an empty value is written in a configuration; TOML has no null."""
OTHER_NAME = "other_name"
"""Key of a field's `json_schema_extra`: the names of the same setting elsewhere, which a user may write by mistake."""
# The types of JSON schemas, in words.
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "array": "a list", "null": f"'{NONE}'"}
_LIMITS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


class Section(BaseModel):
    """A section of the configuration: frozen, strict about unknown keys, and self-describing through its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def unread(self) -> dict[str, str]:
        """Settings that have no effect beside the others, with the setting each of them needs."""
        return {}


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
    kind: str


def keys_of(
    root: type[BaseModel], variants: Mapping[str, type[BaseModel]] | None = None
) -> tuple[dict[str, type[BaseModel]], dict[str, FieldInfo]]:
    """The sections and the fields under a model, both by dotted name.

    Args:
        variants: models of sections that replace the declared ones.
    """
    sections: dict[str, type[BaseModel]] = {}
    fields: dict[str, FieldInfo] = {}
    pending = [("", root)]
    while pending:
        prefix, model = pending.pop(0)
        for name, field in model.model_fields.items():
            key = f"{prefix}{name}"
            kind = field.annotation
            section = (variants or {}).get(key)
            if section is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                section = kind
            if section is None:
                fields[key] = field
            else:
                sections[key] = section
                pending.append((f"{key}.", section))
    return sections, fields


def expectation(field: FieldInfo) -> str:
    """The types and limits of a field in words: "a number above 0 and below 1"."""
    annotation: Any = field.annotation
    schema = create_model("Field", value=(annotation, field)).model_json_schema()["properties"]["value"]
    words: list[str] = []
    for kind in schema.get("anyOf", [schema]):
        if named := kind.get("enum", [kind["const"]] if "const" in kind else []):
            words.append(("one of " if len(named) > 1 else "") + ", ".join(f"'{word}'" for word in named))
        elif kind.get("type") == "boolean":
            words += ["true", "false"]
        else:
            pairs = " of pairs" if "prefixItems" in kind.get("items", ()) else ""
            words.append(_TYPES.get(kind.get("type", ""), "another value") + pairs)
    limits = {name: f"{getattr(item, name):,}" for item in field.metadata for name in _LIMITS if hasattr(item, name)}
    if limits.keys() == {"ge", "le"}:
        words[0] += f" from {limits['ge']} to {limits['le']}"
    elif limits:
        words[0] += " " + " and ".join(f"{_LIMITS[name]} {limit}" for name, limit in limits.items())
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


ABSENT = object()
"""Marks a key that one side of a difference does not have."""


def leaves(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Every value of a nested table with its dotted key. An empty table is a value, which only sections accept."""
    found: list[tuple[str, object]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += leaves(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def flatten(config: BaseModel) -> dict[str, Any]:
    """All values by dotted key ("train.max_steps"), in the order of the models."""
    return {key: value for key, value in leaves(config.model_dump(serialize_as_any=True)) if value != {}}


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
    return tomli_w.dumps(_table(config))


def _table(config: BaseModel) -> dict[str, Any]:
    """The values in TOML's types. None is left out if it is the default, and otherwise becomes 'none'."""
    table: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            table |= {name: section} if (section := _table(value)) else {}
        elif value is not None:
            table[name] = plain(value)
        elif field.get_default(call_default_factory=True, validated_data={}) is not None:
            table[name] = NONE
    return table


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
    keys = {**first, **second}
    return [(key, a, b) for key in keys if (a := first.get(key, ABSENT)) != (b := second.get(key, ABSENT))]


def json_schema(root: type[BaseModel], variants: Mapping[str, Variant]) -> dict[str, Any]:
    """The JSON schema of a file of settings, draft 2020-12. It has no required keys, because a file may extend another."""
    sections: dict[str, Any] = {name: (field.annotation, {}) for name, field in root.model_fields.items()}
    for name, variant in variants.items():
        models = [
            create_model(f"{name}: {value}", __base__=variant.model(value), **{variant.key: (Literal[value], value)})  # type: ignore[call-overload]
            for value in variant.known()
        ]
        sections[name] = (reduce(or_, models), {})
    whole: Any = create_model("Settings", __base__=Section, extends=(str, ""), **sections)
    text = json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **whole.model_json_schema()})
    return json.loads(text.replace('{"type": "null"}', f'{{"const": "{NONE}"}}'))  # type: ignore[no-any-return]


def _fraction_or_step(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("expected a whole number of steps, or a fraction of the run below 1")
    return value if 0 < value < 1 else int(value)


if TYPE_CHECKING:
    RunPoint = int
else:
    RunPoint = Annotated[float, AfterValidator(_fraction_or_step)]
"""A point in a run: a fraction of the run if it is below 1, otherwise a step. In the configuration of a run it is a step."""

SizeSchedule = tuple[tuple[RunPoint, int], ...]
"""Where each segment begins, and its value: ((0, 16384), (0.5, 65536))."""
MixtureSchedule = tuple[tuple[RunPoint, tuple[Annotated[float, Field(ge=0)], ...]], ...]
"""Where each segment begins, and the weight of each source: ((0, (0.7, 0.3)), (0.8, (0.2, 0.8)))."""


@dataclass(frozen=True)
class ScheduleSegment:
    """Consecutive steps of the same size and the same mixture.

    Attributes:
        first: the first step.
        rows: rows per step, over all ranks.
        length: positions per row.
        examples: rows read before the first step.
        positions: positions read before the first step.
        weights: weight of each source; empty: by their sizes.
    """

    first: int
    rows: int
    length: int
    examples: int = 0
    positions: int = 0
    weights: tuple[float, ...] = ()


def to_step(point: float, max_steps: int) -> int:
    """The step of a point in a run of `max_steps` steps; a fraction above 0 is at least one step."""
    return max(1, round(point * max_steps)) if 0 < point < 1 else int(point)


def to_steps(value: Any, max_steps: int) -> Any:
    """A setting that is a point in a run, or a list of points with values, with every point as a step; None stays None."""
    if isinstance(value, tuple):
        return tuple((to_step(point, max_steps), other) for point, other in value)
    return None if value is None else to_step(value, max_steps)


def last_point(value: Any) -> float:
    """The last point that such a setting names; 0 if it names none."""
    return value[-1][0] if isinstance(value, tuple) and value else value or 0


def check_schedule(name: str, schedule: tuple[tuple[RunPoint, Any], ...], least: int | None = 1) -> None:
    """Check that a schedule begins at 0, and that the points and the values of its segments increase.

    Args:
        least: smallest value; None: the values are not compared.

    Raises:
        ValueError: it does not, or they do not.
    """
    points, values = [point for point, _ in schedule], [value for _, value in schedule]
    if points and points[0] != 0:
        raise ValueError(f"{name} begins at {points[0]:g}; its first segment must begin at 0, as in [[0, ...], [0.5, ...]]")
    # A fraction and a step are compared when the length of the run is known.
    if any(right <= left for left, right in pairwise(points) if (left < 1) == (right < 1) or left == 0):
        raise ValueError(f"the segments of {name} begin at {points}; each must begin after the one before")
    if least is not None and any(right <= left for left, right in pairwise([least - 1, *values])):
        raise ValueError(f"{name} has the values {values}; each must be larger than the one before, the first at least {least}")
