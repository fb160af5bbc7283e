"""The encoder that a MODEL argument means: a folder, or the name of a preset for a network that has learned nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from discern.config.presets import preset_names
from discern.errors import ConfigError, DataError, did_you_mean
from discern.interop.hub import local_model
from discern.workflows.encoders import LoadedEncoder, encoder_of_preset, fresh_encoder, load_encoder


def choose_encoder(model: str, tokenizer: Path | None, *, untrained: bool, warn: Callable[[str], None]) -> LoadedEncoder:
    """The encoder to fine-tune.

    Args:
        model: folder of a run, an export or a Hugging Face model, the name of one on the Hub, or the name of a preset.
        tokenizer: for a preset, which has none of its own.
        untrained: the sizes and the tokenizer of the model with the weights of step 0.

    Raises:
        ConfigError: a preset without a tokenizer, or a model with one.
        DataError, CheckpointError: as of `load_encoder`.
    """
    folder = Path(model) if model in preset_names() else local_model(model, warn)
    if folder.exists():
        if tokenizer is not None:
            raise ConfigError("--tokenizer is for presets; a model has its own", hint="leave out --tokenizer")
        loaded = load_encoder(folder, warn=warn)
        return fresh_encoder(loaded, 0) if untrained else loaded
    if model not in preset_names():
        near = did_you_mean(model, preset_names())
        raise DataError(
            f"there is no folder {model}, and no preset of that name", hint=f"give a run, an export or a model folder; {near}"
        )
    if tokenizer is None:
        raise ConfigError(
            f"preset {model} has no tokenizer", hint="--tokenizer PATH: a tokenizer.json, a vocab.txt or a model folder"
        )
    return encoder_of_preset(model, tokenizer, 0)
