"""The settings of a run that starts from a model: the sizes are those of the model, the schedule is that of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.run import build_objective
from discern.config.layers import Origin, Setting, Settings, collect, parse_overrides, read_file
from discern.config.problems import InvalidConfigError, Problem, quoted
from discern.config.resolve import Resolved
from discern.config.schema import flatten
from discern.errors import CheckpointError
from discern.interop.names import named_parameters
from discern.models.config import ModelConfig
from discern.models.heads import MaskedLMHead
from discern.models.xlnet.encoder import XLNetEncoder
from discern.objectives.base import Vocabulary
from discern.pretraining.warm_start import GENERATOR, lacks_generator, main_network
from discern.training.pretrain_config import PretrainConfig, resolve_pretrain_config
from discern.training.schedule import step_sizes

STEPS = 10_000
WARMUP_SHARE = 0.06
"""Fraction of the steps: Gururangan et al. 2020, table 13."""
GENERATOR_WARMUP_SHARE = 0.1
LEARNING_RATE = 1e-4
"""Learning rate for a model that does not record its own."""

_OWN = Origin("preset", "continued training")
_GENERATOR_WARMUP = "objective.generator_warmup_steps"
_OF_THE_SCHEDULE = ("optimizer.warmup_steps", "optimizer.decay_steps", _GENERATOR_WARMUP, "train.max_hours")


def start_config(
    start: ModelFolder,
    vocabulary: Vocabulary,
    preset: str | None,
    file: Path | None,
    overrides: Sequence[str],
    earlier: PretrainConfig | None,
) -> Resolved[PretrainConfig]:
    """Resolve the configuration: the model's own or a preset's, then the file, then `--set`.

    Settings that the model was trained with are kept, except for schedules: that of the learning rate starts again, and settings
    that changed during training keep their last value.

    Args:
        vocabulary: vocabulary of the data set.
        preset: recipe to use instead of the model's own; the sizes remain those of the model.
        file: TOML file.
        overrides: values of `--set`.
        earlier: configuration of the run that is resumed, which keeps the steps that fractions of the run became.

    Raises:
        ConfigError: a setting is invalid, or a size differs from that of the model.
    """
    if preset is not None:
        settings = collect(preset, file, overrides)
    else:
        settings = _of_model(start) | ({} if file is None else read_file(file)) | parse_overrides(overrides)
    settings |= _sizes(start, settings)
    settings = {"optimizer.warmup_steps": Setting(WARMUP_SHARE, _OWN)} | settings
    resolved = resolve_pretrain_config(settings, earlier=earlier)
    objective = resolved.config.objective
    if not objective.can_warm_up_generator or _GENERATOR_WARMUP in settings or resolved.config.train.max_steps == 1:
        return resolved
    # A new generator is first trained alone, beside the trained discriminator.
    with torch.device("meta"):
        built = build_objective(resolved.config, vocabulary)
    if not lacks_generator(built, start):
        return resolved
    return resolve_pretrain_config(settings | {_GENERATOR_WARMUP: Setting(GENERATOR_WARMUP_SHARE, _OWN)}, earlier=earlier)


def _sizes(start: ModelFolder, settings: Settings) -> Settings:
    """Sizes of the model, as settings.

    Raises:
        InvalidConfigError: the user set other sizes.
    """
    encoder = main_network(start).encoder
    sizes = encoder.config.fixed() | {"embedding_size": encoder.embeddings.embedding_size}
    problems = []
    for key, size in ((f"model.{name}", size) for name, size in sizes.items()):
        setting = settings.get(key)
        if setting is not None and setting.origin.by_user and setting.value != size:
            text = (
                f"{setting.origin.where}: {key} is {quoted(setting.value)}, but the weights of {start.folder} have {quoted(size)}"
            )
            problems.append(Problem(key, text, f"leave out {key}: the model determines the sizes"))
    if problems:
        raise InvalidConfigError(problems)
    origin = Origin("preset", f"model {start.folder}")
    return {f"model.{name}": Setting(size, origin) for name, size in sizes.items()}


def _of_model(start: ModelFolder) -> Settings:
    """Settings that the model was trained with, or a recipe for a foreign model, with a new schedule."""
    origin = Origin("preset", f"model {start.folder}")
    if start.config is None:
        values = _recipe(start)
    else:
        values = {key: value for key, value in flatten(start.config).items() if key not in _OF_THE_SCHEDULE}
        step = start.config.train.max_steps if start.step is None else start.step
        values |= {f"objective.{name}": value for name, value in start.config.objective.continued_at(step).items()}
        size = step_sizes(start.config.train, start.config.data).at(max(step - 1, 0))
        values |= {"train.batch_schedule": (), "data.length_schedule": ()}
        values |= {"train.sequences_per_step": size.rows, "data.sequence_length": size.length}
        # With the previous seed, the same rows would come in the same order with the same masks.
        values["train.seed"] = start.config.train.seed + 1
    settings = {key: Setting(value, origin) for key, value in values.items() if value is not None}
    return settings | {"train.max_steps": Setting(STEPS, _OWN)}


def _recipe(start: ModelFolder) -> dict[str, Any]:
    """Recipe for a foreign model: the objective that suits its heads, a low learning rate, and the defaults of the paper."""
    model = main_network(start).encoder.config
    values = {f"model.{name}": value for name, value in flatten(model).items()}
    values["optimizer.learning_rate"] = LEARNING_RATE
    if isinstance(main_network(start).encoder, XLNetEncoder):
        # Without a memory, as no folder records its length.
        return values | {"objective.name": "permutation-lm", "data.packing": "two-part"}
    if isinstance(main_network(start).head, MaskedLMHead):
        return values | {"objective.name": "mlm"}
    values["objective.name"] = "rtd"
    if main_network(start).bilinear is not None:
        values["objective.discriminator_head"] = "bilinear"
    if GENERATOR in start.networks_to_train:
        values |= _generator(start, model)
    return values


def _generator(start: ModelFolder, model: ModelConfig) -> dict[str, Any]:
    """Relative size of the generator, and what it shares with the discriminator."""
    generator = start.networks_to_train[GENERATOR]
    sizes = generator.encoder.config
    width, depth = sizes.hidden_size / model.hidden_size, sizes.num_layers / model.num_layers
    shrunk = model.shrunk(width, depth) if width <= 1 and depth <= 1 else None
    names = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
    if shrunk is None or any(getattr(shrunk, name) != getattr(sizes, name) for name in names):
        found = ", ".join(f"{name} {getattr(sizes, name)}" for name in names)
        raise CheckpointError(
            f"the generator of {start.folder} has {found}, which is not a fraction of the discriminator",
            hint=f"continue from the discriminator alone, with a new generator: discern export {start.folder} --out DIR "
            "--network discriminator",
        )
    own, theirs = named_parameters(main_network(start)), named_parameters(generator)
    prefix = "encoder.embeddings."
    same = {key: own[key].shape == theirs[key].shape and torch.equal(own[key], theirs[key]) for key in own if prefix in key}
    tying = "embeddings" if all(same.values()) else "token" if same[f"{prefix}word.weight"] else "none"
    return {"objective.generator_size": width, "objective.generator_depth": depth, "objective.tying": tying}
