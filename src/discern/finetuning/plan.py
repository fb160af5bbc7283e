"""The plan of a fine-tuning: the model, the files and settings, and the encoded rows, checked before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from discern.config.resolve import resolve
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import ConfigError, DataError, counted, did_you_mean
from discern.finetuning.settings import (
    FinetuneConfig,
    Recipe,
    fit_length,
    given_settings,
    load_finetune_config,
)
from discern.model_files.folder import LoadedEncoder, first_layers
from discern.models.layers import Embeddings
from discern.progress import Progress, warning_to
from discern.tasks import families, tasks as registry
from discern.tasks.base import Definition, Reading, Task, TaskConfig, TextEncoder, tag_counts
from discern.tasks.baselines import sample
from discern.tasks.rows import recognize_layout
from discern.tasks.supervised import Split
from discern.tasks.tags import resemble_marks
from discern.training.metrics import check_trackers

HELD_OUT = "held out of train"
_DEBUG_EXAMPLES = 100


@dataclass(frozen=True)
class TaskFiles:
    """A task and its files.

    Attributes:
        paths: file of each split: train, dev, test and further ones.
        predicted: splits that are only predicted: their labels are not read, and they are not evaluated.
    """

    definition: Definition[Any]
    paths: dict[str, Path]
    predicted: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task with its examples and features.

    Attributes:
        dev_name: split that the headline score is computed on: "dev", "test", or "held out of train".
        evaluated: labeled splits that are scored, by name, `dev_name` first.
        unlabeled: further splits that are only predicted, by name.
        notes: messages about the files, one per line.
        taught: texts that the teacher labeled, whose rows follow those of `train.examples` in its features.
        teacher: name, fingerprint and score of the teacher; None: there is none.
    """

    definition: Definition[Any]
    task: Task[Any]
    dev_name: str
    train: Split
    evaluated: dict[str, Split]
    unlabeled: dict[str, Split]
    notes: tuple[str, ...]
    files: dict[str, str]
    taught: tuple[Any, ...] = ()
    teacher: dict[str, Any] | None = None

    @cached_property
    def digests(self) -> dict[str, str]:
        """A hash of the examples of each split, by name, which shows whether a file has changed."""
        digests = {}
        splits = {"train": self.train, **self.evaluated, **self.unlabeled}
        examples = {name: split.examples for name, split in splits.items()} | ({"unlabeled": self.taught} if self.taught else {})
        for name, each in examples.items():
            digest = hashlib.sha256()
            for example in each:
                digest.update(repr(example).encode("utf-8", "replace") + b"\0")
            digests[name] = digest.hexdigest()
        return digests | ({} if self.teacher is None else {"teacher": self.teacher["weights"]})


def find_splits(definition: Definition[Any], folder: Path) -> dict[str, Path]:
    """The file of each split of a named task that a folder has.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        raise ConfigError(
            f"{folder} {kind}; expected a folder with {definition.files['train'][0]}", hint=did_you_mean(folder.name, siblings)
        )
    paths = {
        split: next((folder / name for name in names if (folder / name).is_file()), None)
        for split, names in definition.files.items()
    }
    return {split: path for split, path in paths.items() if path is not None}


def find_files(definition: Definition[Any], folder: Path) -> TaskFiles:
    """Find the files of a named task in a folder.

    Raises:
        ConfigError: the folder does not exist.
        DataError: it has no training file.
    """
    paths = find_splits(definition, folder)
    if "train" not in paths:
        entries = sorted(folder.iterdir())
        names = ", ".join(path.name for path in entries[:20]) or "nothing"
        # The folders of GLUE are named like the tasks: SST-2 for sst2.
        subfolder = next((path for path in entries if path.name.replace("-", "").lower() == definition.name), None)
        published = f" (published at {definition.source})" if definition.source else ""
        hint = (
            f"--data {subfolder}" if subfolder else f"give the folder of the task's files under their official names{published}"
        )
        raise DataError(f"{folder} has no training file of {definition.name}; it contains {names}", hint=hint)
    return TaskFiles(definition, paths)


def read_task(
    files: TaskFiles,
    config: TaskConfig,
    text: TextEncoder,
    heldout_fraction: float,
    train_rows: int | None = None,
    *,
    debug: bool = False,
    submits: bool = False,
) -> TaskData:
    """Read, check and encode the files of a task.

    Args:
        debug: keep a hundred examples of each file.
        submits: also read the test files, for a submission.

    Raises:
        DataError, ConfigError: a file does not fit the task; nothing has been written.
    """
    definition, paths, notes = files.definition, files.paths, []

    def read(split: str, *, labeled: bool = True) -> Reading[Any]:
        reading = definition.read(paths[split], split, config, labeled=labeled)
        if not reading.examples:  # readers of other packages need not check it
            raise DataError(f"{reading.source} has no examples", hint="check the file and its format")
        return reading

    # Read the training file, and the file to evaluate on: dev, or else test, if it has labels.
    train = read("train")
    candidates = [name for name in ("dev", "test") if name in paths and name not in files.predicted]
    readings = {name: read(name) for name in (*candidates, *definition.report_splits) if name in paths}
    if not definition.files and "dev" in readings and not has_labels(readings["dev"]):
        raise DataError(f"{readings['dev'].source} has no labels to evaluate on", hint="give a file with labels: --dev FILE")
    readings = {name: reading for name, reading in readings.items() if has_labels(reading)}
    dev_name = next((name for name in candidates if name in readings), HELD_OUT)
    # Labels are taken from the whole file: a part of it may lack some of them.
    labels = definition.family.learn(train, config, definition.labels)
    task = definition.family(definition.name, config, definition.metrics, labels)
    if dev_name == HELD_OUT:
        train, held = hold_out(train, heldout_fraction)
        readings = {HELD_OUT: held, **readings}
        notes.append(f"no dev file: {len(held.examples):,} of the training examples are held out to evaluate on")
    elif dev_name == "test":
        notes.append("no dev file: evaluating on the test file")
    readings = {name: readings[name] for name in (dev_name, *definition.report_splits) if name in readings}

    # Shorten them, and check the labels.
    if debug:
        train, readings = _first(train), {name: _first(reading) for name, reading in readings.items()}
    train = _some(train, train_rows)
    for reading in (train, *readings.values()):
        task.check(reading)
    unlabeled = {
        name: read(name, labeled=False)
        for name in paths
        if name in files.predicted or (submits and name not in readings and name != "train")
    }
    if debug:  # apart from a submission, which needs complete files
        unlabeled |= {name: _first(unlabeled[name]) for name in files.predicted}

    # Encode them.
    def encode(examples: Sequence[Any], *, labeled: bool = True) -> Split:
        return Split(tuple(examples), task.encode(examples, text, labeled=labeled))

    trained = encode(task.training_examples(train.examples))
    evaluated = {name: encode(reading.examples) for name, reading in readings.items()}
    for name, reading, split in (("train", train, trained), *((name, readings[name], evaluated[name]) for name in readings)):
        rows = len(split.features)
        more = f" ({counted(rows, 'row')})" if rows != len(reading.examples) else ""
        lines = (*reading.notes, *map(str, reading.problems), *split.features.notes)
        notes += [f"{name}: {line}" for line in (f"{counted(len(reading.examples), 'example')}{more}, {reading.source}", *lines)]
    return TaskData(
        definition,
        task,
        dev_name,
        trained,
        evaluated,
        {name: encode(reading.examples, labeled=False) for name, reading in unlabeled.items()},
        tuple(notes),
        {name: str(path) for name, path in paths.items()},
    )


def has_labels(reading: Reading[Any]) -> bool:
    """Whether the examples of a file have labels, judging by the first one."""
    return any(getattr(reading.examples[0], name, None) is not None for name in ("label", "tags", "impossible", "texts"))


def hold_out(reading: Reading[Any], fraction: float) -> tuple[Reading[Any], Reading[Any]]:
    """Split off a fraction of the examples, at least one, by a hash of their texts, so that equal texts fall on the same side."""
    hashes = [_fraction_of(example) for example in reading.examples]
    limit = max(fraction, min(hashes) + 1e-9)
    held, rest = (
        tuple(example for example, value in zip(reading.examples, hashes, strict=True) if (value < limit) is side)
        for side in (True, False)
    )
    if not rest:
        raise DataError(
            f"{reading.source} has {len(hashes):,} examples with {counted(len(set(hashes)), 'different text')}, too few to hold "
            "some of them out (equal texts stay together)",
            hint="give a dev file: --dev FILE",
        )
    # The notes and problems are those of the whole file.
    train = replace(reading, examples=rest, places=())
    return train, replace(train, examples=held, notes=(), problems=(), source=f"held-out part of {reading.source}")


def _fraction_of(example: Any) -> float:
    parts = [str(getattr(example, name, "")) for name in ("text", "pair", "words", "context")]
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _some(reading: Reading[Any], count: int | None) -> Reading[Any]:
    """A reproducible sample of the examples, in their order."""
    if count is None or count >= len(reading.examples) or reading.indivisible:
        return reading
    return replace(reading, examples=tuple(sample(reading.examples, count, "train rows")), places=())


def _first(reading: Reading[Any]) -> Reading[Any]:
    """The first examples alone, to debug with."""
    return reading if reading.indivisible else replace(reading, examples=reading.examples[:_DEBUG_EXAMPLES])


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
    loaded: LoadedEncoder,
    settings: ResolvedSettings,
    out: Path,
    progress: Progress,
    device: torch.device,
    *,
    debug: bool,
    submits: bool,
) -> FinetunePlan:
    """Read, check and encode all files, and fix the length of the training. Writes nothing.

    Args:
        device: device that a teacher runs on.
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
        if finetune.teacher is not None:
            from discern.finetuning.distillation import teach

            data[name] = teach(data[name], text, finetune, device, progress)
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
