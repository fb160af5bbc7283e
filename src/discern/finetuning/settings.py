"""The configuration of a fine-tuning: the recipe for the model's size, the defaults of encoder and tasks, a file, `--set`.

Unless a length is given, it is fitted to the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import Field, create_model

from discern.config.resolve import Origin, Resolved, Setting, Settings, parse_overrides, read_file, resolve
from discern.config.schema import Section, keys_of, nest, toml_value
from discern.errors import ConfigError, did_you_mean
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.tasks.base import Definition, TaskConfig
from discern.tasks.classification import ClassificationConfig
from discern.tasks.questions import QuestionConfig
from discern.tasks.supervised import FrameName
from discern.training.config import OptimizerConfig, TrainConfig, limit_micro_batch, overlap

Recipe = Literal["auto", "paper", "google"]
# Clark et al. 2020, table 7; the released code differs for the small model only.
_RATES = {"small": 3e-4, "base": 1e-4, "large": 5e-5}
_GOOGLE_RATES = _RATES | {"small": 1e-4}
# At the paper's rates, networks smaller than the paper's learn too slowly (benchmarks/records, "recipe", section 15), or end up
# predicting the majority class ("tasks").
_SMALLER = {"optimizer.learning_rate": 1e-3, "optimizer.layer_decay": 1.0, "finetune.dropout": 0.0}
_SWAPPED = ("mrpc", "stsb")
# Measured in benchmarks/records, "hour", section 6.
_SMALLER_BY_FAMILY: dict[str, dict[str, object]] = {
    "classification": {"optimizer.name": "muon", "train.weight_average": 0.998},
    "tagging": {"finetune.min_steps": 1700, "train.weight_average": 0.99},
}
# Ten epochs in the paper, which small networks overfit (benchmarks/records, "small-data").
_TEN_EPOCHS = ("rte", "stsb")
# Minimum number of updates: three epochs under-train networks smaller than the paper's (benchmarks/records,
# "finetune-defaults"), and all networks on small data (Zhang et al. 2021, "Revisiting Few-sample BERT Fine-tuning"; Mosbach et
# al. 2021).
_MIN_STEPS = 300
_MIN_STEPS_SMALLER = 1000
_RETRIES = 2
# With that many steps even a small network overfits without dropout.
_DROPOUT = 0.1
_LENGTHS = frozenset({"finetune.epochs", "train.max_steps"})
_FEW_SHOT_ROWS = 100
_WARMUP = 0.1
# Small data sets are repeated at most this many times, whatever the minimum number of steps (benchmarks/records,
# "small-data").
_MAX_EPOCHS, _MAX_EPOCHS_PAIRS = 20, 4


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
        "least finetune.min_steps, and failed seeds are retried. 'paper': table 7 of the ELECTRA paper. 'google': optimizer, "
        "schedule, loss and swapped pairs of the released code; docs/howto/finetune.md lists the differences.",
    )
    epochs: float = Field(3.0, gt=0, description="Passes over the training rows; train.max_steps overrides it.")
    min_steps: int = Field(
        0,
        ge=0,
        description="Minimum number of updates, up to 20 passes over the training rows, or 4 for pairs of texts with one label. "
        "Ignored if finetune.epochs or train.max_steps is given.",
    )
    few_shot: bool = Field(
        False,
        description="Do not train the encoder: fit a linear layer on its states, and n-grams of tokens, by logistic regression. "
        "One class per example only. Unless a length is given, the default for fewer than 100 training examples.",
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
        "with the rate that scores best on the evaluated examples.",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of hidden states, of attention, and before the heads.")
    layers: int | None = Field(
        None,
        ge=1,
        description="Number of layers of the encoder that are kept, counted from the embeddings (default: all). For text "
        "embeddings, the last layers of a small encoder may reduce quality (docs/howto/embeddings.md).",
    )
    purpose: Literal["cross-encoder"] | None = Field(
        None,
        description="What the model is for. 'cross-encoder': other software that scores pairs of texts; task.pooling and "
        "task.words then default to what transformers has.",
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
    teacher: str | None = Field(
        None,
        description="Fine-tuned model (folder or name on the Hub) whose outputs are learned besides the labels: one of discern, "
        "or any sequence classifier that transformers loads. For classes and numbers.",
    )
    unlabeled: Path | None = Field(
        None,
        description="More texts for the teacher to label: a table with the columns of the training file, or one text per line.",
    )
    teacher_weight: float = Field(
        0.5, ge=0, le=1, description="Share of the teacher's outputs in the loss; the labels have the rest."
    )
    teacher_temperature: float = Field(
        2.0, gt=0, description="Divisor of the logits of teacher and student, for classes. Hinton et al. 2015."
    )
    teacher_states_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of an additional loss: 1 minus the cosine between the mean state of a row, after a linear layer, and "
        "that of the teacher; 0: none.",
    )


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

    def task_prefix(self, name: str) -> str:
        """What the dotted keys of a task's settings begin with."""
        return "task." if getattr(self, "tasks", None) is None else f"tasks.{name}."

    def with_values(self, values: Mapping[str, Any]) -> FinetuneConfig:
        """The configuration with other values, by dotted key."""

        def updated(section: Any, tree: Mapping[str, Any]) -> Any:
            update = {
                name: updated(getattr(section, name), value) if isinstance(value, dict) else value for name, value in tree.items()
            }
            return section.model_copy(update=update)

        return cast(FinetuneConfig, updated(self, nest(values)))


def sweep_combinations(sweep: Sequence[str]) -> dict[str, list[str]]:
    """The combinations of a sweep: overrides by a name; without a sweep a single one without a name.

    Args:
        sweep: values per setting, as "learning_rate=1e-4,3e-4"; the section of a key that no task has may be left out.

    Raises:
        ConfigError: a setting has no values, or is unknown.
    """
    known = keys_of(FinetuneConfig)[1]
    axes: list[list[tuple[str, str]]] = []
    for axis in sweep:
        key, _, listed = (part.strip() for part in axis.partition("="))
        values = [value.strip() for value in listed.split(",") if value.strip()]
        if not key or not values:
            raise ConfigError(f"--sweep {axis}: expected key=value,value", hint="for example --sweep learning_rate=1e-4,3e-4")
        if "." not in key:
            matches = [name for name in known if name.rpartition(".")[2] == key]
            if len(matches) != 1:
                which = f"could be {' or '.join(matches)}" if matches else "is not a setting"
                near = did_you_mean(key, [name.rpartition(".")[2] for name in known])
                raise ConfigError(f"--sweep {key} {which}", hint=f"give it with its section, as task.{key}=...; {near}")
            key = matches[0]
        axes.append([(key, value) for value in values])
    return {
        ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen): [f"{key}={value}" for key, value in chosen]
        for chosen in itertools.product(*axes)
    }


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
    # The recipe that the settings name, or else the requested one. `resolve` reports an unknown name.
    setting = given.get("finetune.recipe")
    if setting is not None and setting.value in get_args(Recipe):
        if recipe not in ("auto", setting.value):
            raise ConfigError(
                f"--recipe {recipe}, but finetune.recipe is {setting.value} ({setting.origin.where})",
                hint="leave out one of the two",
            )
        recipe = cast(Recipe, setting.value)
    several = len(definitions) > 1
    for key in given:
        if several and key.startswith("task."):
            names = " or ".join(f"tasks.{definition.name}.{key.partition('.')[2]}" for definition in definitions)
            raise ConfigError(
                f"{key} is given, but there are {len(definitions)} tasks", hint=f"specify the task: --set {names}=..."
            )
    configs: dict[str, Any] = {each.name: (each.family.Config, Field(default_factory=each.family.Config)) for each in definitions}
    if several:
        tasks = create_model("TasksSection", __base__=Section, **configs)
        sections: dict[str, Any] = {"tasks": (tasks, Field(default_factory=tasks))}
    else:
        sections = {"task": configs[definitions[0].name]}
    kind = create_model("FinetuneConfig", __base__=FinetuneConfig, **sections)
    # Unless a recipe or a length is given, the length is fitted to the data.
    fitted = recipe == "auto" and not _LENGTHS & given.keys()
    defaults = _defaults(definitions, model, recipe, encoder, fitted=fitted, elsewhere="finetune.purpose" in given)
    resolved: Resolved[FinetuneConfig] = resolve(kind, defaults | given, adjust=limit_micro_batch)
    _check(resolved.config, definitions)
    return resolved


def _defaults(
    definitions: Sequence[Definition[Any]],
    model: ModelConfig,
    recipe: Recipe,
    encoder: type[Encoder],
    *,
    fitted: bool,
    elsewhere: bool,
) -> Settings:
    """The settings of the recipe for a network of this size, then the defaults of the tasks, then those of the encoder."""
    width = model.hidden_size
    size = "small" if width <= 256 else "base" if width <= 768 else "large"
    values: dict[str, object] = {
        "finetune.recipe": recipe,
        "optimizer.learning_rate": (_GOOGLE_RATES if recipe == "google" else _RATES)[size],
        "optimizer.layer_decay": 0.9 if size == "large" else 0.8,
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
    layer: Settings = {}

    def suggest(origin: str, values: Mapping[str, object]) -> None:
        layer.update({key: Setting(value, Origin("preset", origin)) for key, value in values.items()})

    suggest(f"recipe {recipe}, {size}", values)
    alone = len(definitions) == 1
    for definition in definitions:
        name, kind = definition.name, definition.family.Config
        prefix = "task." if alone else f"tasks.{name}."
        defaults = {
            key.replace("task.", prefix): value
            for key, value in definition.defaults.items()
            if alone or key.startswith("task.")  # several tasks share one training
        }
        suggest(f"task {name}", defaults)
        if alone and name in _TEN_EPOCHS and not (fitted and model.smaller_than_electra_small):
            suggest(f"task {name}", {"finetune.epochs": 10.0})
        if recipe == "google" and name in _SWAPPED:
            suggest(f"recipe {recipe}", {f"{prefix}swap_pairs": True})
        if issubclass(kind, ClassificationConfig):
            if recipe != "auto":
                suggest(f"recipe {recipe}", {f"{prefix}pooling": "cls"})
            elif fitted and model.smaller_than_electra_small:
                suggest(f"recipe {recipe}, {size}", {f"{prefix}pooling": "pair", f"{prefix}words": True})
            if elsewhere:
                suggest("finetune.purpose", {f"{prefix}pooling": encoder.architecture.poolings[0], f"{prefix}words": False})
        if alone and fitted and model.smaller_than_electra_small:
            suggest(f"recipe {recipe}, {size}", _SMALLER_BY_FAMILY.get(definition.family.family, {}))
        answers = issubclass(kind, QuestionConfig)
        for key, value in encoder.fine_tuning.items():
            section, _, setting = key.partition(".")
            if section == "finetune":
                suggest(f"encoder {encoder.__name__}", {key: value})
            elif section == definition.family.family or (section == "questions" and answers):
                suggest(f"encoder {encoder.__name__}", {f"{prefix}{setting}": value})
        # A recipe that was asked for determines the head of answers, whatever the encoder.
        if recipe != "auto" and answers:
            suggest(f"recipe {recipe}", {f"{prefix}head": "joint"})
    return layer


def _check(config: FinetuneConfig, definitions: Sequence[Definition[Any]]) -> None:
    """Raise a ConfigError for settings of the loop that fine-tuning does not support."""
    train, finetune = config.train, config.finetune
    if finetune.teacher is None and finetune.unlabeled is not None:
        raise ConfigError("finetune.unlabeled has texts for a teacher to label, but there is none", hint="add --teacher MODEL")
    if finetune.teacher is not None and len(definitions) > 1:
        raise ConfigError(f"a teacher teaches one task, but there are {len(definitions)}", hint="fine-tune on each alone")
    if finetune.purpose and any(
        "pair" not in each.layout.columns or not issubclass(each.family.Config, ClassificationConfig) for each in definitions
    ):
        raise ConfigError("a cross-encoder reads two texts", hint="name the second: --pair COLUMN, without --task pairs")
    if train.evaluate_every_steps == 0 and (finetune.keep == "best" or finetune.patience):
        raise ConfigError(
            f"finetune.{'keep=best' if finetune.keep == 'best' else 'patience'} needs evaluations during training, but "
            "train.evaluate_every_steps is 0",
            hint="--set train.evaluate_every_steps=100",
        )
    if train.evaluate_sequences:  # F1 and correlations on a part of the split are different metrics
        raise ConfigError(
            f"train.evaluate_sequences is {train.evaluate_sequences}, but fine-tuning evaluates on the whole dev file",
            hint="leave it out; a larger train.evaluate_every_steps, or a shorter dev file, saves time",
        )
    if train.batch_schedule:  # it counts the positions of rows that all have one length
        raise ConfigError(
            "train.batch_schedule is for pre-training; in fine-tuning, all updates have the same number of rows",
            hint="leave it out, and set train.sequences_per_step",
        )
    whole = next((each.name for each in definitions if each.family.objective is not None), None)
    if whole is not None and train.micro_batch_size not in (None, train.sequences_per_step):
        raise ConfigError(
            f"train.micro_batch_size is {train.micro_batch_size}, but '{whole}' compares all rows of a step",
            hint="to save memory: --set task.texts_per_pass=32, which gives the same gradient",
        )


def fit_length(
    config: FinetuneConfig, rows: int, user_set: Set[str], *, classes: bool, pairs: bool, debug: bool
) -> FinetuneConfig:
    """Set the steps, the warm-up and the span of the average from the settings and the size of the data.

    Args:
        rows: number of training rows, of all tasks.
        classes: whether every task predicts one class.
        pairs: whether a task reads pairs of texts, which are overfitted sooner.
        user_set: dotted keys of settings that the user gave, which are not changed.
        debug: train for a few steps only.
    """
    per_step, finetune = config.train.sequences_per_step, config.finetune
    steps = config.train.max_steps
    if "train.max_steps" not in user_set:
        epochs = min(finetune.epochs, 3.0) if debug else finetune.epochs
        # The released code fills up the last batch of an epoch.
        steps = max(1, int(-(-rows // per_step) * epochs) if finetune.recipe == "google" else round(rows / per_step * epochs))
        if not debug and "finetune.epochs" not in user_set:
            steps = max(
                steps, min(finetune.min_steps, round(rows / per_step * (_MAX_EPOCHS_PAIRS if classes and pairs else _MAX_EPOCHS)))
            )
    updates: dict[str, Any] = {"train.max_steps": steps} | ({"finetune.retries": 0} if debug else {})
    fitted = finetune.recipe == "auto" and not _LENGTHS & user_set and finetune.teacher is None
    if classes and not pairs and fitted and rows < _FEW_SHOT_ROWS and not {"finetune.few_shot", "task.pooling"} & user_set:
        updates["finetune.few_shot"] = True
    if finetune.few_shot and (pairs or not classes or finetune.teacher is not None):
        raise ConfigError("finetune.few_shot is for one class of a single text, without a teacher", hint="leave it out")
    if config.train.weight_average and "train.weight_average" not in user_set:
        # The recipe's decay is for 1,000 updates: in runs of other lengths, the average spans the same part of the run.
        updates["train.weight_average"] = max(0.0, 1 - (1 - config.train.weight_average) * 1000 / steps)
    if "optimizer.warmup_steps" not in user_set:
        updates["optimizer.warmup_steps"] = int(steps * _WARMUP)
    config = config.with_values(updates)
    if (problem := overlap(config.optimizer, steps)) is not None:
        raise ConfigError(problem, hint="set a lower optimizer.warmup_steps, optimizer.decay_fraction or optimizer.decay_steps")
    return config


def requested_tasks(
    names: Sequence[str], folders: Sequence[Path], files: Mapping[str, object]
) -> tuple[list[tuple[str, Path]], list[str]]:
    """The named tasks with their folders, and the settings of a task whose files are the user's own.

    Args:
        names: names of tasks that the user gave; 'pairs' has files of the user's own.
        folders: a folder for each of them, or one for all.
        files: files and columns of the user's own, by setting of `files`; None: not given.

    Raises:
        ConfigError: the number of folders differs, or files are given for a named task, or none for `pairs`.
    """
    settings = [f"files.{name}={toml_value(str(value))}" for name, value in files.items() if value is not None]
    if "pairs" in names:
        if len(names) > 1 or folders or files["train"] is None:
            raise ConfigError(
                "task 'pairs' is trained alone, on a file of your own",
                hint="discern finetune MODEL --task pairs --train pairs.csv --dev judged.csv --out OUT",
            )
        return [], ["files.task=pairs", *settings]
    if names and len(folders) == 1:
        folders = [*folders] * len(names)
    if len(names) != len(folders):
        raise ConfigError(
            f"expected one --data for each --task, found {len(names)} --task and {len(folders)} --data",
            hint="give --task NAME --data DIR once for each task",
        )
    if names and settings:
        raise ConfigError("a named task has its own files and columns", hint="leave out --task, or --train and the columns")
    return list(zip(names, folders, strict=True)), settings
