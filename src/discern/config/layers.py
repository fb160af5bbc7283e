"""Collect settings from presets, files with `extends`, and `--set`; every value keeps its origin."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from discern.config.schema import leaves
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
