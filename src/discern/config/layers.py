"""Collect settings from presets, files with `extends`, and `--set`; every value keeps its origin."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from discern.errors import ConfigError, did_you_mean
from discern.parsing import toml_tables
from discern.storage.checksums import read_text

_DEEPEST = 16
"""Maximum number of parts of a dotted key; ours have two or three."""
_SHOWN = 200

# Files beside a TOML file that discern wrote, in a run, a fine-tuned model or an export.
_WRITTEN_BESIDE = {"config.toml": ("run.json", "finetuned.json"), "discern.toml": ("config.json",)}


@dataclass(frozen=True)
class Origin:
    """The layer that a value comes from; `str()` returns the text that `config show` prints.

    Attributes:
        kind: the sort of layer.
        label: name of the layer: "preset electra-small", "run.toml", "--set", "default".
        line: line of the file, if known.
        written: whether discern wrote the file.
    """

    kind: Literal["default", "preset", "file", "set"]
    label: str
    line: int | None = None
    written: bool = False

    def __str__(self) -> str:
        return self.label

    @property
    def by_user(self) -> bool:
        """Whether the user asked for the value, in a file or with --set; a preset only suggests it."""
        return self.kind in ("file", "set")

    @property
    def where(self) -> str:
        """File and line, or option, for error messages."""
        return f"{self.label}, line {self.line}" if self.line and self.kind == "file" else self.label


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
    settings: Settings = {}
    if preset is not None:
        settings |= _read_preset(preset, ())
    if file is not None:
        settings |= _read_file(_existing(file), (), base_is_given=preset)
    return settings | parse_overrides(overrides)


def parse_overrides(overrides: Sequence[str]) -> Settings:
    """Parse the values of `--set key=value`, as TOML if they are TOML, and as plain text otherwise.

    Raises:
        ConfigError: some have no '='; all of them are named.
    """
    wrong = [text for text in overrides if not text.partition("=")[1] or not text.partition("=")[0].strip()]
    if wrong:
        raise ConfigError(
            "\n".join(f"--set {text[:_SHOWN]}: expected section.key=value" for text in wrong),
            hint="for example --set train.max_steps=1000",
        )
    settings: Settings = {}
    for text in overrides:
        key, _, value = text.partition("=")
        settings |= {name: Setting(leaf, Origin("set", "--set")) for name, leaf in leaves({key.strip(): _value(value)})}
    return settings


def _value(text: str) -> object:
    """The TOML value in `text`, or `text` itself if it is not a TOML value."""
    try:
        parsed = toml_tables(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text.strip()


def read_file(path: Path, *, written: bool = False) -> Settings:
    """Read the values of a TOML file and of the files and presets that it extends.

    Args:
        written: True if discern is known to have written the file. If False, the files beside it decide.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    path = path if written else _existing(path)
    return _read_layer(path, str(path), "file", (), written=written)


def _read_preset(name: str, above: tuple[str, ...]) -> Settings:
    """The values of a preset, which override those of the preset that it extends."""
    path = preset_path(name)
    return _read_layer(path, f"preset {name}", "preset", above)


def _read_file(path: Path, above: tuple[str, ...], base_is_given: str | None = None) -> Settings:
    """The values of a file, which override those of the file or preset that it extends."""
    return _read_layer(path, str(path), "file", above, base_is_given)


def _read_layer(
    path: Path,
    label: str,
    kind: Literal["preset", "file"],
    above: tuple[str, ...],
    base_is_given: str | None = None,
    *,
    written: bool = False,
) -> Settings:
    identity = str(path.resolve())
    if identity in above:
        chain = " -> ".join(Path(step).name for step in (*above[above.index(identity) :], identity))
        raise ConfigError(f"{label}: 'extends' forms a cycle: {chain}", hint="remove one of these lines")
    text = _text(path)
    tree = parse_toml(text, label)
    base = tree.pop("extends", None)
    if base is not None and base_is_given not in (None, base):
        raise ConfigError(
            f"{label} extends '{base}', and --preset {base_is_given} would be a second base",
            hint="leave out --preset, or remove the line 'extends' from the file",
        )
    lines = _line_numbers(text)
    written = written or any((path.parent / name).is_file() for name in _WRITTEN_BESIDE.get(path.name, ()))
    own = {key: Setting(leaf, Origin(kind, label, lines.get(key), written)) for key, leaf in leaves(tree)}
    return _read_base(base, path, label, (*above, identity)) | own


def _read_base(base: object, path: Path, label: str, above: tuple[str, ...]) -> Settings:
    """The values of the preset or file that `extends` names; empty if it is missing. Paths are relative to the file itself."""
    if base is None:
        return {}
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{label}: extends is {base!r}; expected the name of a preset or the path of a file")
    if not base.endswith(".toml") and "/" not in base:
        return _read_preset(base, above)
    beside = path.parent / base
    if not beside.is_file():
        raise ConfigError(
            f"{label} extends '{base}', but there is no file {beside}", hint="the path is relative to the file that names it"
        )
    return _read_file(beside, above)


def _existing(path: Path) -> Path:
    """The file, or config.toml of a run folder."""
    if path.is_dir():
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is a folder without config.toml", hint="give a TOML file or the folder of a run")
        return path / "config.toml"
    if not path.exists():
        known = f"'{path}' is a preset; give it as --preset {path}" if str(path) in preset_names() else "check the path"
        raise ConfigError(f"there is no configuration file {path}", hint=known)
    return path


def _text(path: Path) -> str:
    # Editors on Windows begin a file with a byte order mark.
    hint = "a configuration is a TOML file, in UTF-8; if discern wrote it, copy it back"
    return read_text(path, hint=hint, error=ConfigError).removeprefix("\ufeff")


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


def leaves(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Every value of a nested table with its dotted key. An empty table is a value, which only sections accept.

    Raises:
        ConfigError: the tables are nested too deeply.
    """
    if prefix.count(".") > _DEEPEST:
        raise ConfigError(
            f"the key {prefix[:_SHOWN]}... has more than {_DEEPEST} parts", hint="use section.key, as in train.max_steps"
        )
    found: list[tuple[str, object]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += leaves(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


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
_USUAL_VOCABULARIES = {"cpu-small": 8192, "xlnet-cpu": 8192, "modern-cpu": 8192, "deberta-cpu": 8192, "demo": 4096}
_USUAL_VOCABULARIES |= {"gpu-minutes": 16_384, **{f"deberta-v3-{size}": 128_100 for size in ("xsmall", "small", "base", "large")}}


def usual_vocabulary(preset: str | None) -> int:
    """Size of the vocabulary that a preset is meant for. The stated number of parameters assumes this size."""
    return _USUAL_VOCABULARIES.get(preset or "", DEFAULT_VOCABULARY)


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


def override_combinations(sweep: Sequence[str], known: Collection[str]) -> dict[str, list[str]]:
    """The combinations of a sweep: overrides by a name; without a sweep a single one without a name.

    Args:
        sweep: values per setting, as "learning_rate=1e-4,3e-4"; the section of a known key may be left out.
        known: dotted keys.

    Raises:
        ConfigError: a setting has no values, or is unknown.
    """
    axes: list[tuple[str, list[str]]] = []
    for axis in sweep:
        key, _, listed = axis.partition("=")
        key, values = key.strip(), [value.strip() for value in listed.split(",") if value.strip()]
        if not values:
            raise ConfigError(f"--sweep {axis}: expected key=value,value", hint="for example --sweep learning_rate=1e-4,3e-4")
        if "." not in key:
            matches = [name for name in known if name.rpartition(".")[2] == key]
            if len(matches) != 1:
                which = f"could be {' or '.join(matches)}" if matches else "is not a setting"
                near = did_you_mean(key, [name.rpartition(".")[2] for name in known])
                raise ConfigError(f"--sweep {key} {which}", hint=f"give it with its section, as task.{key}=...; {near}")
            key = matches[0]
        parse_overrides([f"{key}={values[0]}"])
        axes.append((key, values))
    combinations = {}
    for combination in itertools.product(*(values for _, values in axes)):
        assigned = [(key, value) for (key, _), value in zip(axes, combination, strict=True)]
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in assigned)
        combinations[name] = [f"{key}={value}" for key, value in assigned]
    return combinations
