"""Sections [optimizer] and [train], the schedules that they describe, and the configuration of a pre-training run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from discern.config.resolve import Resolution, Resolved, Settings, collect, preset_names, read_file, resolve
from discern.config.schema import (
    OTHER_NAME,
    MixtureSchedule,
    RunPoint,
    ScheduleSegment,
    Section,
    SizeSchedule,
    Variant,
    check_schedule,
    diff,
    flatten,
    json_schema,
    last_point,
    to_step,
    to_steps,
    toml_value,
)
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.models import encoders
from discern.models.config import ModelConfig, build_config, config_class
from discern.models.layers import Embeddings
from discern.objectives import objectives
from discern.objectives.config import ObjectiveConfig

TrackerName = Literal["none", "wandb", "trackio"]
NO_STEP_LIMIT = 1_000_000_000
"""`train.max_steps` of a run that is limited by its time budget only."""


class OptimizerConfig(Section):
    """Optimizer with decoupled weight decay, gradient clipping and a schedule. Defaults: ELECTRA, table 6."""

    name: Literal["adamw", "muon", "stable-adamw"] = Field(
        "adamw",
        description="'adamw': Adam with decoupled weight decay. 'muon': Muon for the hidden matrices, AdamW for embeddings, "
        "output layers, biases and norms, with the same learning rate and weight decay. 'stable-adamw': AdamW that reduces the "
        "learning rate of a tensor whose gradient is unusually large; clip_norm = 0 is then usual.",
    )
    learning_rate: float = Field(
        5e-4,
        gt=0,
        description="Peak learning rate. ELECTRA, table 6: 5e-4 small, 2e-4 base and large.",
        json_schema_extra={OTHER_NAME: "lr"},
    )
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay, not applied to biases and LayerNorm. ELECTRA: 0.01."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment. Muon's momentum is always 0.95.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-6, gt=0, description="Epsilon of AdamW, added outside the square root. ELECTRA: 1e-6.")
    bias_correction: bool = Field(True, description="Correct the bias of Adam's moments. The released code does not.")
    clip_norm: float = Field(
        1.0, ge=0, description="Gradients are clipped to this norm, over all networks together; 0: no clipping."
    )
    schedule: Literal["linear", "released", "constant", "wsd"] = Field(
        "linear",
        description="'linear': warm-up, then linear decay to zero at the end. 'released': decay from step 0 times warm-up, "
        "as the released code does. 'constant': warm-up, then constant. 'wsd' (warm-up, stable, decay): warm-up, then constant, "
        "then decay to zero as 1 - sqrt(progress) over the last decay_fraction of the run.",
    )
    decay_fraction: float = Field(
        0.2, gt=0, le=1, description="Fraction of the run over which 'wsd' decays. Haegele et al. 2024: 0.1 to 0.2."
    )
    decay_steps: RunPoint | None = Field(
        None, gt=0, description="Steps over which 'wsd' decays, instead of decay_fraction; not under train.max_hours."
    )
    warmup_steps: RunPoint = Field(
        0.01,  # type: ignore[assignment]
        ge=0,
        description="Steps over which the learning rate rises, or the fraction of the run below 1; under train.max_hours, a "
        "tenth of the time at most. ELECTRA: 10,000 of 1,000,000.",
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="Factor of the learning rate per layer, from the top layer down; 1: no decay."
    )
    layer_decay_gap: bool = Field(
        False, description="Count a layer between the heads and the top layer, although there is none, as in the released code."
    )

    def unread(self) -> dict[str, str]:
        return {} if self.schedule == "wsd" else dict.fromkeys(("decay_steps", "decay_fraction"), "schedule = 'wsd'")


class TrainConfig(Section):
    """The loop: length of the run, size of a step, and intervals of checkpoints, evaluations and records."""

    seed: int = Field(0, ge=0, description="Seed of all random numbers: weights, order, masks, samples, dropout.")
    max_steps: int = Field(1_000_000, ge=1, le=NO_STEP_LIMIT, description="Optimizer updates of the whole run.")
    max_hours: float | None = Field(
        None,
        gt=0,
        description="Time budget in hours, without start and compilation; the schedule ends with it. max_steps remains an upper "
        "limit.",
    )
    sequences_per_step: int = Field(
        128,
        ge=1,
        le=1 << 20,
        description="Sequences per update, over all ranks and micro-batches.",
        json_schema_extra={OTHER_NAME: "batch_size"},
    )
    batch_schedule: SizeSchedule = Field(
        (),
        description="Tokens per update, in segments that begin at a step or a fraction of the run: [[0, 16384], [0.5, 65536]]. "
        "Empty: sequences_per_step throughout; otherwise that is the size of the last segment. Padding counts as tokens.",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Sequences per rank and forward pass, at most (default: all sequences of the rank at once). With "
        "data.length_schedule, this is the number of rows of the last length; a forward pass has more of the shorter rows.",
    )
    # Under train.max_hours all three also become due by the clock, unless the user has set them: see training/metrics.py.
    checkpoint_every_steps: int = Field(1000, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=2, description="Number of newest checkpoints to keep.")
    weight_average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, such as 0.999; 0: none. It spans about "
        "1 / (1 - decay) updates, which should be a small part of the run. Evaluations, and all commands that read the run, use "
        "the average.",
    )
    evaluate_every_steps: int = Field(5000, ge=0, description="Steps between evaluations on held-out text; 0: only at the end.")
    evaluate_sequences: int = Field(2000, ge=0, description="Held-out rows of each data set in a periodic evaluation; 0: all.")
    log_every_steps: int = Field(50, ge=1, description="Steps between records in metrics.jsonl.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of the forward pass: bfloat16 is autocast, weights stay float32. "
        "auto: bfloat16 if it is faster; on a CPU both are timed when the run begins, and run.json keeps the choice.",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="How several processes share the work. Each computes with its part of the rows. 'ddp': each has the whole "
        "model. 'fsdp': weights, gradients and moments are divided among them (FSDP2). Without dropout, the results are those of "
        "one process, up to rounding.",
    )
    compile: bool | Literal["auto"] = Field(
        False,
        description="Compile the networks with torch.compile. auto: on a GPU, unless the run has fewer than 1,000 steps. If the "
        "compiler fails, the run continues without it.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, which saves memory and costs time."
    )
    price_per_hour: float | None = Field(
        None, ge=0, description="Price of an hour of these machines, in any currency; estimates and reports then state the cost."
    )
    tensorboard: bool = Field(False, description="Also write TensorBoard events (extra 'track').")
    tracker: TrackerName = Field(
        "none",
        description="Also send the records to an experiment tracker, whose package must be installed: 'wandb' or 'trackio'.",
    )

    def divides_weights(self, processes: int) -> bool:
        """Whether no single process has the whole model while it is trained."""
        return self.parallel == "fsdp" and processes > 1

    @model_validator(mode="after")
    def _batch_grows(self) -> TrainConfig:
        check_schedule("batch_schedule", self.batch_schedule)
        return self


def limit_micro_batch(work: Resolution) -> None:
    """Lower `train.micro_batch_size` to the sequences of a step."""
    micro, rows = work.value("train.micro_batch_size"), work.value("train.sequences_per_step")
    if micro is not None and micro > rows:
        work.set_value("train.micro_batch_size", rows, "at most train.sequences_per_step")


_LONGEST_WARMUP = 0.1  # of the time budget


def learning_rate(config: OptimizerConfig, step: int, length: int, time_used: float | None = None) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    'linear' rises during the warm-up, reaches its peak at the last warm-up step and falls to zero at the end. 'released'
    multiplies warm-up and decay, so that its peak is slightly lower and the very first update has rate 0. 'wsd' stays at its
    peak until the decay begins, `decay_length` steps before the end.

    Args:
        length: number of updates that the schedule spans.
        time_used: fraction of the time budget that is used; None without a time budget. The decay follows
            whichever has progressed further, the steps or the time, and ends when either of them ends. The warm-up ends after a
            tenth of the time at the latest: how many steps fit into the time was not known when its length was chosen.

    Reference: Clark et al. 2020, table 6; google-research/electra, optimization.py for 'released'; Haegele et al. 2024, "Scaling
    laws and compute-optimal training beyond fixed training durations", for 'wsd'.
    """
    done = min(1.0, max(step / length, time_used or 0.0))
    warmup_steps = to_step(config.warmup_steps, length)
    warmup, by_time = max(warmup_steps, 1), (time_used or 0.0) / _LONGEST_WARMUP
    if config.schedule == "released":
        rise = min(1.0, max(step / warmup, by_time))
        return float(config.learning_rate * rise * (1 - done))
    rise = min(1.0, max((step + 1) / warmup, by_time))
    if config.schedule == "constant":
        return config.learning_rate * rise
    if config.schedule == "wsd":
        decay = decay_length(config, length)
        # Counted in steps where the steps decide, so that the rate depends on the distance to the end only, not on the length:
        # a decay from a checkpoint then equals that of a run which was as long from the start, bit for bit.
        progress = (step - (length - decay)) / decay
        if time_used is not None:
            progress = max(progress, (time_used - 1) * length / decay + 1)
        return config.learning_rate * rise * (1 - math.sqrt(min(max(progress, 0.0), 1.0)))
    # The decay begins where the warm-up ends. Under a time budget that fraction of the run is unknown, so it begins at once.
    warm = min(warmup_steps / length, 1.0) if time_used is None else 0.0
    fall = min(1.0, (1 - done) / (1 - warm)) if warm < 1 else 1.0
    return float(config.learning_rate * rise * fall)


def decay_length(config: OptimizerConfig, length: int) -> int:
    """Number of steps over which 'wsd' decays, at the end of a run of `length` steps."""
    steps = config.decay_fraction * length if config.decay_steps is None else to_step(config.decay_steps, length)
    return min(max(round(steps), 1), length)


def overlap(config: OptimizerConfig, length: int) -> str | None:
    """What is wrong if warm-up and decay of 'wsd' do not fit into `length` steps; otherwise None."""
    warmup, decay = to_step(config.warmup_steps, length), decay_length(config, length)
    if config.schedule != "wsd" or length == 1 or warmup + decay <= length:
        return None
    return f"a warm-up of {warmup:,} steps and a decay of {decay:,} need more than the {length:,} steps of train.max_steps"


@dataclass(frozen=True)
class StepSizes:
    """The sizes of all steps of a run.

    Attributes:
        segments: in order, the first from step 0; the last one has no end.
    """

    segments: Sequence[ScheduleSegment]

    def at(self, step: int) -> ScheduleSegment:
        """The segment that a step belongs to."""
        return self.segments[bisect_right(self.segments, step, key=lambda segment: segment.first) - 1]

    def examples_before(self, step: int) -> int:
        """Rows read before a step."""
        segment = self.at(step)
        return segment.examples + (step - segment.first) * segment.rows

    def positions_before(self, step: int) -> int:
        """Positions read before a step."""
        segment = self.at(step)
        return segment.positions + (step - segment.first) * segment.rows * segment.length

    def changes_at(self, step: int) -> bool:
        """Whether the size of the step differs from that of the step before."""
        return step > 0 and self.at(step).first == step


def step_sizes(train: TrainConfig, data: DataConfig) -> StepSizes:
    """The sizes of all steps of a run. A step has as many whole rows as fit into its tokens.

    Raises:
        ValueError: a row does not fit into the tokens of an update.
    """
    batch: SizeSchedule = to_steps(train.batch_schedule, train.max_steps)
    lengths: SizeSchedule = to_steps(data.length_schedule, train.max_steps)
    mixture: MixtureSchedule = to_steps(data.mixture, train.max_steps) or ((0, ()),)
    batch = batch or ((0, train.sequences_per_step * data.sequence_length),)
    lengths = lengths or ((0, data.sequence_length),)
    sizes = StepSizes(())
    schedules: tuple[Any, ...] = batch, lengths, mixture
    for first in sorted({first for schedule in schedules for first, _ in schedule}):
        tokens, length, weights = (next(value for begin, value in reversed(one) if begin <= first) for one in schedules)
        rows = tokens // length
        if rows < 1:
            raise ValueError(
                f"from step {first:,} on, an update of {tokens:,} tokens cannot hold a row of {length:,}; set larger numbers of "
                "tokens in train.batch_schedule, or shorter rows in data.length_schedule"
            )
        last = sizes.segments[-1] if sizes.segments else None
        if last is None or (rows, length, weights) != (last.rows, last.length, last.weights):
            before = (sizes.examples_before(first), sizes.positions_before(first)) if first else (0, 0)
            sizes = StepSizes((*sizes.segments, ScheduleSegment(first, rows, length, *before, weights)))
    return sizes


_SEGMENTS_OF_TWO_PARTS = 3  # text and A, B, [CLS]


class PretrainConfig(Section):
    """All settings that determine what a pre-training run computes, apart from its data set."""

    data: DataConfig = Field(default_factory=DataConfig)
    model: SerializeAsAny[ModelConfig] = Field(default_factory=build_config)
    objective: SerializeAsAny[ObjectiveConfig]
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

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


def pretrain_schema() -> dict[str, Any]:
    """The JSON schema of configuration files for pre-training."""
    return json_schema(PretrainConfig, _VARIANTS)


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


RUN_POINTS = (
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
    for key in RUN_POINTS:
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
        if not may_end_early and hours is None and last > max(1, steps - key.endswith(_BEFORE_THE_END)):
            hint = f"give fractions of the run below 1, or --set train.max_steps={2 * last}"
            work.refuse(key, f"names step {last:,}, which is not within the {steps:,} steps of train.max_steps", hint)
    if hours is None and (problem := overlap(work.parts["optimizer"], steps)) and not work.problems:
        work.refuse("optimizer.warmup_steps", f"and decay do not fit: {problem}", "--set optimizer.warmup_steps=0.1, for example")


_VARIANTS = {
    "model": Variant("encoder", config_class, encoders.names, "encoder"),
    "objective": Variant("name", lambda name: objectives.load(name).Config, objectives.names, "objective"),
}
