"""The configuration of a pre-training run: its sections put together and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from discern.config.layers import Settings, collect, preset_names, read_file
from discern.config.resolve import Resolution, Resolved, resolve
from discern.config.schedule import last_point, to_steps
from discern.config.schema import Section, Variant, diff, flatten, toml_value
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.models import encoders
from discern.models.config import ModelConfig, build_config, config_class
from discern.models.embeddings import Embeddings
from discern.objectives import objectives
from discern.objectives.config import ObjectiveConfig
from discern.training.config import OptimizerConfig, TrainConfig, limit_micro_batch
from discern.training.schedule import overlap, step_sizes

_SEGMENTS_OF_TWO_PARTS = 3  # text and A, B, [CLS]


class PretrainConfig(Section):
    """All settings that determine what a pre-training run computes, apart from its data set."""

    data: DataConfig = Field(default_factory=DataConfig)
    model: SerializeAsAny[ModelConfig] = Field(default_factory=build_config)
    objective: SerializeAsAny[ObjectiveConfig]
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    @field_validator("objective", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """The objective's own configuration class, found by its name."""
        if isinstance(value, dict) and "name" in value:
            return objectives.load(value["name"]).Config.model_validate(value)
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _by_encoder(cls, value: Any) -> Any:
        """The encoder's own configuration class, found by its name."""
        return build_config(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _rows_suit(self) -> PretrainConfig:
        """Check that rows, encoder, objective and batch are compatible."""
        data, train = self.data, self.train
        sizes = step_sizes(train, data)
        for length in sorted({segment.length for segment in sizes.segments}):
            self.objective.check(data.at_length(length), self.model)
        encoder: Any = encoders.load(self.model.encoder)
        if data.packing == "two-part" and data.reversed_rows and not encoder.reads_backwards:
            raise ValueError(
                f"half of the rows of data.packing 'two-part' run backwards, which model.encoder '{self.model.encoder}' does "
                "not support; set data.reversed_rows=false"
            )
        has_table, types = issubclass(encoder.embeddings_class, Embeddings), self.model.num_token_types
        if data.packing == "two-part" and has_table and types < _SEGMENTS_OF_TWO_PARTS:
            raise ValueError(
                f"rows of data.packing 'two-part' have {_SEGMENTS_OF_TWO_PARTS} segments, but model.num_token_types is {types}; "
                f"set model.num_token_types={_SEGMENTS_OF_TWO_PARTS}"
            )
        # Rows of a step that are read in order are slots.
        for segment in sizes.segments if self.objective.reads_in_order else ():
            rows, micro = segment.rows, train.micro_batch_size
            what = f"{rows} rows of {segment.length} in an update (train.sequences_per_step, or the schedules)"
            if data.reversed_rows and rows % 2:
                raise ValueError(
                    f"{what} cannot be split into equally many forward and backward slots; set an even number, or "
                    "data.reversed_rows=false"
                )
            if micro is not None and rows % min(rows, micro * data.sequence_length // segment.length):
                raise ValueError(f"{what} are not a multiple of train.micro_batch_size {micro}; set one that divides them")
        return self


def load_pretrain_config(
    file: Path | None, preset: str | None, overrides: Sequence[str] = (), *, earlier: PretrainConfig | None = None
) -> Resolved[PretrainConfig]:
    """Resolve a configuration: preset, then file (or the `config.toml` of a run folder), then `--set`.

    Args:
        file: a TOML file, or the folder of a run.
        preset: name of a preset to start from.
        overrides: values of `--set`: "train.max_steps=1000".
        earlier: as for `resolve_pretrain_config`.

    Raises:
        ConfigError: there is no configuration to start from, or it is invalid; the message lists all problems.
    """
    return resolve_pretrain_config(collect(preset, file, overrides), earlier=earlier)


def read_written_config(path: Path) -> PretrainConfig:
    """Read a configuration that discern wrote into the folder of a run or an export.

    Raises:
        ConfigError: it is missing or damaged; the message names the file.
    """
    settings = read_file(path)
    try:
        return resolve_pretrain_config(settings, may_end_early=True).config
    except ConfigError as problem:
        hint = "copy the file again from where the folder came from"
        raise ConfigError(f"{path} is damaged: {problem.message}", hint=hint) from problem


def resolve_pretrain_config(
    settings: Settings, *, earlier: PretrainConfig | None = None, may_end_early: bool = False
) -> Resolved[PretrainConfig]:
    """Resolve settings that are already collected. Fractions of the run become steps.

    Args:
        earlier: configuration of the run that is resumed, which keeps the steps that fractions became when it started.
        may_end_early: accept steps beyond the end of the run, as for a run that is resumed or continues another one.

    Raises:
        ConfigError: they are invalid; the message lists all problems.
    """
    adjust = partial(_adjust, earlier=earlier, may_end_early=may_end_early or earlier is not None)
    return resolve(PretrainConfig, settings, _VARIANTS, adjust)


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


_POINTS = (
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "train.batch_schedule",
    "data.length_schedule",
    "data.mixture",
    "objective.mask_probability_steps",
    "objective.temperature_steps",
    "objective.freeze_generator_at",
    "objective.generator_warmup_steps",
    "objective.two_stage_steps",
)
"""Settings that are points in a run, or lists of points with values."""
_BEFORE_THE_END = ("warmup_steps", "freeze_generator_at", "two_stage_steps")
"""Names of those after which steps have to follow; the others may be the end of the run."""


def _adjust(work: Resolution, *, earlier: PretrainConfig | None, may_end_early: bool) -> None:
    """Change the settings that follow from others, and refuse the user's where they contradict each other."""
    user_set = work.user_set

    # The size of a step is that of the schedule's last segment. A size that the user sets turns the schedule of a preset off.
    for scheduled, size in (
        ("data.length_schedule", "data.sequence_length"),
        ("train.batch_schedule", "train.sequences_per_step"),
    ):
        schedule, value = work.value(scheduled), work.value(size)
        if not schedule:
            continue
        last = schedule[-1][1] // (1 if scheduled.startswith("data") else work.value("data.sequence_length"))
        if last == value:
            continue
        if scheduled in user_set and size in user_set:
            hint = f"leave out {size}, or --set {scheduled}=[] for the same size throughout"
            work.refuse(scheduled, f"ends with {last:,}, but {size} is {value:,}; expected the same", hint)
        elif scheduled not in user_set and (size in user_set or last < 1):
            work.set_value(scheduled, (), f"off because of {size}")
        elif last >= 1:
            work.set_value(size, last, f"the last of {scheduled}")

    # Rows have to fit into the table of positions, micro-batches into the batch.
    length, positions = work.value("data.sequence_length"), work.value("model.max_positions")
    encoder = encoders.load(work.value("model.encoder"))
    if length > positions and encoder.limits_positions(lambda name: work.value(f"model.{name}")):
        by_user = [key for key in ("data.sequence_length", "data.length_schedule") if key in user_set]
        if by_user:
            hint = f"--set data.sequence_length={positions}, or --set model.max_positions={length}"
            work.refuse(by_user[0], f"is {length}, beyond model.max_positions, which is {positions}", hint)
        else:
            work.set_value("data.length_schedule", (), "off because of model.max_positions")
            work.set_value("data.sequence_length", positions, "at most model.max_positions")
    limit_micro_batch(work)

    # Fractions of the run become steps, which have to lie within it.
    steps, hours = work.value("train.max_steps"), work.value("train.max_hours")
    if hours is not None and work.value("optimizer.decay_steps") is not None:
        if "optimizer.decay_steps" in user_set:
            unknown = "but the number of steps that train.max_hours allows is not known in advance"
            work.refuse("optimizer.decay_steps", f"is set, {unknown}", "set optimizer.decay_fraction instead, for example 0.2")
        else:
            work.set_value("optimizer.decay_steps", None, "off because of train.max_hours")
    started = {} if earlier is None else flatten(earlier)
    for key in _POINTS:
        value = work.value(key)
        if key == "objective.two_stage_steps" and work.value("objective.algorithm") != "two-stage":
            continue  # its default is a fraction
        resolved = to_steps(value, steps)
        if resolved != value:
            if hours is not None and not key.startswith("optimizer."):
                unknown = "and the number of steps that train.max_hours allows is not known in advance"
                work.refuse(key, f"has a fraction of the run, {unknown}", "leave out train.max_hours, or give steps")
                continue
            resolved = started.get(key, resolved)
            work.set_value(key, resolved, f"{toml_value(value)} of train.max_steps")
        if key == "optimizer.decay_steps":  # checked together with the warm-up
            continue
        last = last_point(resolved)
        if (
            may_end_early
            or hours is not None
            or last <= 1
            or last < steps
            or (last == steps and not key.endswith(_BEFORE_THE_END))
        ):
            continue
        hint = f"give fractions of the run below 1, or --set train.max_steps={2 * last}"
        work.refuse(key, f"names step {last:,}, which is not within the {steps:,} steps of train.max_steps", hint)
    if hours is None and (problem := overlap(work.parts["optimizer"], steps)) and not work.problems:
        work.refuse("optimizer.warmup_steps", f"and decay do not fit: {problem}", "--set optimizer.warmup_steps=0.1, for example")


_VARIANTS = {
    "model": Variant("encoder", config_class, encoders.names, "encoder"),
    "objective": Variant("name", lambda name: objectives.load(name).Config, objectives.names, "objective"),
}
