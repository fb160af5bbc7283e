"""Collect settings from presets, files and --set, and resolve them to one validated configuration that knows their origins."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from discern.config.schema import NONE, OTHER_NAME, Variant, expectation, flatten, keys_of, leaves, nest
from discern.errors import ConfigError, did_you_mean
from discern.parsing import toml_tables
from discern.storage.checksums import CHECKSUMS_NAME, read_text


@dataclass(frozen=True)
class Origin:
    """The layer that a value comes from.

    Attributes:
        kind: the sort of layer.
        label: name of the layer, as `config show` prints it: "preset electra-small", "run.toml", "--set", "default".
        line: line of the file, if known.
        written: whether discern wrote the file.
    """

    kind: Literal["default", "preset", "file", "set"]
    label: str
    line: int | None = None
    written: bool = False

    @property
    def by_user(self) -> bool:
        """Whether the user asked for the value, in a file or with --set; a preset only suggests it."""
        return self.kind in ("file", "set")

    @property
    def where(self) -> str:
        """File and line, or option, for error messages."""
        return f"{self.label}, line {self.line}" if self.line else self.label


DEFAULT = Origin("default", "default")


@dataclass(frozen=True)
class Setting:
    """One value and its origin."""

    value: object
    origin: Origin


Settings = dict[str, Setting]
"""Settings by dotted key: "train.max_steps"."""


def collect(preset: str | None, file: Path | None, overrides: Sequence[str]) -> Settings:
    """Collect all values that are not defaults: preset, then file, then --set; later values override earlier ones.

    Raises:
        ConfigError: neither preset nor file is given, one of them cannot be read, or an override has no value.
    """
    if file is None and preset is None:
        raise ConfigError(
            "no configuration: neither a file nor a preset is given",
            hint=f"add --preset NAME; presets: {', '.join(preset_names())}",
        )
    settings = {} if preset is None else _read(preset_path(preset), "preset", f"preset {preset}")
    if file is not None:
        settings |= read_file(file, preset)
    return settings | parse_overrides(overrides)


def parse_overrides(overrides: Sequence[str]) -> Settings:
    """Parse the values of `--set key=value`, as TOML if they are TOML, and as plain text otherwise.

    Raises:
        ConfigError: some have no '='; all of them are named.
    """
    settings: Settings = {}
    wrong = []
    for text in overrides:
        key, _, value = (part.strip() for part in text.partition("="))
        if not key or "=" not in text:
            wrong.append(f"--set {text[:200]}: expected section.key=value")
        try:
            parsed: object = toml_tables(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        settings |= {name: Setting(leaf, Origin("set", "--set")) for name, leaf in leaves({key: parsed})}
    if wrong:
        raise ConfigError("\n".join(wrong), hint="for example --set train.max_steps=1000")
    return settings


def read_file(path: Path, preset: str | None = None) -> Settings:
    """Read the values of a TOML file, or of config.toml in the folder of a run, and of the files and presets that it extends.

    Args:
        preset: preset below the file, which then must not name another base.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    if not path.exists():
        known = f"'{path}' is a preset; give it as --preset {path}" if str(path) in preset_names() else "check the path"
        raise ConfigError(f"there is no configuration file {path}", hint=known)
    file = path / "config.toml" if path.is_dir() else path
    return _read(file, "file", str(file), preset=preset)


def _read(
    path: Path, kind: Literal["preset", "file"], label: str, above: tuple[Path, ...] = (), preset: str | None = None
) -> Settings:
    """The values of a preset or a file, which override those of the one that it extends.

    Args:
        above: the files that extend this one.
    """
    if path.resolve() in above:
        raise ConfigError(f"{label} extends itself by way of other files", hint="remove one of their lines 'extends'")
    hint = "a configuration is a TOML file, in UTF-8; if discern wrote it, copy it back"
    # Editors on Windows begin a file with a byte order mark.
    text = read_text(path, hint=hint, error=ConfigError).removeprefix("\ufeff")
    tree = parse_toml(text, label)
    base = tree.pop("extends", None)
    lines, written = _line_numbers(text), (path.parent / CHECKSUMS_NAME).is_file()
    own = {key: Setting(value, Origin(kind, label, lines.get(key), written)) for key, value in leaves(tree)}
    if base is None:
        return own

    # Read the base: a preset, or a file beside this one
    if not isinstance(base, str):
        raise ConfigError(f"{label}: extends is {base!r}; expected the name of a preset or the path of a file")
    if preset not in (None, base):
        raise ConfigError(
            f"{label} extends '{base}', and --preset {preset} would be a second base",
            hint="leave out --preset, or remove the line 'extends' from the file",
        )
    above = (*above, path.resolve())
    if base.endswith(".toml") or "/" in base:
        return _read(path.parent / base, "file", str(path.parent / base), above) | own
    return _read(preset_path(base), "preset", f"preset {base}", above) | own


def parse_toml(text: str, label: str) -> dict[str, Any]:
    """Parse a TOML text.

    Args:
        label: name of the text in messages.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return toml_tables(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{label} is not valid TOML: {error}", hint='text needs quotes: precision = "float32"') from error


def _line_numbers(text: str) -> dict[str, int]:
    """Line numbers of the keys, by dotted name. Keys that are not at the start of a line are left out."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = header[1] + "."
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(section + key[1], number)
    return lines


_FOLDER = Path(__file__).with_name("presets")

DEFAULT_VOCABULARY = 30_522
"""Size of BERT's vocabulary, for which the recipes of the paper were made."""


def usual_vocabulary(preset: str | None) -> int:
    """Size of the vocabulary that a preset is meant for. The stated number of parameters assumes this size."""
    found = re.search(r"^# Vocabulary: (\d+)", preset_path(preset).read_text(encoding="utf-8"), re.M) if preset else None
    return int(found[1]) if found else DEFAULT_VOCABULARY


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def preset_path(name: str) -> Path:
    """Path of a preset's file.

    Raises:
        ConfigError: there is no such preset; the hint suggests the nearest one.
    """
    names = preset_names()
    if name not in names:
        raise ConfigError(f"unknown preset '{name}'", hint=did_you_mean(name, names))
    return _FOLDER / f"{name}.toml"


def preset_summary(name: str) -> str:
    """Description of a preset, in one line."""
    first = preset_path(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


ConfigT = TypeVar("ConfigT", bound=BaseModel)

_SHOWN = 200
"""Characters of a value or a key that a message shows."""


@dataclass(frozen=True)
class Problem:
    """One error in a configuration.

    Attributes:
        key: dotted key, or the name of a section.
        text: what was found and what was expected, with the place.
        hint: what to do next.
    """

    key: str
    text: str
    hint: str | None = None


class InvalidConfigError(ConfigError):
    """All errors of a configuration at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))  # a field of several types has an error for each of them
        if len(self.problems) == 1:
            super().__init__(self.problems[0].text, hint=self.problems[0].hint)
            return
        lines = [f"{len(self.problems)} problems in the configuration"]
        for problem in self.problems:
            lines += [f"- {problem.text}", *([f"    hint: {problem.hint}"] if problem.hint else [])]
        super().__init__("\n".join(lines))


def quoted(value: object) -> str:
    """A value in the form in which messages show it; long values are shortened."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
    dropped: Sequence[Dropped]
    user_set: frozenset[str]
    repeated: frozenset[str]

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
        root: the composed model; all its fields are sections.
        settings: every value that is not left at its default, with its origin.
        variants: the sections whose keys depend on a value, by name.
        adjust: called once all sections are valid; changes values that depend on one another by `set_value` and `refuse`.

    Raises:
        InvalidConfigError: there are errors; all are named at once.
    """
    work = Resolution(root, settings, variants or {})
    config = None
    if len(work.parts) == len(root.model_fields):
        if adjust is not None:
            adjust(work)
        try:
            config = root.model_validate(work.parts)
        except ValidationError as error:
            work.report(error)
    if config is None or work.problems:
        raise InvalidConfigError(work.problems)
    origins = {key: work.origin(key).label for key in flatten(config)}
    written = {key for key in work.user_set if work.settings[key].origin.written}
    return Resolved(config, origins, work.dropped, work.user_set, frozenset(written))


class Resolution:
    """A configuration while it is resolved. Errors are collected, and the remaining settings are still checked.

    Attributes:
        settings: the settings that have not been dropped.
        parts: the validated sections by name.
        problems: the problems found so far.
        dropped: values of a preset that are meant for another variant.
    """

    def __init__(self, root: type[BaseModel], settings: Settings, variants: Mapping[str, Variant]) -> None:
        self.settings = dict(settings)
        self.parts: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.dropped: list[Dropped] = []
        self._variants = variants
        self._chosen: dict[str, str] = {}

        # Choose the model of each section whose keys depend on a value
        fields = keys_of(root)[1]
        models: dict[str, type[BaseModel]] = {}
        for section, variant in variants.items():
            key = f"{section}.{variant.key}"
            setting = settings.get(key, Setting(fields[key].default, DEFAULT))
            try:
                models[section] = variant.model(str(setting.value))
                self._chosen[section] = f"{variant.key} = '{setting.value}'"
            except ConfigError as error:
                found = f"{setting.origin.where}: {error.message}" if key in settings else f"{key} is missing"
                self.problems.append(Problem(key, found, error.hint))
        self._sections, self._fields = keys_of(root, models)
        open_sections = variants.keys() - models.keys()

        # Drop the keys that a preset has for another variant; every other unknown key is a problem
        values: dict[str, object] = {}
        for key, setting in settings.items():
            section = key.rpartition(".")[0]
            if key in self._fields:
                value, kind = setting.value, self._fields[key].annotation
                kinds = (kind, *get_args(kind))
                if value == NONE and NoneType in kinds:
                    values[key] = None
                elif isinstance(value, bool) and bool not in kinds:  # pydantic reads them as 1 and 0
                    self.problems.append(self._wrong_value(key))
                elif isinstance(value, int) and abs(value) >= 2**63:
                    self.problems.append(self._wrong_value(key, "expected a number of at most 64 bits"))
                else:
                    values[key] = value
            elif section in open_sections or (key in self._sections and setting.value == {}):
                continue  # its keys are unknown, or it is a heading without settings
            elif self._is_for_another_variant(section, key):
                self._drop(key)
            else:
                self.problems.append(self._unknown_key(key, setting.origin.where))

        # Validate each section by itself
        tree = nest(values)
        for section in root.model_fields:
            if section not in open_sections:
                self._validate(section, tree.get(section, {}))

    def origin(self, key: str) -> Origin:
        """The origin of a value."""
        return self.settings[key].origin if key in self.settings else DEFAULT

    @property
    def user_set(self) -> frozenset[str]:
        """The dotted keys that a file or --set gave."""
        return frozenset(key for key, setting in self.settings.items() if setting.origin.by_user)

    def value(self, key: str) -> Any:
        """The value of a setting of a valid section; None if its variant has no such setting."""
        section, _, name = key.partition(".")
        return getattr(self.parts[section], name, None)

    def set_value(self, key: str, value: object, reason: str) -> None:
        """Change a value; its origin tells the reason."""
        section, _, name = key.partition(".")
        origin = self.origin(key)
        self.settings[key] = Setting(value, replace(origin, label=f"{origin.label}, {reason}"))
        self._validate(section, {**self.parts[section].model_dump(), name: value})

    def refuse(self, key: str, message: str, hint: str) -> None:
        """Report a value that does not suit the others."""
        self.problems.append(Problem(key, f"{self.origin(key).where}: {key} {message}", hint))

    def report(self, error: ValidationError, section: str = "") -> None:
        """Report the validation errors of a section, or of the root, in the user's terms."""
        self.problems += [self._problem(section, entry) for entry in error.errors(include_url=False)]

    def _validate(self, section: str, values: Mapping[str, object]) -> None:
        try:
            self.parts[section] = self._sections[section].model_validate(values)
        except ValidationError as error:
            # A preset's values that the variant chosen by something else does not accept are dropped.
            wrong = dict.fromkeys(str(entry["loc"][0]) for entry in error.errors(include_url=False) if entry["loc"])
            unfit = [name for name in wrong if name in values and self._is_for_another_variant(section, f"{section}.{name}")]
            for name in unfit:
                self._drop(f"{section}.{name}")
            if unfit:
                self._validate(section, {name: value for name, value in values.items() if name not in unfit})
            else:
                self.report(error, section)

    def _is_for_another_variant(self, section: str, key: str) -> bool:
        """Whether a preset suggests a value, and something else chose the variant of its section."""
        if section not in self._variants or self.origin(key).kind != "preset":
            return False
        return self.origin(f"{section}.{self._variants[section].key}").label != self.origin(key).label

    def _drop(self, key: str) -> None:
        setting = self.settings.pop(key)
        reason = f"{self._place(key.rpartition('.')[0])} does not accept it"
        self.dropped.append(Dropped(key, setting.value, setting.origin.label, reason))

    def _place(self, section: str) -> str:
        """A section with its variant: "[objective] with name = 'mlm'"."""
        return f"[{section}]" + (f" with {self._chosen[section]}" if section in self._chosen else "")

    def _unknown_key(self, key: str, where: str) -> Problem:
        """An unknown key, with the one that was probably meant."""
        section, _, name = key.rpartition(".")
        # A key of this name, or whose setting is called so in other variants or programs
        extra: dict[str, Any] = {key: field.json_schema_extra or {} for key, field in self._fields.items()}
        same = [key for key, each in extra.items() if name in (key.rpartition(".")[2], *each.get(OTHER_NAME, "").split())]
        variant = self._variants.get(section)
        owners = [value for value in variant.known() if name in variant.model(value).model_fields] if variant else []
        model = self._sections.get(key) or self._sections.get(section)
        if same:
            hint = f"did you mean '{same[0]}'?"
        elif variant and owners:
            hint = f"{variant.kind} '{owners[0]}' has it: --set {section}.{variant.key}={owners[0]}"
        else:
            hint = did_you_mean(name, model.model_fields) if model else did_you_mean(section or name, self._sections)
        place = f" in {self._place(section[:_SHOWN])}" if section else ""
        return Problem(key, f"{where}: unknown key '{name[:_SHOWN]}'{place}", hint)

    def _problem(self, section: str, entry: ErrorDetails) -> Problem:
        """One validation error in the user's terms."""
        path = [*filter(None, [section]), *map(str, entry["loc"])]
        message = entry["msg"].removeprefix("Value error, ")
        key = next((prefix for prefix in accumulate(path, "{}.{}".format) if prefix in self._fields), None)
        if key is None:  # a rule between fields
            section = ".".join(path)
            names = {name: name if name in self.settings else f"{section}.{name}" for name in re.findall(r"[\w.]*\w", message)}
            origins = [f"{name}: {self.settings[key].origin.where}" for name, key in names.items() if key in self.settings]
            place = f"[{section}] " if section else ""
            return Problem(section, f"{place}{message}" + (f" ({', '.join(origins)})" if origins else ""))
        return self._wrong_value(key, message if entry["type"] == "value_error" else "")

    def _wrong_value(self, key: str, reason: str = "") -> Problem:
        """A value that its field does not accept."""
        field = self._fields[key]
        setting = self.settings.get(key, Setting(field.default, DEFAULT))
        text = f"{setting.origin.where}: {key} is {quoted(setting.value)}; {reason or f'expected {expectation(field)}'}"
        return Problem(key, text, f"{key}: {field.description}")
