"""Resolve settings to one validated configuration, which knows the origin of each of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from discern.config.layers import DEFAULT, Origin, Setting, Settings
from discern.config.problems import InvalidConfigError, Problem, quoted, translated, unknown_key, wrong_value
from discern.config.schema import NONE, Schema, Variant, flatten, nest, section_model, takes_none, takes_number_only
from discern.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class Dropped:
    """A value of a preset that does not exist in the chosen variant of its section."""

    key: str
    value: object
    origin: str
    reason: str


@dataclass(frozen=True)
class Resolved(Generic[ConfigT]):
    """A validated configuration with the origins of its values.

    Attributes:
        config: the validated configuration.
        origins: where each leaf came from, by dotted key: "preset tiny", "run.toml", "--set", "default".
        dropped: values of the preset that were dropped because the user chose another variant.
        user_set: dotted keys that a file or --set gave.
        repeated: those of them from a file that discern wrote, which has every key, whether the user set it or not.
    """

    config: ConfigT
    origins: Mapping[str, str]
    dropped: Sequence[Dropped] = ()
    user_set: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()

    @property
    def without_effect(self) -> list[str]:
        """A line for each of the user's settings that has no effect beside the others."""
        return [
            f"{section}.{name} = {getattr(settings, name)} has no effect: it needs {section}.{needed}"
            for section, settings in self.config
            for name, needed in settings.unread().items()
            if f"{section}.{name}" in self.user_set - self.repeated
        ]


def resolve(
    root: type[ConfigT],
    settings: Settings,
    variants: Mapping[str, Variant] | None = None,
    adjust: Callable[[Resolution], None] | None = None,
) -> Resolved[ConfigT]:
    """The configuration that `settings` (see `layers.collect`) describe.

    Args:
        root: the composed model; its sections are models too.
        settings: every value that is not left at its default, with its origin.
        variants: the sections whose keys depend on a value, by name.
        adjust: called once all sections are valid; changes values that depend on one another by `set_value` and `refuse`.

    Raises:
        InvalidConfigError: there are errors; all are named at once.
    """
    work = Resolution(root, settings, variants or {})
    work.take_out_unknown_keys()
    work.validate_sections()
    if adjust is not None and work.is_complete:
        adjust(work)
    config = work.compose(root)
    if config is None or work.problems:
        raise InvalidConfigError(work.problems)
    origins = {key: str(work.origin(key)) for key in flatten(config)}
    return Resolved(config, origins, work.dropped, work.user_set, work.repeated)


class Resolution:
    """A configuration while it is resolved. Errors are collected, and the remaining settings are still checked.

    Attributes:
        settings: the settings that have not been dropped.
        parts: content of the root, by name: its validated sections and its own plain values.
        problems: the problems found so far.
        dropped: values of a preset that are meant for another variant.
    """

    def __init__(self, root: type[BaseModel], settings: Settings, variants: Mapping[str, Variant]) -> None:
        self.settings = dict(settings)
        self.parts: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.dropped: list[Dropped] = []
        self._variants = variants
        self._models: dict[str, type[BaseModel]] = {}  # of the variants that are known
        self._schema = self._choose_variants(root)

    def origin(self, key: str) -> Origin:
        """The origin of a value."""
        return self.settings[key].origin if key in self.settings else DEFAULT

    def _choose_variants(self, root: type[BaseModel]) -> Schema:
        """The keys of this configuration, with the model of each variant that its settings choose."""
        chosen: dict[str, str] = {}
        for section, variant in self._variants.items():
            declared = section_model(root.model_fields[section])
            assert declared is not None, f"{section} is not a section"
            key = f"{section}.{variant.key}"
            setting = self.settings.get(key, Setting(declared.model_fields[variant.key].get_default(), DEFAULT))
            try:
                self._models[section] = _variant_model(variant, key, setting)
                chosen[section] = f"{variant.key} = '{setting.value}'"
            except InvalidConfigError as error:
                self.problems += error.problems
        return Schema.of(root, self._models, chosen)

    def _is_open(self, section: str) -> bool:
        """Whether the keys of a section are undetermined because its variant is unknown."""
        return section in self._variants and section not in self._models

    def take_out_unknown_keys(self) -> None:
        """Drop keys of another variant that a preset wrote; every other unknown key is a problem."""
        for key, setting in list(self.settings.items()):
            section = key.rpartition(".")[0]
            if key in self._schema.fields or self._is_open(section):
                continue
            del self.settings[key]
            if key in self._schema.sections and setting.value == {} and setting.origin.kind != "set":
                continue  # a heading without settings
            variant = self._variants.get(section)
            elsewhere = [] if variant is None else variant.having(key.rpartition(".")[2])
            if setting.origin.kind == "preset" and self._chosen_elsewhere(section, setting.origin):
                reason = f"[{section}]{self._schema.note(section)} has no such key"
                self.dropped.append(Dropped(key, setting.value, str(setting.origin), reason))
            else:
                self.problems.append(unknown_key(key, setting, self._schema, variant, elsewhere))

    def _chosen_elsewhere(self, section: str, origin: Origin) -> bool:
        """Whether something other than `origin` chose the variant of a section."""
        if section not in self._variants:
            return False
        choice = self.settings.get(f"{section}.{self._variants[section].key}")
        return choice is not None and choice.origin.label != origin.label

    def validate_sections(self) -> None:
        """Check each section by itself, and collect the root's own values."""
        values = nest(self._readable())
        for name, declared in self._schema.root.model_fields.items():
            if name not in self._schema.sections:
                self.parts |= {name: values[name]} if name in values else {}
            elif name not in values and not declared.is_required():
                self.parts[name] = declared.get_default(call_default_factory=True, validated_data={})
            elif not self._is_open(name):
                self._validate(name, values.get(name, {}))

    def _validate(self, section: str, values: Mapping[str, object]) -> None:
        try:
            self.parts[section] = self._schema.sections[section].model_validate(values)
        except ValidationError as error:
            kept = self._without_unfit(section, values, error)
            if len(kept) < len(values):
                self._validate(section, kept)
                return
            self.parts.pop(section, None)
            self.problems += translated(section, error, self.settings, self._schema)

    def _without_unfit(self, section: str, values: Mapping[str, object], error: ValidationError) -> dict[str, object]:
        """The values without those of a preset that the variant does not accept, if something else chose the variant."""
        kept = dict(values)
        for entry in error.errors(include_url=False):
            name = str(entry["loc"][0]) if entry["loc"] else ""
            setting = self.settings.get(f"{section}.{name}")
            if name not in kept or setting is None or setting.origin.kind != "preset":
                continue
            if self._chosen_elsewhere(section, setting.origin):
                del kept[name], self.settings[f"{section}.{name}"]
                reason = f"[{section}]{self._schema.note(section)} does not accept it"
                self.dropped.append(Dropped(f"{section}.{name}", setting.value, str(setting.origin), reason))
        return kept

    def _readable(self) -> dict[str, object]:
        """The given values, with 'none' converted to None, and without values that pydantic would misread."""
        values: dict[str, object] = {}
        for key, setting in self.settings.items():
            declared = self._schema.fields.get(key)
            if declared is None:
                continue
            if setting.value == NONE and takes_none(declared):
                values[key] = None
            elif isinstance(setting.value, bool) and takes_number_only(declared):
                self.problems.append(wrong_value(key, setting, declared))
            elif _too_large(setting.value):
                self.problems.append(wrong_value(key, setting, declared, "expected a number of at most 64 bits"))
            else:
                values[key] = setting.value
        return values

    def value(self, key: str) -> Any:
        """The value of a setting of a valid section; None if its variant has no such setting."""
        section, _, name = key.partition(".")
        return getattr(self.parts[section], name, None)

    def set_value(self, key: str, value: object, reason: str) -> None:
        """Change a value; its origin tells the reason."""
        section, _, name = key.partition(".")
        origin = self.origin(key)
        self.settings[key] = Setting(NONE if value is None else value, replace(origin, label=f"{origin.label}, {reason}"))
        self._validate(section, {**self.parts[section].model_dump(), name: value})

    def refuse(self, key: str, message: str, hint: str) -> None:
        """Report a value that does not suit the others."""
        self.problems.append(Problem(key, f"{self.origin(key).where}: {key} {message}", hint))

    @property
    def is_complete(self) -> bool:
        """Whether all sections are valid."""
        return all(name in self.parts for name in self._schema.sections if name and "." not in name)

    @property
    def user_set(self) -> frozenset[str]:
        """The dotted keys that a file or --set gave."""
        return frozenset(key for key, setting in self.settings.items() if setting.origin.by_user)

    @property
    def repeated(self) -> frozenset[str]:
        """Keys of `user_set` from a file that discern wrote."""
        return frozenset(key for key in self.user_set if self.settings[key].origin.written)

    def compose(self, root: type[ConfigT]) -> ConfigT | None:
        """The configuration composed of its sections; None if a section is missing or a rule between sections is violated."""
        if not self.is_complete:
            return None
        try:
            return root.model_validate(self.parts)
        except ValidationError as error:
            self.problems += translated("", error, self.settings, self._schema)
            return None


def _too_large(value: object) -> bool:
    """Whether a whole number has more than the 64 bits that TOML guarantees, so that no tensor and no file can store it."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _variant_model(variant: Variant, key: str, setting: Setting) -> type[BaseModel]:
    """The model that the deciding value of a section selects."""
    if isinstance(setting.value, str):
        try:
            return variant.model(setting.value)
        except ConfigError as error:
            raise InvalidConfigError([Problem(key, f"{setting.origin.where}: {error.message}", error.hint)]) from error
    known = ", ".join(f"'{name}'" for name in variant.known())
    found = f"{key} is missing" if setting.origin is DEFAULT else f"{setting.origin.where}: {key} is {quoted(setting.value)}"
    raise InvalidConfigError([Problem(key, f"{found}; expected one of {known}", f"--set {key}=NAME, or a preset to start from")])
