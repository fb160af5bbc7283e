"""The configuration of a pre-training run: its sections put together and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, Field, SerializeAsAny, field_validator, model_validator

from discern.config.layers import Settings, collect, preset_names, read_file
from discern.config.resolve import Clamp, Fit, Resolved, resolve
from discern.config.schema import Section, Variant, diff, flatten, plain
from discern.config.stages import rescaled
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.models import encoders
from discern.models.config import ModelConfig, build_config, config_class
from discern.models.embeddings import PlacedEmbeddings
from discern.objectives import objectives
from discern.objectives.config import ObjectiveConfig
from discern.training.config import MICRO_BATCH_CLAMP, OptimizerConfig, TrainConfig
from discern.training.schedule import (
    BATCH_KEY,
    LENGTH_KEY,
    ROWS_KEY,
    SCHEDULE_KEYS,
    SEQUENCE_KEY,
    Stretch,
    fitted_batch,
    fitted_lengths,
    fitted_schedule,
    shortened_schedules,
    step_sizes,
)

if TYPE_CHECKING:
    from discern.models.base import Encoder

LENGTH_OF_RUN = ("train.max_steps", "train.max_hours")
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
        for length in sorted({stretch.length for stretch in sizes.stretches}):
            self.objective.check(data.at_length(length), self.model)
        if data.packing == "two-part" and data.reversed_rows and not _reads_backwards(self.model):
            raise ValueError(
                f"half of the rows of data.packing 'two-part' run backwards, which model.encoder '{self.model.encoder}' does "
                "not support; set data.reversed_rows=false"
            )
        if data.packing == "two-part" and _has_segment_table(self.model) and self.model.num_token_types < _SEGMENTS_OF_TWO_PARTS:
            raise ValueError(
                f"rows of data.packing 'two-part' have {_SEGMENTS_OF_TWO_PARTS} segments, but model.num_token_types is "
                f"{self.model.num_token_types}; set model.num_token_types={_SEGMENTS_OF_TWO_PARTS}"
            )
        if not self.objective.reads_in_order:
            return self
        for stretch in sizes.stretches:
            self._slots_suit(stretch)
        return self

    def _slots_suit(self, stretch: Stretch) -> None:
        """Check that the rows of a step can be slots that are read in order."""
        rows, micro = stretch.rows, self.train.micro_batch_size
        scheduled = bool(self.train.batch_schedule or self.data.length_schedule)
        said = f"{rows} rows of {stretch.length} in an update" if scheduled else f"train.sequences_per_step {rows}"
        if self.data.reversed_rows and rows % 2:
            fix = "schedules with even numbers of rows" if scheduled else f"train.sequences_per_step={rows + 1}"
            raise ValueError(
                f"{said} cannot be split into equally many forward and backward slots; set {fix}, or data.reversed_rows=false"
            )
        if micro is not None and rows % min(rows, micro * self.data.sequence_length // stretch.length):
            said = said if scheduled else "train.sequences_per_step"
            raise ValueError(
                f"the {rows} slots of {said} are not a multiple of train.micro_batch_size {micro}; set train.micro_batch_size "
                "to a number that divides them"
            )


def load_pretrain_config(
    file: Path | None, preset: str | None, overrides: Sequence[str] = (), *, shortens: bool = True
) -> Resolved[PretrainConfig]:
    """Resolve a configuration: preset, then file (or the `config.toml` of a run folder), then `--set`.

    Args:
        file: a TOML file, or the folder of a run.
        preset: name of a preset to start from.
        overrides: values of `--set`: "train.max_steps=1000".
        shortens: as for `resolve_pretrain_config`.

    Raises:
        ConfigError: there is no configuration to start from, or it is invalid; the message lists all problems.
    """
    return resolve_pretrain_config(collect(preset, file, overrides), shortens=shortens)


def read_written_config(path: Path) -> PretrainConfig:
    """Read a configuration that discern wrote into the folder of a run or an export.

    Raises:
        ConfigError: it is missing or damaged; the message names the file.
    """
    settings = read_file(path, written=True)
    try:
        return resolve_pretrain_config(settings, shortens=False).config
    except ConfigError as problem:
        hint = "copy the file again from where the folder came from"
        raise ConfigError(f"{path} is damaged: {problem.message}", hint=hint) from problem


def resolve_pretrain_config(settings: Settings, *, shortens: bool = True) -> Resolved[PretrainConfig]:
    """Resolve settings that are already collected.

    Args:
        shortens: whether schedules have to end within the run. A run that is resumed, or continues another one, keeps its own.

    Raises:
        ConfigError: they are invalid; the message lists all problems.
    """
    written = {key for key, setting in settings.items() if setting.origin.written}
    if any(key in settings and key not in written for key in LENGTH_OF_RUN):
        # Only together with its own length is a configuration that discern wrote kept as it is: earlier versions fitted less.
        written = set()
    to_length = [fit for fit in _FITS_TO_LENGTH if written.isdisjoint(fit.keys)] if shortens else []
    return resolve(PretrainConfig, settings, _VARIANTS, _CLAMPS, (*_FITS, *to_length))


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
    except ConfigError:  # reported with all other problems
        return False
    return not kind.limits_positions


_CLAMPS = (
    Clamp("data.sequence_length", limit="model.max_positions", unless=_has_no_position_table),
    MICRO_BATCH_CLAMP,
)


def _fit_schedule(sections: Mapping[str, Any], user_set: frozenset[str]) -> Mapping[str, object]:
    return fitted_schedule(sections["optimizer"], sections["train"], user_set)


def _fit_lengths(sections: Mapping[str, Any], user_set: frozenset[str]) -> Mapping[str, object]:
    return fitted_lengths(sections, user_set, limited=not _has_no_position_table(sections["model"]))


@dataclass(frozen=True)
class _InSteps:
    """A setting that names a step, which has to lie within the run.

    Attributes:
        key: dotted key: "objective.freeze_generator_at".
        share: fraction of the run at which the step lies at the latest in a schedule that is shortened.
        missed: what never happens if it lies beyond the run.
        may_end: whether it may be the end of the run; otherwise steps have to follow.
    """

    key: str
    share: float
    missed: str
    may_end: bool = False

    def fit(self, sections: Mapping[str, Any], user_set: frozenset[str]) -> Mapping[str, object]:
        """The value that suits the run, by key, if a preset's does not.

        Raises:
            ConfigError: the user's does not.
        """
        section, _, name = self.key.partition(".")
        value, train = getattr(sections[section], name, None) or 0, sections["train"]
        most, last = train.max_steps, _last_step(value)
        # A warm-up of one step is none: the rate is at its peak from the first step on.
        if train.max_hours is not None or last <= 1 or last < most or (self.may_end and last == most):
            return {}
        suitable = _ending_at(value, max(1, int(most * self.share)))
        if self.key not in user_set:
            return {self.key: suitable}
        relation = "more than" if self.may_end else "not less than"
        option = f"{self.key}={suitable}" if isinstance(suitable, int) else f"'{self.key}={plain(suitable)}'"
        raise ConfigError(
            f"{last:,} is {relation} the {most:,} steps of train.max_steps, so {self.missed}",
            hint=f"--set {option}, or --set train.max_steps={round(last / self.share)}",
        )


def _last_step(value: int | Sequence[tuple[int, float]]) -> int:
    """The last step that a setting names; 0 if it names none, as a weight that is constant."""
    if isinstance(value, Sequence):
        return value[-1][0] if len(value) > 1 else 0
    return value


def _ending_at(value: int | Sequence[tuple[int, float]], step: int) -> int | tuple[tuple[int, float], ...]:
    """The setting with its last step moved to `step`, and those before in proportion."""
    return step if isinstance(value, int) else rescaled(value, step / value[-1][0])


def _fit_warmup(sections: Mapping[str, Any], user_set: frozenset[str]) -> Mapping[str, object]:
    # 'wsd' has to have room for its decay as well: see `fitted_schedule`.
    return {} if sections["optimizer"].schedule == "wsd" else _WARMUP.fit(sections, user_set)


_WARMUP = _InSteps("optimizer.warmup_steps", 0.1, "the learning rate only rises")
_OF_OBJECTIVES = (
    _InSteps("objective.mask_probability_steps", 1, "the final value is never reached", may_end=True),
    _InSteps("objective.temperature_steps", 1, "the final value is never reached", may_end=True),
    _InSteps("objective.generator_weight_schedule", 1, "the last factor is never reached", may_end=True),
    _InSteps("objective.discriminator_weight_schedule", 1, "the last factor is never reached", may_end=True),
    _InSteps("objective.freeze_generator_at", 0.5, "the generator is never frozen"),
    _InSteps("objective.freeze_discriminator_at", 0.5, "the discriminator is never frozen"),
    _InSteps("objective.generator_warmup_steps", 0.1, "no step is left for the discriminator"),
)

_FITS = (
    Fit(SCHEDULE_KEYS, "train.max_steps", _fit_schedule, ("optimizer", "train")),
    Fit((LENGTH_KEY, SEQUENCE_KEY), None, _fit_lengths, ("data", "model")),
    Fit((BATCH_KEY, ROWS_KEY), None, fitted_batch, ("data", "train")),
)
_FITS_TO_LENGTH = (
    Fit((BATCH_KEY, LENGTH_KEY), "train.max_steps", shortened_schedules, ("data", "train")),
    Fit((_WARMUP.key,), "train.max_steps", _fit_warmup, ("optimizer", "train")),
    *(Fit((each.key,), "train.max_steps", each.fit, ("objective", "train")) for each in _OF_OBJECTIVES),
)
_FITTED_KEYS = (*SCHEDULE_KEYS, *(key for fit in _FITS_TO_LENGTH for key in fit.keys if key != _WARMUP.key))


def kept_when_resumed(before: PretrainConfig, now: Resolved[PretrainConfig]) -> dict[str, Any]:
    """What a run that is resumed keeps of the settings that were fitted to its length, such as the warm-up, by dotted key.

    Args:
        before: settings that the run was trained with.
        now: settings that it is resumed with, possibly for another length.
    """
    old, new = flatten(before), flatten(now.config)
    resized = any(old[key] != new[key] for key in LENGTH_OF_RUN)
    # A run of a version that did not fit them has them as they were.
    keys = [key for key in _FITTED_KEYS if key not in now.user_set and (resized or ", fitted from " in now.origins.get(key, ""))]
    known = [key for key in keys if key in old and key in new]
    # Where one is kept, all are: a decay could otherwise be fitted to the warm-up that is kept.
    return {key: old[key] for key in known} if any(old[key] != new[key] for key in known) else {}


def _objective_config(name: str) -> type[BaseModel]:
    """The configuration class of an objective; imports it, and with it torch."""
    objective: Any = objectives.load(name)
    return cast(type[BaseModel], objective.Config)


_VARIANTS = {
    "model": Variant("encoder", config_class, encoders.names, "encoder"),
    "objective": Variant("name", _objective_config, objectives.names, "objective"),
}


def _reads_backwards(model: ModelConfig) -> bool:
    return encoders.load(model.encoder).reads_backwards  # type: ignore[attr-defined, no-any-return]


def _has_segment_table(model: ModelConfig) -> bool:
    return issubclass(encoders.load(model.encoder).embeddings_class, PlacedEmbeddings)  # type: ignore[attr-defined]
