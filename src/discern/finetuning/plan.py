"""The plan of a fine-tuning: the model, the files and settings, and the encoded rows, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.config.resolve import resolve
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import ConfigError
from discern.finetuning.data import HELD_OUT, TaskData, TaskFiles, find_files, read_task
from discern.finetuning.settings import (
    FinetuneConfig,
    Recipe,
    fit_length,
    given_settings,
    load_finetune_config,
)
from discern.model_files.folder import LoadedEncoder, first_layers
from discern.models.embeddings import Embeddings
from discern.progress import Progress, warning_to
from discern.tasks import families
from discern.tasks import tasks as registry
from discern.tasks.base import Definition, TextEncoder, tag_counts
from discern.tasks.rows import recognize_layout
from discern.tasks.tags import resemble_marks
from discern.training.metrics_log import check_trackers
from discern.wording import counted

OWN = "own"
"""Name of the task of a user's own files, in results and file names."""
_OWN_METRICS = {
    "label": ("accuracy", "macro_f1"),
    "labels": ("micro_f1", "macro_f1", "exact_match"),
    "number": ("spearman", "pearson", "mean_absolute_error"),
}
# With fewer examples, the standard error of an accuracy is more than seven points.
_FEW_EVALUATED = 50


@dataclass(frozen=True, eq=False)
class FinetunePlan:
    """Model, settings and data of a fine-tuning, complete before any training.

    Attributes:
        loaded: encoder that every seed starts from.
        data: examples and features of each task.
        out: output folder.
        seeds: number of seeds, counted from `train.seed`.
        debug: whether only the first examples of each file were read.
        baselines: whether simple predictors are evaluated, too.
        overwrite: whether another fine-tuning in the output folder is replaced.
        precision: arithmetic of all seeds, 'float32' or 'bfloat16'.
    """

    loaded: LoadedEncoder
    config: FinetuneConfig
    data: dict[str, TaskData]
    out: Path
    seeds: int = 1
    debug: bool = False
    baselines: bool = True
    overwrite: bool = False
    precision: str = "float32"


@dataclass(frozen=True)
class ResolvedSettings:
    """The settings of a fine-tuning with its files, before any example is encoded.

    Attributes:
        files: the files of each task.
        notes: decisions about the settings, one per line.
        user_set: dotted keys that a file or --set gave.
    """

    files: list[TaskFiles]
    config: FinetuneConfig
    notes: list[str]
    user_set: frozenset[str]


def resolve_settings(
    loaded: LoadedEncoder,
    tasks: Sequence[tuple[str, Path]],
    config: Path | None,
    overrides: Sequence[str],
    recipe: Recipe,
    progress: Progress,
) -> ResolvedSettings:
    """Find the files of the tasks, and resolve and check the settings.

    Raises:
        ConfigError, DataError: a task, a file or a setting is wrong.
    """
    given = given_settings(config, overrides)
    if tasks:
        files = [find_files(registry.load(name), folder) for name, folder in tasks]
        stray = [key for key in given if key.startswith("files.")]
        if stray:
            raise ConfigError(
                f"a named task has its own files and columns, but the settings contain {', '.join(stray)}",
                hint="leave out --task, or remove [files] from the settings file",
            )
    else:
        files = [own_task(given, warning_to(progress))]
    names = [each.definition.name for each in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"a task is named twice: {', '.join(names)}", hint="name each task once")
    encoder = loaded.encoder
    definitions = [each.definition for each in files]
    resolved = load_finetune_config(definitions, encoder.config, given, recipe=recipe, encoder=type(encoder))
    chosen, finetune = resolved.config, resolved.config.finetune
    check_trackers(chosen.train.tracker, tensorboard=chosen.train.tensorboard)
    if finetune.layers is not None and finetune.layers > encoder.config.num_layers:
        raise ConfigError(
            f"finetune.layers is {finetune.layers}, but the encoder has {encoder.config.num_layers}",
            hint="give fewer, or leave it out",
        )
    if finetune.frame == "cls-last" and isinstance(encoder.embeddings, Embeddings):
        raise ConfigError(
            f"finetune.frame 'cls-last' has segments and padding for which encoder '{encoder.config.encoder}' has no tables",
            hint="set finetune.frame=cls-first",
        )
    for definition in definitions:
        config_of_task = chosen.task_config(definition.name)
        definition.family.check_model(definition, config_of_task, encoder, dropout=finetune.dropout, frame=finetune.frame)

    # Lower default lengths to the positions that were pre-trained; check lengths that the user set against the model's.
    notes = []
    limited = encoder.limits_positions(lambda name: getattr(encoder.config, name))
    for name in names:
        key, positions = f"{chosen.task_prefix(name)}sequence_length", encoder.config.max_positions
        length = chosen.task_config(name).sequence_length
        if length > positions and key in resolved.user_set and limited:
            raise ConfigError(f"{key} is {length}, but the model has {positions} positions", hint=f"--set {key}={positions}")
        if length > loaded.max_length and key in resolved.user_set:
            notes.append(f"{name}: positions from {loaded.max_length} on were not trained in pre-training")
        elif length > loaded.max_length:
            notes.append(f"{name}: sequence length {loaded.max_length}, which the model was trained on, instead of {length}")
            chosen = chosen.with_values({key: loaded.max_length})
    return ResolvedSettings(files, chosen, notes, resolved.user_set)


def own_task(given: Mapping[str, Any], warn: Callable[[str], None]) -> TaskFiles:
    """The task that the section `[files]` of the settings describes, with its files.

    Raises:
        ConfigError: there is no training file, or the columns are those of different families.
        DataError: the training file cannot be read.
    """
    # The task must be known before the other sections can be resolved.
    section = {key: setting for key, setting in given.items() if key.startswith("files.")}
    files = resolve(FinetuneConfig, section).config.files
    if files.train is None:
        raise ConfigError(
            "nothing to train on", hint="name a task (--task sst2 --data DIR) or a file (--train FILE --label COLUMN)"
        )
    paths = files.model_dump(include={"train", "dev", "test"}, exclude_none=True)
    predicted = ("test",) if files.test is not None else ()
    roles = {"text", "pair", "label", "words", "tags", "question", "context", "answer", "start"}
    columns = files.model_dump(include=roles, exclude_none=True)
    if files.task == "pairs":
        if files.test is not None:
            raise ConfigError(
                "files.test is a file to predict, but pairs have no labels", hint="discern evaluate OUT --data FILE"
            )
        from discern.tasks.contrastive import pairs_definition

        settings = {key.removeprefix("task."): each.value for key, each in given.items() if key.startswith("task.")}
        return TaskFiles(pairs_definition(files.train, files.dev, columns, files.format, settings), paths, predicted)
    family, layout = recognize_layout(
        files.train, columns, format=files.format, kind=files.label_kind, separator=files.label_separator, warn=warn
    )
    defaults: dict[str, object] = {}
    metrics = _OWN_METRICS[layout.kind] if family == "classification" else ("f1", "precision", "recall", "accuracy")
    if family == "questions":
        definition: Definition[Any] = Definition(OWN, families.load("squad1"), (), layout=layout)
        config = definition.family.Config()
        examples = definition.read(files.train, "train", config).examples
        family = "squad2" if any(example.impossible for example in examples) else "squad1"  # type: ignore[assignment]
        metrics, defaults = ("exact_match", "f1"), {"finetune.epochs": 2.0}
    return TaskFiles(Definition(OWN, families.load(family), metrics, layout=layout, defaults=defaults), paths, predicted)


def read_rows(
    loaded: LoadedEncoder, settings: ResolvedSettings, out: Path, progress: Progress, *, debug: bool, submits: bool
) -> FinetunePlan:
    """Read, check and encode all files, and fix the length of the training. Writes nothing.

    Args:
        submits: also read the test files of GLUE, for a submission.

    Raises:
        ConfigError, DataError: a file does not fit its task, or is not the whole test file that a submission needs.
    """
    finetune = settings.config.finetune
    if finetune.layers is not None:
        loaded = first_layers(loaded, finetune.layers)
    tokenizer = load_tokenizer(loaded.tokenizer_path)
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    data = {}
    for files in settings.files:
        name = files.definition.name
        data[name] = read_task(
            files,
            settings.config.task_config(name),
            text,
            finetune.heldout_fraction,
            finetune.train_rows,
            debug=debug,
            submits=submits,
        )
        _note_data(data[name], text, progress)
    rows = sum(len(task.train.features) for task in data.values())
    classes = all(each.task.labels.kind == "single" for each in data.values())
    pairs = any(each.task.labels.pairs for each in data.values())
    config = fit_length(settings.config, rows, settings.user_set, classes=classes, pairs=pairs, debug=debug)
    steps = config.train.max_steps
    passes = steps * config.train.sequences_per_step / max(rows, 1)
    length = f"{counted(steps, 'step')}, {passes:.1f} passes over {counted(rows, 'row')}"
    if config.finetune.few_shot:
        length = f"few examples ({rows}): the encoder is not trained; a linear layer and n-grams are fitted"
        for name, each in data.items():
            prefix = config.task_prefix(name)
            config = config.with_values({f"{prefix}pooling": "mean-words", f"{prefix}words": True})
            each.task.config = config.task_config(name)
    for line in (*settings.notes, length):
        progress.note(line)
    plan = FinetunePlan(loaded, config, data, out, debug=debug)
    if submits:
        from discern.finetuning.submission import check_rows

        check_rows(plan)
    return plan


def _note_data(data: TaskData, text: TextEncoder, progress: Progress) -> None:
    """Report the notes of the files, unknown tokens, a lack of examples to evaluate on, and the labels."""
    name, labels = data.task.name, data.task.labels
    for line in data.notes:
        progress.note(f"{name}: {line}")
    unknown = UnknownTokens(text.tokenizer)
    for split in (data.train, *data.evaluated.values(), *data.unlabeled.values()):
        unknown.add_ids(split.features.input_ids.values)
    unknown.report(progress.note, warning_to(progress), of=name)
    evaluated = len(data.evaluated[data.dev_name].examples)
    if evaluated < _FEW_EVALUATED:
        ways = ["evaluate on more examples with --dev FILE"] if not data.definition.files else []
        ways += ["hold out more with --set finetune.heldout_fraction=0.3"] if data.dev_name == HELD_OUT else []
        advice = f"; {', or '.join(ways)}" if ways else ""
        warning_to(progress)(
            f"{name}: the scores come from {counted(evaluated, 'example')} ({data.dev_name}), so they are unreliable{advice}"
        )
    if labels.kind == "tags" and labels.scheme == "none":
        tags = list(tag_counts(data.train.examples))
        if resemble_marks(tags):
            warning_to(progress)(
                f"{name}: tags such as {', '.join(tags[:5])} mark no spans, so the score is the accuracy over words, not the F1 "
                "of spans. For F1, write B-TYPE for the first word of a span, I-TYPE for its other words, and O (the letter) "
                "outside of spans"
            )
