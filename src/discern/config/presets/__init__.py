"""The presets of discern: one TOML file each, with a description in its first line."""

from __future__ import annotations

from pathlib import Path

from discern.errors import ConfigError, did_you_mean

_FOLDER = Path(__file__).parent

DEFAULT_VOCABULARY = 30_522
"""Size of BERT's vocabulary, for which the recipes of the paper were made."""
_USUAL_VOCABULARIES = {"cpu-small": 8192, "xlnet-cpu": 8192, "modern-cpu": 8192, "demo": 4096, "gpu-minutes": 16_384}


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
