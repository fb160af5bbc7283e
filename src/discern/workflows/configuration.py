"""The configuration of a pre-training run, from what the user typed to a validated object that knows its origins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from discern.config.layers import Settings, collect
from discern.config.presets import preset_names
from discern.config.resolve import Clamp, Resolved, resolve
from discern.config.schema import Variant
from discern.config.tree import diff
from discern.errors import ConfigError
from discern.model import encoders
from discern.model.config import ModelConfig
from discern.objectives import objectives
from discern.workflows.settings import PretrainConfig

if TYPE_CHECKING:
    from discern.model.encoder import Encoder


def load_pretrain_config(file: Path | None, preset: str | None, overrides: Sequence[str] = ()) -> Resolved[PretrainConfig]:
    """The resolved configuration: preset, then file (or the config.toml of a run folder), then `--set`.

    Args:
        file: a TOML file, or the folder of a run.
        preset: name of a preset to start from.
        overrides: what `--set` was given: "train.max_steps=1000".

    Raises:
        ConfigError: nothing to start from, or anything wrong in it; all problems are named at once.
    """
    return resolve_pretrain_config(collect(preset, file, overrides))


def read_written_config(path: Path) -> PretrainConfig:
    """The configuration that discern wrote into the folder of a run or of an export.

    Raises:
        ConfigError: it is missing or damaged; the message names the file.
    """
    try:
        return load_pretrain_config(path, None).config
    except ConfigError as problem:
        if str(path) in problem.message:
            raise
        hint = "copy the file again from where the folder came from"
        raise ConfigError(f"{path} is damaged: {problem.message}", hint=hint) from problem


def resolve_pretrain_config(settings: Settings) -> Resolved[PretrainConfig]:
    """The resolved configuration of settings that are already gathered.

    Raises:
        ConfigError: anything wrong in them; all problems are named at once.
    """
    return resolve(PretrainConfig, settings, {"objective": Variant("name", _objective_config, objectives.names)}, _CLAMPS)


def differences(left: str, right: str) -> list[tuple[str, Any, Any]]:
    """The keys in which two configurations differ, with both values; `ABSENT` where one has no such key.

    Args:
        left: a preset, a TOML file or the folder of a run.
        right: the same.
    """
    return diff(_named(left).config, _named(right).config)


def _named(name: str) -> Resolved[PretrainConfig]:
    """The configuration of a preset, a file or a run."""
    is_preset = name in preset_names() or not (Path(name).exists() or "/" in name or name.endswith(".toml"))
    return load_pretrain_config(None, name) if is_preset else load_pretrain_config(Path(name), None)


def _has_no_position_table(model: ModelConfig) -> bool:
    try:
        kind: type[Encoder] = encoders.load(model.encoder)
    except ConfigError:  # reported with all else that is wrong
        return False
    return not kind.limits_positions


_CLAMPS = (Clamp("data.sequence_length", limit="model.max_positions", unless=_has_no_position_table),)


def _objective_config(name: str) -> type[BaseModel]:
    """The configuration class of an objective; imports it, and with it torch."""
    objective: Any = objectives.load(name)
    return cast(type[BaseModel], objective.Config)
