"""From layers of settings to one validated configuration that knows where each of its values came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from discern.config.fields import takes_none, takes_number_only
from discern.config.layers import DEFAULT, Origin, Setting, Settings
from discern.config.problems import InvalidConfigError, Problem, quoted, translated, unknown_key, wrong_value
from discern.config.schema import Schema, Variant, section_model
from discern.config.tree import NONE, flatten, nest
from discern.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class Clamp:
    """A value that may not exceed another. Where the user did not set it, it is lowered; where he did, it is refused.

    Attributes:
        key: dotted key of the value.
        limit: dotted key of its largest value.
    """

    key: str
    limit: str


@dataclass(frozen=True)
class Dropped:
    """A value of a preset that the chosen variant of its section has no use for."""

    key: str
    value: object
    origin: str
    reason: str


@dataclass(frozen=True)
class Resolved(Generic[ConfigT]):
    """A configuration and how it came about.

    Attributes:
        config: the validated configuration.
        origins: where each leaf came from, by dotted key: "preset tiny", "run.toml", "--set", "default".
        dropped: values of the preset that went away because the user chose another variant.
        user_set: dotted keys that a file or --set gave.
    """

    config: ConfigT
    origins: Mapping[str, str]
    dropped: Sequence[Dropped] = ()
    user_set: frozenset[str] = frozenset()


@dataclass
class _Draft:
    """A configuration in the making: what is set, and what has been found wrong so far."""

    settings: Settings
    problems: list[Problem] = field(default_factory=list)
    unknown_variants: set[str] = field(default_factory=set)


def resolve(
    root: type[ConfigT], settings: Settings, variants: Mapping[str, Variant] | None = None, clamps: Sequence[Clamp] = ()
) -> Resolved[ConfigT]:
    """The configuration that `settings` (see `layers.collect`) describe.

    Args:
        root: the composed model; its sections are models too.
        settings: every value that is not left at its default, with its origin.
        variants: the sections whose keys depend on a value, by name.
        clamps: the values bounded by other values.

    Raises:
        InvalidConfigError: everything that is wrong, at once.
    """
    draft = _Draft(dict(settings))
    schema = _schema(root, variants or {}, draft)
    dropped = _drop_unknown(schema, variants or {}, draft)
    parts = _validated_sections(schema, draft)
    for clamp in clamps:
        _clamp(clamp, parts, schema, draft)
    # A rule between sections can only be judged when every section stands.
    complete = all(name in parts for name in schema.sections if name and "." not in name)
    config = _composed(root, parts, schema, draft) if complete else None
    if config is None or draft.problems:
        raise InvalidConfigError(draft.problems)
    origins = {key: str(draft.settings[key].origin if key in draft.settings else DEFAULT) for key in flatten(config)}
    user_set = frozenset(key for key, setting in draft.settings.items() if setting.origin.by_user)
    return Resolved(config, origins, dropped, user_set)


def _schema(root: type[BaseModel], variants: Mapping[str, Variant], draft: _Draft) -> Schema:
    """The keys of this configuration, with the model of each variant that its settings choose."""
    models: dict[str, type[BaseModel]] = {}
    chosen: dict[str, str] = {}
    for section, variant in variants.items():
        declared = section_model(root.model_fields[section])
        assert declared is not None, f"{section} is not a section"
        key = f"{section}.{variant.key}"
        default = Setting(declared.model_fields[variant.key].get_default(), DEFAULT)
        setting = draft.settings.get(key, default)
        try:
            models[section] = _variant_model(variant, key, setting)
            chosen[section] = f"{variant.key} = '{setting.value}'"
        except InvalidConfigError as error:
            draft.problems += error.problems
            draft.unknown_variants.add(section)
    return Schema.of(root, models, chosen)


def _variant_model(variant: Variant, key: str, setting: Setting) -> type[BaseModel]:
    """The model that a variant's deciding value stands for."""
    if isinstance(setting.value, str):
        try:
            return variant.model(setting.value)
        except ConfigError as error:
            raise InvalidConfigError([Problem(key, f"{setting.origin.where}: {error.message}", error.hint)]) from error
    known = ", ".join(f"'{name}'" for name in variant.known())
    found = f"{key} is missing" if setting.origin is DEFAULT else f"{setting.origin.where}: {key} is {quoted(setting.value)}"
    raise InvalidConfigError([Problem(key, f"{found}; expected one of {known}", f"--set {key}=NAME, or a preset to start from")])


def _drop_unknown(schema: Schema, variants: Mapping[str, Variant], draft: _Draft) -> list[Dropped]:
    """Take out the keys that do not exist. What a preset meant for another variant is dropped; the rest are mistakes."""
    dropped: list[Dropped] = []
    for key, setting in list(draft.settings.items()):
        section = key.rpartition(".")[0]
        if key in schema.fields or section in draft.unknown_variants:
            continue
        del draft.settings[key]
        choice = draft.settings.get(f"{section}.{variants[section].key}") if section in variants else None
        if setting.origin.kind == "preset" and choice is not None and choice.origin.label != setting.origin.label:
            dropped.append(Dropped(key, setting.value, str(setting.origin), f"[{section}]{schema.note(section)} has no such key"))
        else:
            draft.problems.append(unknown_key(key, setting, schema))
    return dropped


def _validated_sections(schema: Schema, draft: _Draft) -> dict[str, Any]:
    """The values of the root by name: its sections as validated models, its own values as they are."""
    values = nest(_prepared(schema, draft))
    parts: dict[str, Any] = {}
    for name, declared in schema.root.model_fields.items():
        if name not in schema.sections:
            parts |= {name: values[name]} if name in values else {}
        elif name not in values and not declared.is_required():
            parts[name] = declared.get_default(call_default_factory=True, validated_data={})
        elif name not in draft.unknown_variants:
            _validate(name, values.get(name, {}), parts, schema, draft)
    return parts


def _validate(section: str, values: object, parts: dict[str, Any], schema: Schema, draft: _Draft) -> None:
    """Put the validated section into `parts`, or what is wrong with it among the problems."""
    try:
        parts[section] = schema.sections[section].model_validate(values)
    except ValidationError as error:
        draft.problems += translated(section, error, draft.settings, schema)


def _prepared(schema: Schema, draft: _Draft) -> dict[str, object]:
    """The set values, 'none' read as none, without those that pydantic would misread."""
    values: dict[str, object] = {}
    for key, setting in draft.settings.items():
        declared = schema.fields.get(key)
        if declared is None:
            continue
        if setting.value == NONE and takes_none(declared):
            values[key] = None
        elif isinstance(setting.value, bool) and takes_number_only(declared):
            draft.problems.append(wrong_value(key, setting, declared))
        else:
            values[key] = setting.value
    return values


def _clamp(clamp: Clamp, parts: dict[str, Any], schema: Schema, draft: _Draft) -> None:
    """Lower one value to its limit, or say that it is beyond it."""
    section, _, name = clamp.key.partition(".")
    limit_section, _, limit_name = clamp.limit.partition(".")
    if section not in parts or limit_section not in parts:
        return
    value, limit = getattr(parts[section], name), getattr(parts[limit_section], limit_name)
    if value <= limit:
        return
    origin = draft.settings[clamp.key].origin if clamp.key in draft.settings else DEFAULT
    if origin.by_user:
        text = f"{origin.where}: {clamp.key} is {value}, beyond {clamp.limit}, which is {limit}"
        draft.problems.append(Problem(clamp.key, text, f"--set {clamp.key}={limit}, or --set {clamp.limit}={value}"))
        return
    lowered = Origin(origin.kind, f"{origin.label}, clamped from {value} to {clamp.limit}", origin.line)
    draft.settings[clamp.key] = Setting(limit, lowered)
    _validate(section, {**parts.pop(section).model_dump(), name: limit}, parts, schema, draft)


def _composed(root: type[ConfigT], parts: Mapping[str, Any], schema: Schema, draft: _Draft) -> ConfigT | None:
    """The root around its sections; None, and a problem more, where a rule between sections is broken."""
    try:
        return root.model_validate(parts)
    except ValidationError as error:
        draft.problems += translated("", error, draft.settings, schema)
        return None
