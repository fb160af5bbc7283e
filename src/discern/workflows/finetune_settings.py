"""The configuration of a fine-tuning run: the recipe for the model's size, then the task's, then a file, then `--set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, create_model

from discern.config.base import Section
from discern.config.layers import Origin, Setting, Settings, parse_overrides, read_file
from discern.config.resolve import Resolved, resolve
from discern.errors import ConfigError
from discern.model.encoder import Encoder
from discern.tasks.base import Definition, TaskConfig
from discern.tasks.frames import FrameName
from discern.tasks.questions import QuestionConfig
from discern.training.config import OptimizerConfig, TrainConfig

Recipe = Literal["auto", "paper", "google"]
# Clark et al. 2020, table 7, by hidden size up to; the released code differs for the small model alone.
_RATES: dict[str, tuple[tuple[int, float], ...]] = {
    "auto": ((256, 3e-4), (768, 1e-4), (1_000_000, 5e-5)),
    "paper": ((256, 3e-4), (768, 1e-4), (1_000_000, 5e-5)),
    "google": ((256, 1e-4), (768, 1e-4), (1_000_000, 5e-5)),
}
_LAYER_DECAYS = ((768, 0.8), (1_000_000, 0.9))
# Networks narrower than the paper's smallest were trained without dropout, and have less to lose: at its rates they end at the
# majority class (benchmarks/records, "tasks").
_SMALLEST = 256
_NARROW = {"optimizer.learning_rate": 1e-3, "optimizer.layer_decay": 1.0, "finetune.dropout": 0.0}
_SWAPPED = ("mrpc", "stsb")
# Updates at least, by hidden size: three epochs under-train small networks (benchmarks/records, "finetune-defaults"), and all
# networks on small data (Zhang et al. 2021, "Revisiting Few-sample BERT Fine-tuning"; Mosbach et al. 2021).
_LEAST_STEPS = ((255, 1000), (1_000_000, 300))
_RETRIES = 2
# With so many steps even a narrow network overfits without it.
_DROPOUT = 0.1
_LENGTHS = frozenset({"finetune.epochs", "train.max_steps"})


class FilesConfig(Section):
    """A labelled file of one's own: which files, and which columns are what. Columns that are not named are recognised."""

    train: Path | None = Field(None, description="File to train on.")
    dev: Path | None = Field(None, description="File to evaluate on; none: a part of the training file is held out.")
    test: Path | None = Field(None, description="File to predict when all is done; it is not evaluated on, labels or not.")
    format: str | None = Field(
        None, description="csv, tsv, jsonl, json, parquet, text or conll, where content and name do not tell."
    )
    text: str | None = Field(None, description="Column of the text.")
    pair: str | None = Field(None, description="Column of a second text.")
    label: str | None = Field(None, description="Column of the label: a class, a number, or a list of classes.")
    label_kind: Literal["label", "labels", "number"] | None = Field(
        None, description="What the label is: one class, several, a number; none: as the values look."
    )
    label_separator: str | None = Field(None, description="What parts several classes in one cell.")
    words: str | None = Field(
        None, coerce_numbers_to_str=True, description="Column of words to tag; in a file with a word a line its number, from 0."
    )
    tags: str | None = Field(None, coerce_numbers_to_str=True, description="Column of their tags, likewise; -1: the last.")
    question: str | None = Field(None, description="Column of the question.")
    context: str | None = Field(None, description="Column of the text that holds the answer.")
    answer: str | None = Field(None, description="Column of the answer.")
    start: str | None = Field(None, description="Column of the answer's first character.")


class FinetuneSection(Section):
    """How a task is trained, apart from optimizer and loop."""

    recipe: Recipe = Field(
        "auto",
        description="'auto': rates of 'paper'. Unless a length is given, training is fitted to the data: it runs for at least "
        "finetune.min_steps, keeps the weights that score best on held-out examples, and retries seeds that fail. 'paper': table "
        "7 of the ELECTRA paper. 'google': optimizer, schedule, loss and swapped pairs of the released code; "
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
        description="How often to retry, with another draw, a seed that diverged or predicts the same for every example.",
    )
    rate_search: bool = Field(
        False,
        description="Try a third of the learning rate, the rate, and three times the rate in short trainings first, and train "
        "with the one that scores best on held-out examples.",
    )
    warmup_fraction: float = Field(
        0.1, ge=0, le=1, description="Part of the steps that warm up; optimizer.warmup_steps overrides it."
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="In the encoder, its attention and before the heads.")
    reduction: Literal["mean", "sum"] = Field(
        "mean",
        description="Reduction of the loss over a batch. 'mean': over the items of each task, weighted by its share of the "
        "batch's rows. 'sum': as in the released code; gradients are then clipped at nearly every step.",
    )
    frame: FrameName = Field(
        "cls-first",
        description="How rows are laid before the encoder. 'cls-first': [CLS] A [SEP] B [SEP], padded on the right; 'cls-last': "
        "A [SEP] B [SEP] [CLS], padded on the left, as XLNet's are, and the default for that encoder.",
    )
    task_alpha: float = Field(
        1.0, ge=0, le=1, description="With several tasks: rows are drawn by size to this power. 1: by size; 0: evenly."
    )
    heldout_fraction: float = Field(0.1, gt=0, lt=1, description="Part of the training file held out where there is no dev file.")
    keep: Literal["last", "best"] = Field(
        "last",
        description="Which weights a seed ends with: the last, or those of its best evaluation (train.evaluate_every_steps).",
    )
    patience: int = Field(0, ge=0, description="Evaluations without a better score after which a seed stops; 0: never.")
    train_rows: int | None = Field(None, ge=1, description="Train on this many examples, drawn at random; none: on all.")


class FinetuneConfig(Section):
    """What every fine-tuning configuration has; the sections of its tasks are added by `load_finetune_config`."""

    finetune: FinetuneSection = Field(default_factory=FinetuneSection)
    files: FilesConfig = Field(default_factory=FilesConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    def task_config(self, name: str) -> TaskConfig:
        """The settings of one of its tasks."""
        several = getattr(self, "tasks", None)
        config: TaskConfig = getattr(several, name) if several is not None else getattr(self, "task")  # noqa: B009
        return config


def load_finetune_config(
    definitions: Sequence[Definition[Any]],
    hidden_size: int,
    file: Path | None,
    overrides: Sequence[str],
    recipe: Recipe = "auto",
    encoder: type[Encoder] = Encoder,
) -> Resolved[FinetuneConfig]:
    """The resolved configuration: recipe, then what encoder and task want, then file, then `--set`.

    The settings of one task stand in `[task]`; of several in `[tasks.NAME]`.

    Args:
        recipe: 'auto': the paper's, fitted to the data, and for answers the head that transformers has too.
        encoder: class of the one that is fine-tuned.

    Raises:
        ConfigError: anything wrong in it; all problems are named at once.
    """
    given = (read_file(file) if file is not None else {}) | parse_overrides(overrides)
    chosen = _chosen_recipe(given, recipe)
    published = {} if chosen == "auto" else _published_heads(definitions, chosen)
    fitted = is_fitted(chosen, given.keys())
    recipe_layer = _recipe_layer(definitions, hidden_size, chosen, fitted=fitted)
    settings = recipe_layer | published | _encoder_layer(definitions, encoder) | given
    if len(definitions) > 1:
        _refuse_single_section(settings, definitions)
    resolved = resolve(_model(definitions), settings)
    if not fitted:
        _refuse_unseen_best(resolved.config)
    _refuse_part_of_a_split(resolved.config)
    return resolved


def is_fitted(recipe: Recipe, given: Set[str]) -> bool:
    """Whether the length of the training is fitted to the data: nobody asked for a recipe or a length.

    Args:
        given: dotted keys of the settings that somebody gave.
    """
    return recipe == "auto" and not _LENGTHS & given


def _chosen_recipe(given: Settings, asked: Recipe) -> Recipe:
    """What the settings name, or else what was asked for."""
    setting = given.get("finetune.recipe")
    named = next((recipe for recipe in get_args(Recipe) if setting is not None and setting.value == recipe), None)
    if setting is None or named is None:  # `resolve` says what is wrong with another value
        return asked
    if asked not in ("auto", named):
        raise ConfigError(
            f"--recipe {asked}, but finetune.recipe is {named} ({setting.origin.where})", hint="leave one of the two out"
        )
    recipe: Recipe = named
    return recipe


def _refuse_part_of_a_split(config: FinetuneConfig) -> None:
    """A task is judged by its whole split: F1 and correlations of a part are another figure."""
    rows = config.train.evaluate_sequences
    if rows:
        raise ConfigError(
            f"train.evaluate_sequences is {rows}, but fine-tuning evaluates on the whole dev file",
            hint="leave it out; a larger train.evaluate_every_steps, or a shorter dev file, saves time",
        )


def _refuse_unseen_best(config: FinetuneConfig) -> None:
    """Settings that choose among evaluations need some."""
    finetuning = config.finetune
    asked = "finetune.keep=best" if finetuning.keep == "best" else "finetune.patience" if finetuning.patience else None
    if asked is not None and config.train.evaluate_every_steps == 0:
        raise ConfigError(
            f"{asked} goes by evaluations, and train.evaluate_every_steps is 0: there would be none",
            hint="--set train.evaluate_every_steps=100",
        )


def _model(definitions: Sequence[Definition[Any]]) -> type[FinetuneConfig]:
    configs: dict[str, Any] = {each.name: (each.family.Config, Field(default_factory=each.family.Config)) for each in definitions}
    if len(definitions) == 1:
        return create_model("FinetuneConfig", __base__=FinetuneConfig, task=configs[definitions[0].name])
    tasks = create_model("TasksSection", __base__=Section, **configs)
    return create_model("FinetuneConfig", __base__=FinetuneConfig, tasks=(tasks, Field(default_factory=tasks)))


def _recipe_layer(definitions: Sequence[Definition[Any]], hidden_size: int, recipe: Recipe, *, fitted: bool) -> Settings:
    """The recipe for a network of this size, and the defaults of the tasks."""
    size = "small" if hidden_size <= 256 else "base" if hidden_size <= 768 else "large"
    values: dict[str, object] = {
        "finetune.recipe": recipe,
        "optimizer.learning_rate": next(rate for width, rate in _RATES[recipe] if hidden_size <= width),
        "optimizer.layer_decay": next(decay for width, decay in _LAYER_DECAYS if hidden_size <= width),
        "optimizer.weight_decay": 0.0,
        "train.sequences_per_step": 32,
        "train.evaluate_every_steps": 0,
        "train.evaluate_sequences": 0,
    }
    if recipe != "google" and hidden_size < _SMALLEST:
        size = "narrower than small"
        values |= _NARROW
    if fitted:
        values["finetune.dropout"] = _DROPOUT
        values["finetune.min_steps"] = next(steps for width, steps in _LEAST_STEPS if hidden_size <= width)
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
        # What a task says of training holds where it is alone: several share one training.
        chosen = own if len(definitions) == 1 else {k: v for k, v in own.items() if k.startswith("task.")}
        for key, value in chosen.items():
            name = key if len(definitions) == 1 else key.replace("task.", f"tasks.{each.name}.", 1)
            layer[name] = Setting(value, Origin("preset", f"task {each.name}"))
    return layer


def _published_heads(definitions: Sequence[Definition[Any]], recipe: Recipe) -> Settings:
    """What a recipe that was asked for has of heads: paper and released code find answers with a head of their own."""
    keys = ("task.head" if len(definitions) == 1 else f"tasks.{each.name}.head" for each in definitions if _finds_answers(each))
    return {key: Setting("joint", Origin("preset", f"recipe {recipe}")) for key in keys}


def _finds_answers(definition: Definition[Any]) -> bool:
    return issubclass(definition.family.Config, QuestionConfig)


def _encoder_layer(definitions: Sequence[Definition[Any]], encoder: type[Encoder]) -> Settings:
    """What the encoder was made for."""
    layer: dict[str, Setting] = {}
    for key, value in encoder.fine_tuning.items():
        setting = Setting(value, Origin("preset", f"encoder {encoder.__name__}"))
        section, name = key.split(".", 1)
        if section == "finetune":
            layer[key] = setting
        for each in definitions:
            if each.family.family == section:
                layer[f"task.{name}" if len(definitions) == 1 else f"tasks.{each.name}.{name}"] = setting
    return layer


def _refuse_single_section(settings: Mapping[str, Setting], definitions: Sequence[Definition[Any]]) -> None:
    for key in settings:
        if key.startswith("task."):
            names = " or ".join(f"tasks.{each.name}.{key.partition('.')[2]}" for each in definitions)
            raise ConfigError(f"{key} is given, but there are {len(definitions)} tasks", hint=f"say of which: --set {names}=...")
