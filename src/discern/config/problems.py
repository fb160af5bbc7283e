"""Errors in a configuration: what was found, what was expected, and where the value comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from discern.config.layers import DEFAULT, Setting, Settings
from discern.config.schema import Schema, Variant, choices, expectation, other_names
from discern.errors import ConfigError, did_you_mean, nearest

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
        self.problems = tuple(problems)
        if len(problems) == 1:
            super().__init__(problems[0].text, hint=problems[0].hint)
            return
        lines = [f"{len(problems)} problems in the configuration"]
        for problem in problems:
            lines += [f"- {problem.text}", *([f"    hint: {problem.hint}"] if problem.hint else [])]
        super().__init__("\n".join(lines))


def quoted(value: object) -> str:
    """A value in the form in which messages show it; long values are shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:  # beyond 4300 digits, Python refuses to write it out
        return f"a whole number of more than {_SHOWN} digits"
    return f"'{shortened(value)}'" if isinstance(value, str) else shortened(str(value))


def shortened(text: str) -> str:
    """`text`, cut if it is too long for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def unknown_key(
    key: str, setting: Setting, schema: Schema, variant: Variant | None = None, elsewhere: Sequence[str] = ()
) -> Problem:
    """Report an unknown key, and suggest the one that was probably meant.

    Args:
        variant: the variants of the key's section, if its keys depend on one of its values.
        elsewhere: values of the deciding key for which the section has this key.
    """
    where, key = setting.origin.where, shortened(key)
    section, _, name = key.rpartition(".")
    if key in schema.sections:
        return Problem(key, f"{where}: {key} is a section, not a value", f"its keys: {', '.join(schema.names(key))}")
    if section in schema.fields:
        return Problem(key, f"{where}: {section} is a value and has no part '{name}'", f"set {section} itself")
    if section in schema.sections:
        place = f" in [{section}]{schema.note(section)}" if section else ""
        if variant is not None and elsewhere and not _has_other_name(section, name, schema):
            owners = ", ".join(f"'{value}'" for value in elsewhere)
            kind, has = (variant.kind, "has") if len(elsewhere) == 1 else (f"{variant.kind}s", "have")
            hint = f"{kind} {owners} {has} it: --set {section}.{variant.key}={elsewhere[0]}"
        else:
            hint = _likeliest_key(section, name, schema)
        return Problem(key, f"{where}: unknown key '{name}'{place}", hint)
    sections = [known for known in schema.sections if known]
    elsewhere = [known for known in schema.fields if known.rpartition(".")[2] == name]
    hint = did_you_mean(section, sections)
    if nearest(section, sections) is None and elsewhere:
        hint = f"did you mean '{elsewhere[0]}'?"
    return Problem(key, f"{where}: unknown section [{section}]", hint)


def _likeliest_key(section: str, name: str, schema: Schema) -> str:
    """A hint at the key that was probably meant.

    In order of preference: the same setting under its name in this section, the same name in another section, the most similar
    name in this section, the most similar name in any section, all names in this section.
    """
    if known := _has_other_name(section, name, schema):
        return f"did you mean '{section}.{known}'?"
    by_name = {known.rpartition(".")[2]: known for known in reversed(list(schema.fields))}
    if name in by_name:
        return f"did you mean '{by_name[name]}'?"
    if guess := nearest(name, schema.names(section)):
        return f"did you mean '{guess}'?"
    if guess := nearest(name, by_name):
        return f"did you mean '{by_name[guess]}'?"
    return f"known: {', '.join(schema.names(section))}"


def _has_other_name(section: str, name: str, schema: Schema) -> str | None:
    """The key of a section that is called `name` in other variants or programs."""
    return next((known for known in schema.names(section) if name in other_names(schema.fields.get(f"{section}.{known}"))), None)


def wrong_value(key: str, setting: Setting, field: FieldInfo, because: str | None = None) -> Problem:
    """Report a value that its field does not accept."""
    reason = because or f"expected {expectation(field)}"
    guess = nearest(setting.value.lower(), choices(field)) if isinstance(setting.value, str) else None
    text = f"{setting.origin.where}: {key} is {quoted(setting.value)}; {reason}"
    return Problem(key, text, f"did you mean '{guess}'?" if guess else _about(key, field))


def _about(key: str, field: FieldInfo) -> str | None:
    return f"{key}: {field.description}" if field.description else None


def translated(section: str, error: ValidationError, settings: Settings, schema: Schema) -> list[Problem]:
    """The validation errors of a section, in the user's terms."""
    found = [_translated_one(section, entry, settings, schema) for entry in error.errors(include_url=False)]
    return list(dict.fromkeys(found))  # a field of several types has an error for each of them


def _translated_one(section: str, entry: ErrorDetails, settings: Settings, schema: Schema) -> Problem:
    path = [*([section] if section else []), *map(str, entry["loc"])]
    message = entry["msg"].removeprefix("Value error, ")
    prefixes = [".".join(path[:length]) for length in range(len(path), 0, -1)]
    key = next((prefix for prefix in prefixes if prefix in schema.fields), None)
    if key is None:
        return _across_fields(".".join(path), message, settings, schema)
    field = schema.fields[key]
    # Below a key there are the items of a list, by number, and the types of a union, by name.
    of_an_item = any(isinstance(part, int) for part in entry["loc"])
    if entry["type"] == "missing" and not of_an_item:
        return Problem(key, f"{key} is missing; expected {expectation(field)}", _about(key, field))
    setting = settings.get(key, Setting(field.get_default(call_default_factory=False), DEFAULT))
    own_words = entry["type"] in ("value_error", "assertion_error") or of_an_item
    if of_an_item and entry["type"] in ("missing", "tuple_type", "too_long"):
        message = "expected a list of pairs, as in [[0, 0.0], [1000, 1.0]]"
    return wrong_value(key, setting, field, message if own_words else None)


def _across_fields(section: str, message: str, settings: Settings, schema: Schema) -> Problem:
    """The problem of a violated rule between fields, with the origin of each field that the message names."""
    named = dict.fromkeys(re.findall(r"\w+", message))
    keys = {name: f"{section}.{name}" if section else name for name in named}
    keys |= {key: key for key in schema.fields if key in message}
    origins = [f"{name}: {settings[key].origin.where}" for name, key in keys.items() if key in settings]
    place = f"[{section}] " if section else ""
    return Problem(section, f"{place}{message}" + (f" ({', '.join(origins)})" if origins else ""))
