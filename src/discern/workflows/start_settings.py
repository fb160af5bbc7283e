"""The configuration of a run that goes on from a model: sizes are the model's, the schedule is the run's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from discern.config.layers import Origin, Setting, Settings, collect, parse_overrides, read_file
from discern.config.problems import InvalidConfigError, Problem, quoted
from discern.config.resolve import Resolved
from discern.config.tree import flatten
from discern.errors import CheckpointError
from discern.interop.names import named_parameters
from discern.model.config import ModelConfig
from discern.model.heads import MaskedLMHead
from discern.model.xlnet import XLNetEncoder
from discern.objectives import algorithms
from discern.objectives.base import Vocabulary
from discern.objectives.config import PositionsConfig
from discern.objectives.rtd_config import RTDConfig
from discern.objectives.weights import factor_at
from discern.workflows.configuration import resolve_pretrain_config
from discern.workflows.runs import build_objective
from discern.workflows.settings import PretrainConfig
from discern.workflows.start import Start
from discern.workflows.start_weights import GENERATOR, lacks_generator

SIZES = (
    "encoder",
    "num_layers",
    "hidden_size",
    "embedding_size",
    "num_heads",
    "feedforward_size",
    "max_positions",
    "num_token_types",
    "normalisation",
    "layer_norm_epsilon",
    "activation",
    "clamp_length",
)
"""Keys of [model] that the weights fix."""

STEPS = 10_000
WARMUP_SHARE = 0.06
"""Of the steps: Gururangan et al. 2020, table 13."""
GENERATOR_WARMUP_SHARE = 0.1
LEARNING_RATE = 1e-4
"""Of a model that doesn't say what it was trained with."""

_OWN = Origin("preset", "going on")
_DERIVED = ("optimizer.warmup_steps", "objective.generator_warmup_steps")


def start_config(
    start: Start,
    vocabulary: Vocabulary,
    preset: str | None,
    file: Path | None,
    overrides: Sequence[str],
    earlier: PretrainConfig | None,
) -> Resolved[PretrainConfig]:
    """The resolved configuration: the model's own or a preset's, then the file, then `--set`.

    What the model was trained with is gone on with, save its schedules: those of the learning rate and of whatever changed
    on the way begin anew, or stay where they ended.

    Args:
        vocabulary: of the data set.
        preset: a recipe instead of the model's own; sizes are the model's all the same.
        file: a TOML file.
        overrides: what `--set` was given.
        earlier: of the run that is resumed; what follows from the number of steps is as it was there.

    Raises:
        ConfigError: anything wrong; or a size is set that the model has not.
    """
    base = _of_model(start) if preset is None else {}
    if preset is not None:
        settings = collect(preset, file, overrides)
    else:
        settings = base | ({} if file is None else read_file(file)) | parse_overrides(overrides)
    settings |= _sizes(start, settings)
    resolved = resolve_pretrain_config(settings)
    derived = _derived(start, vocabulary, resolved.config, settings)
    if earlier is not None:
        before = flatten(earlier)
        derived = {key: before.get(key, value) for key, value in derived.items()}
    if not derived:
        return resolved
    return resolve_pretrain_config(settings | {key: Setting(value, _OWN) for key, value in derived.items()})


def _derived(start: Start, vocabulary: Vocabulary, config: PretrainConfig, settings: Settings) -> dict[str, Any]:
    """What follows from the number of steps, where nobody has set it."""
    steps = config.train.max_steps
    found: dict[str, Any] = {}
    if "optimizer.warmup_steps" not in settings:
        found["optimizer.warmup_steps"] = max(1, round(WARMUP_SHARE * steps))
    objective = config.objective
    if isinstance(objective, RTDConfig) and "objective.generator_warmup_steps" not in settings and _warms_up(objective, steps):
        with torch.device("meta"):
            built = build_objective(config, vocabulary)
        if lacks_generator(built, start):
            found["objective.generator_warmup_steps"] = max(1, round(GENERATOR_WARMUP_SHARE * steps))
    return found


def _warms_up(objective: RTDConfig, steps: int) -> bool:
    """Whether a fresh generator can learn by itself first."""
    frozen = objective.freeze_generator_at is not None or objective.freeze_discriminator_at is not None
    apart = algorithms.load(objective.algorithm).apart
    filled = objective.generator_checkpoint is not None
    return steps > 1 and not (frozen or apart or filled or objective.tying == "all")


def _sizes(start: Start, settings: Settings) -> Settings:
    """The sizes of the model.

    Raises:
        InvalidConfigError: the user set others.
    """
    origin = Origin("preset", f"model {start.folder}")
    sizes = start.main.encoder.config.model_dump() | {"embedding_size": start.main.encoder.embeddings.embedding_size}
    problems, found = [], {}
    for name in SIZES:
        key, value = f"model.{name}", sizes[name]
        setting = settings.get(key)
        found[key] = Setting(value, origin)
        if setting is not None and setting.origin.by_user and setting.value != value:
            text = (
                f"{setting.origin.where}: {key} is {quoted(setting.value)}, but the weights of {start.folder} are of "
                f"{quoted(value)}"
            )
            problems.append(Problem(key, text, f"leave out {key}: the sizes come from the model"))
    if problems:
        raise InvalidConfigError(problems)
    return found


def _of_model(start: Start) -> Settings:
    """The model's own recipe, or one for a model that has none, with a schedule of its own."""
    origin = Origin("preset", f"model {start.folder}")
    if start.config is None:
        values = _recipe(start)
    else:
        values = {key: value for key, value in flatten(start.config).items() if value is not None and key not in _DERIVED}
        values |= _beyond_its_past(start.config, start.config.train.max_steps if start.step is None else start.step)
        # With the seed of before, the same rows would come in the same order under the same masks.
        values["train.seed"] = start.config.train.seed + 1
    values.pop("train.max_hours", None)
    settings = {key: Setting(value, origin) for key, value in values.items() if value is not None}
    return settings | {"train.max_steps": Setting(STEPS, _OWN)}


def _beyond_its_past(config: PretrainConfig, step: int) -> dict[str, Any]:
    """Settings that name steps of the run that made the model, as they stood when its weights were saved.

    Args:
        step: of the weights; a run that was stopped is not at its end.
    """
    objective = flatten(config.objective)
    changed: dict[str, Any] = {}
    for name in ("generator_weight_schedule", "discriminator_weight_schedule"):
        if objective.get(name):
            factor = factor_at(objective[name], step)
            changed[name] = () if factor == 1 else ((0, factor),)
    for name in ("freeze_generator_at", "freeze_discriminator_at"):
        begins = objective.get(name)
        if begins is not None:
            changed[name] = 0 if begins <= step else None
    if isinstance(config.objective, PositionsConfig) and config.objective.mask_probability_end is not None:
        changed |= {"mask_probability": config.objective.probability_at(step), "mask_probability_end": None}
        changed["mask_probability_steps"] = None
    if objective.get("generator_checkpoint") is not None:
        changed["generator_checkpoint"] = None
    if "algorithm" in objective and algorithms.load(objective["algorithm"]).apart:
        # The networks have parted, and now learn together; what they share without gradient they go on sharing.
        changed["algorithm"] = "joint"
        changed["tying"] = objective["tying"] if objective["tying"] == "gradient-disentangled" else "none"
    return {f"objective.{name}": value for name, value in changed.items()}


def _recipe(start: Start) -> dict[str, Any]:
    """For somebody else's model: the objective by its heads, a careful learning rate, everything else as in the paper."""
    model = start.main.encoder.config
    values = {f"model.{name}": value for name, value in flatten(model).items()}
    values["optimizer.learning_rate"] = LEARNING_RATE
    if isinstance(start.main.encoder, XLNetEncoder):
        # Without a memory: how long theirs was, no folder says.
        return values | {"objective.name": "permutation-lm", "data.packing": "two-part"}
    if isinstance(start.main.head, MaskedLMHead):
        return values | {"objective.name": "mlm"}
    values["objective.name"] = "rtd"
    if start.main.bilinear is not None:
        values["objective.discriminator_head"] = "bilinear"
    if GENERATOR in start.networks:
        values |= _generator(start, model)
    return values


def _generator(start: Start, model: ModelConfig) -> dict[str, Any]:
    """How large the generator is beside the discriminator, and what the two share."""
    generator = start.networks[GENERATOR]
    sizes = generator.encoder.config
    width, depth = sizes.hidden_size / model.hidden_size, sizes.num_layers / model.num_layers
    shrunk = model.shrunk(width, depth) if width <= 1 and depth <= 1 else None
    names = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
    if shrunk is None or any(getattr(shrunk, name) != getattr(sizes, name) for name in names):
        found = ", ".join(f"{name} {getattr(sizes, name)}" for name in names)
        raise CheckpointError(
            f"the generator of {start.folder} has {found}, which is no fraction of the discriminator",
            hint=f"go on from the discriminator alone, and a fresh one is trained: discern export {start.folder} --out DIR "
            "--network discriminator",
        )
    own, theirs = named_parameters(start.main), named_parameters(generator)
    prefix = "encoder.embeddings."
    same = {key: own[key].shape == theirs[key].shape and torch.equal(own[key], theirs[key]) for key in own if prefix in key}
    tying = "embeddings" if all(same.values()) else "token" if same[f"{prefix}word.weight"] else "none"
    return {"objective.generator_size": width, "objective.generator_depth": depth, "objective.tying": tying}
