"""The configuration of a fine-tuning: the recipe for the model's size, the defaults of encoder and tasks, a file, `--set`.

Unless a length is given, `length.py` fits it to the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, create_model

from discern.config.layers import Origin, Setting, Settings, parse_overrides, read_file
from discern.config.resolve import Resolved, resolve
from discern.config.schema import Section
from discern.errors import ConfigError
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.tasks.base import Definition, TaskConfig
from discern.tasks.classification import ClassificationConfig
from discern.tasks.frames import FrameName
from discern.tasks.questions import QuestionConfig
from discern.training.config import OptimizerConfig, TrainConfig, limit_micro_batch

Recipe = Literal["auto", "paper", "google"]
# Clark et al. 2020, table 7, by maximum hidden size; the released code differs for the small model only.
_RATES: dict[str, tuple[tuple[int, float], ...]] = {
    "auto": ((256, 3e-4), (768, 1e-4), (1_000_000, 5e-5)),
    "paper": ((256, 3e-4), (768, 1e-4), (1_000_000, 5e-5)),
    "google": ((256, 1e-4), (768, 1e-4), (1_000_000, 5e-5)),
}
_LAYER_DECAYS = ((768, 0.8), (1_000_000, 0.9))
# At the paper's rates, networks smaller than the paper's learn too slowly (benchmarks/records, "recipe", section 15), or end up
# predicting the majority class ("tasks").
_SMALLER = {"optimizer.learning_rate": 1e-3, "optimizer.layer_decay": 1.0, "finetune.dropout": 0.0}
_SWAPPED = ("mrpc", "stsb")
# Minimum number of updates: three epochs under-train networks smaller than the paper's (benchmarks/records,
# "finetune-defaults"), and all networks on small data (Zhang et al. 2021, "Revisiting Few-sample BERT Fine-tuning"; Mosbach et
# al. 2021).
_MIN_STEPS = 300
_MIN_STEPS_SMALLER = 1000
_RETRIES = 2
# With that many steps even a small network overfits without dropout.
_DROPOUT = 0.1
_LENGTHS = frozenset({"finetune.epochs", "train.max_steps"})


class FilesConfig(Section):
    """The user's own labeled files and their columns. Columns that are not named are detected."""

    task: Literal["pairs"] | None = Field(
        None,
        description="'pairs': train text embeddings on pairs or on single texts (default: the columns decide what is trained).",
    )
    train: Path | None = Field(None, description="File to train on.")
    dev: Path | None = Field(None, description="File to evaluate on (default: a held-out part of the training file).")
    test: Path | None = Field(
        None, description="File to predict after training. It is never used for evaluation, even if it has labels."
    )
    format: str | None = Field(
        None, description="csv, tsv, jsonl, json, parquet, text or conll (default: recognized by name and content)."
    )
    text: str | None = Field(None, description="Column of the text.")
    pair: str | None = Field(None, description="Column of a second text.")
    label: str | None = Field(None, description="Column of the label: a class, a number, or a list of classes.")
    label_kind: Literal["label", "labels", "number"] | None = Field(
        None, description="Kind of label: one class, several classes, or a number (default: recognized by the values)."
    )
    label_separator: str | None = Field(None, min_length=1, description="Separator of several classes in one cell.")
    words: str | None = Field(
        None,
        coerce_numbers_to_str=True,
        description="Column of the words to tag; in a file with one word per line, its index, counted from 0.",
    )
    tags: str | None = Field(
        None, coerce_numbers_to_str=True, description="Column of the tags, or its index; -1 is the last column."
    )
    question: str | None = Field(None, description="Column of the question.")
    context: str | None = Field(None, description="Column of the text that contains the answer.")
    answer: str | None = Field(None, description="Column of the answer.")
    start: str | None = Field(None, description="Column of the position of the answer's first character.")


class FinetuneSection(Section):
    """Settings of fine-tuning, apart from optimizer and loop."""

    recipe: Recipe = Field(
        "auto",
        description="'auto': learning rates of 'paper'. Unless a length is given, it is fitted to the data: training runs for at "
        "least finetune.min_steps, keeps the weights that score best on held-out examples, and retries failed seeds. 'paper': "
        "table 7 of the ELECTRA paper. 'google': optimizer, schedule, loss and swapped pairs of the released code; "
        "docs/howto/finetune.md lists the differences.",
    )
    epochs: float = Field(3.0, gt=0, description="Passes over the training rows; train.max_steps overrides it.")
    min_steps: int = Field(
        0,
        ge=0,
        description="Minimum number of updates, up to 50 passes over the training rows. Ignored if finetune.epochs or "
        "train.max_steps is given.",
    )
    retries: int = Field(
        0,
        ge=0,
        description="Maximum number of retries, with other random numbers, of a seed that diverges or predicts the same for "
        "every example.",
    )
    rate_search: bool = Field(
        False,
        description="First train briefly with the learning rate, with a third of it and with three times it, then train fully "
        "with the rate that scores best on held-out examples.",
    )
    warmup_fraction: float = Field(
        0.1, ge=0, le=1, description="Fraction of the steps used for warm-up; optimizer.warmup_steps overrides it."
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of hidden states, of attention, and before the heads.")
    layers: int | None = Field(
        None,
        ge=1,
        description="Number of layers of the encoder that are kept, counted from the embeddings (default: all). For text "
        "embeddings, the last layers of a small encoder may reduce quality (docs/howto/embeddings.md).",
    )
    reduction: Literal["mean", "sum"] = Field(
        "mean",
        description="Reduction of the loss over a batch. 'mean': mean over the items of each task, weighted by its share of the "
        "batch's rows. 'sum': as in the released code; gradients are then clipped at nearly every step.",
    )
    frame: FrameName = Field(
        "cls-first",
        description="Order of the parts of the encoder's input. 'cls-first': [CLS] A [SEP] B [SEP], padded on the right. "
        "'cls-last': A [SEP] B [SEP] [CLS], padded on the left, the default for encoders trained so.",
    )
    task_alpha: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Exponent of the task size in the sampling of several tasks. 1: proportional to size; 0: uniform.",
    )
    heldout_fraction: float = Field(
        0.1, gt=0, lt=1, description="Fraction of the training file held out if there is no dev file."
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="Weights that are kept: the last ones, or those of the best evaluation (train.evaluate_every_steps).",
    )
    patience: int = Field(0, ge=0, description="Stop after this many evaluations without a better score; 0: never.")
    train_rows: int | None = Field(None, ge=1, description="Number of training examples, sampled at random (default: all).")


class FinetuneConfig(Section):
    """The sections of every fine-tuning configuration; `load_finetune_config` adds those of the tasks."""

    finetune: FinetuneSection = Field(default_factory=FinetuneSection)
    files: FilesConfig = Field(default_factory=FilesConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    def task_config(self, name: str) -> TaskConfig:
        """The settings of a task."""
        several = getattr(self, "tasks", None)
        config: TaskConfig = getattr(several, name) if several is not None else getattr(self, "task")  # noqa: B009
        return config

    def with_task_values(self, name: str, values: Mapping[str, Any]) -> FinetuneConfig:
        """The configuration with other values of settings of a task."""
        changed = self.task_config(name).model_copy(update=dict(values))
        several = getattr(self, "tasks", None)
        return self.model_copy(
            update={"task": changed} if several is None else {"tasks": several.model_copy(update={name: changed})}
        )

    def task_prefix(self, name: str) -> str:
        """What the dotted keys of a task's settings begin with."""
        return "task." if getattr(self, "tasks", None) is None else f"tasks.{name}."


def given_settings(file: Path | None, overrides: Sequence[str]) -> Settings:
    """The settings of a TOML file, overridden by "section.key=value" strings.

    Raises:
        ConfigError: the file or an override cannot be parsed.
    """
    return (read_file(file) if file is not None else {}) | parse_overrides(overrides)


def load_finetune_config(
    definitions: Sequence[Definition[Any]],
    model: ModelConfig,
    given: Settings,
    *,
    recipe: Recipe = "auto",
    encoder: type[Encoder] = Encoder,
) -> Resolved[FinetuneConfig]:
    """Resolve the configuration: the recipe, then the defaults of encoder and tasks, then the given settings.

    The settings of one task are in `[task]`; those of several tasks in `[tasks.NAME]`.

    Args:
        model: configuration of the encoder that is fine-tuned; its size decides the rates.
        given: settings of the user, see `given_settings`.
        recipe: 'auto' uses the rates of 'paper', fits the length to the data, and extracts answers with a head that
            transformers has too.
        encoder: class of that encoder.

    Raises:
        ConfigError: at least one setting is wrong; the message names all problems.
    """
    chosen = _chosen_recipe(given, recipe)
    published = {} if chosen == "auto" else _published_heads(definitions, chosen)
    fitted = is_fitted(chosen, given.keys())
    recipe_layer = _recipe_layer(definitions, model, chosen, fitted=fitted)
    # A recipe that was asked for determines the head of answers, whatever the encoder.
    settings = recipe_layer | _encoder_layer(definitions, encoder) | published | given
    if len(definitions) > 1:
        _refuse_single_section(settings, definitions)
    resolved = resolve(_model(definitions), settings, adjust=limit_micro_batch)
    if not fitted:
        _refuse_unseen_best(resolved.config)
    _refuse_part_of_a_split(resolved.config)
    _refuse_growing_batch(resolved.config)
    _refuse_parts_of_a_batch(resolved.config, definitions)
    return resolved


def is_fitted(recipe: Recipe, given: Set[str]) -> bool:
    """Whether the length of training is fitted to the data: true unless a recipe or a length is given.

    Args:
        given: dotted keys of the settings that the user gave.
    """
    return recipe == "auto" and not _LENGTHS & given


def _chosen_recipe(given: Settings, asked: Recipe) -> Recipe:
    """The recipe that the settings name, or else the requested one."""
    setting = given.get("finetune.recipe")
    named = next((recipe for recipe in get_args(Recipe) if setting is not None and setting.value == recipe), None)
    if setting is None or named is None:  # `resolve` reports any other value
        return asked
    if asked not in ("auto", named):
        raise ConfigError(
            f"--recipe {asked}, but finetune.recipe is {named} ({setting.origin.where})", hint="leave out one of the two"
        )
    recipe: Recipe = named
    return recipe


def _refuse_part_of_a_split(config: FinetuneConfig) -> None:
    """Raise a ConfigError for partial evaluation: F1 and correlations on a part of the split are different metrics."""
    rows = config.train.evaluate_sequences
    if rows:
        raise ConfigError(
            f"train.evaluate_sequences is {rows}, but fine-tuning evaluates on the whole dev file",
            hint="leave it out; a larger train.evaluate_every_steps, or a shorter dev file, saves time",
        )


def _refuse_growing_batch(config: FinetuneConfig) -> None:
    """Raise a ConfigError for a batch schedule, which counts the positions of rows that all have one length."""
    if config.train.batch_schedule:
        raise ConfigError(
            "train.batch_schedule is for pre-training; in fine-tuning, all updates have the same number of rows",
            hint="leave it out, and set train.sequences_per_step",
        )


def _refuse_parts_of_a_batch(config: FinetuneConfig, definitions: Sequence[Definition[Any]]) -> None:
    """Raise a ConfigError for micro-batches of a task whose loss compares the rows of a whole step."""
    whole = next((each.name for each in definitions if each.family.objective is not None), None)
    if whole is not None and config.train.micro_batch_size not in (None, config.train.sequences_per_step):
        raise ConfigError(
            f"train.micro_batch_size is {config.train.micro_batch_size}, but '{whole}' compares all rows of a step",
            hint="to save memory: --set task.texts_per_pass=32, which gives the same gradient",
        )


def _refuse_unseen_best(config: FinetuneConfig) -> None:
    """Raise a ConfigError if settings depend on evaluations that never happen."""
    finetuning = config.finetune
    asked = "finetune.keep=best" if finetuning.keep == "best" else "finetune.patience" if finetuning.patience else None
    if asked is not None and config.train.evaluate_every_steps == 0:
        raise ConfigError(
            f"{asked} needs evaluations during training, but train.evaluate_every_steps is 0",
            hint="--set train.evaluate_every_steps=100",
        )


def _model(definitions: Sequence[Definition[Any]]) -> type[FinetuneConfig]:
    configs: dict[str, Any] = {each.name: (each.family.Config, Field(default_factory=each.family.Config)) for each in definitions}
    if len(definitions) == 1:
        return create_model("FinetuneConfig", __base__=FinetuneConfig, task=configs[definitions[0].name])
    tasks = create_model("TasksSection", __base__=Section, **configs)
    return create_model("FinetuneConfig", __base__=FinetuneConfig, tasks=(tasks, Field(default_factory=tasks)))


def _recipe_layer(definitions: Sequence[Definition[Any]], model: ModelConfig, recipe: Recipe, *, fitted: bool) -> Settings:
    """The settings of the recipe for a network of this size, and the defaults of the tasks."""
    width = model.hidden_size
    size = "small" if width <= 256 else "base" if width <= 768 else "large"
    values: dict[str, object] = {
        "finetune.recipe": recipe,
        "optimizer.learning_rate": next(rate for widest, rate in _RATES[recipe] if width <= widest),
        "optimizer.layer_decay": next(decay for widest, decay in _LAYER_DECAYS if width <= widest),
        "optimizer.weight_decay": 0.0,
        "train.sequences_per_step": 32,
        "train.evaluate_every_steps": 0,
        "train.evaluate_sequences": 0,
    }
    if recipe != "google" and model.smaller_than_electra_small:
        size = "smaller than ELECTRA-Small"
        values |= _SMALLER
    if fitted:
        values["finetune.dropout"] = _DROPOUT
        values["finetune.min_steps"] = _MIN_STEPS_SMALLER if model.smaller_than_electra_small else _MIN_STEPS
        values["finetune.retries"] = _RETRIES
    if recipe == "google":
        values |= {
            "optimizer.weight_decay": 0.01,
            "optimizer.bias_correction": False,
            "optimizer.schedule": "released",
            "optimizer.layer_decay_gap": True,
            "finetune.reduction": "sum",
        }
    origin = Origin("preset", f"recipe {recipe}, {size}")
    layer = {key: Setting(value, origin) for key, value in values.items()}
    for each in definitions:
        own = dict(each.defaults)
        if recipe == "google" and each.name in _SWAPPED:
            own["task.swap_pairs"] = True
        if recipe != "auto" and issubclass(each.family.Config, ClassificationConfig):
            own["task.pooling"] = "cls"
        # A task's defaults for training apply only to a single task: several tasks share one training.
        chosen = own if len(definitions) == 1 else {k: v for k, v in own.items() if k.startswith("task.")}
        for key, value in chosen.items():
            name = key if len(definitions) == 1 else key.replace("task.", f"tasks.{each.name}.", 1)
            layer[name] = Setting(value, Origin("preset", f"task {each.name}"))
    return layer


def _published_heads(definitions: Sequence[Definition[Any]], recipe: Recipe) -> Settings:
    """The joint head for question answering, which the paper and the released code use."""
    keys = (
        "task.head" if len(definitions) == 1 else f"tasks.{each.name}.head" for each in definitions if _answers_questions(each)
    )
    return {key: Setting("joint", Origin("preset", f"recipe {recipe}")) for key in keys}


def _answers_questions(definition: Definition[Any]) -> bool:
    return issubclass(definition.family.Config, QuestionConfig)


def _encoder_layer(definitions: Sequence[Definition[Any]], encoder: type[Encoder]) -> Settings:
    """The defaults of the encoder's class."""
    layer: dict[str, Setting] = {}
    for key, value in encoder.fine_tuning.items():
        setting = Setting(value, Origin("preset", f"encoder {encoder.__name__}"))
        section, name = key.split(".", 1)
        if section == "finetune":
            layer[key] = setting
        for each in definitions:
            if section == each.family.family or (section == "questions" and _answers_questions(each)):
                layer[f"task.{name}" if len(definitions) == 1 else f"tasks.{each.name}.{name}"] = setting
    return layer


def _refuse_single_section(settings: Mapping[str, Setting], definitions: Sequence[Definition[Any]]) -> None:
    for key in settings:
        if key.startswith("task."):
            names = " or ".join(f"tasks.{each.name}.{key.partition('.')[2]}" for each in definitions)
            raise ConfigError(
                f"{key} is given, but there are {len(definitions)} tasks", hint=f"specify the task: --set {names}=..."
            )
