"""A task from the user's own labeled files. Their columns decide the family of the task and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from discern.config.layers import Settings
from discern.config.resolve import resolve
from discern.config.schema import Section
from discern.errors import ConfigError, DataError, did_you_mean
from discern.finetuning.pair_files import PairsSource, pairs_definition
from discern.finetuning.settings import FilesConfig
from discern.finetuning.task_files import TaskFiles
from discern.tasks import families
from discern.tasks.base import Definition, Source, TaskConfig
from discern.tasks.conll import COLUMN_SUFFIXES, ConllSource
from discern.tasks.examples import ClassificationExample, Reading, label_counts
from discern.tasks.readers.files import suffix_of
from discern.tasks.readers.table import TableFormat, number_in
from discern.tasks.readers.text_groups import GroupColumns
from discern.tasks.readers.user_columns import (
    ClassificationColumns,
    NumberedColumns,
    QuestionColumns,
    TaggingColumns,
    classification_columns,
    numbered_columns,
    question_columns,
    tagging_columns,
)
from discern.tasks.readers.user_file import read_classification, read_questions, read_tagging
from discern.tasks.tagging import TaggingConfig

NAME = "own"  # in results and file names
_METRICS = {
    "label": ("accuracy", "macro_f1"),
    "labels": ("micro_f1", "macro_f1", "exact_match"),
    "number": ("spearman", "pearson", "mean_absolute_error"),
}
# Labels are not taken for classes if there are at least this many, and more than half as many as examples.
_TOO_MANY_CLASSES = 20
Columns = ClassificationColumns | TaggingColumns | NumberedColumns | QuestionColumns
FileFormat = TableFormat | Literal["conll"]
_TABLES = (".csv", ".tsv", ".tab", ".json", ".jsonl", ".ndjson", ".parquet")
_FORMATS = (*get_args(TableFormat), "conll")


class _Files(Section):
    files: FilesConfig = FilesConfig()


@dataclass(frozen=True)
class UserFileSource(Source[Any]):
    """Files whose columns the settings name: tables, or sentences with one word per line.

    Attributes:
        columns: columns of the training file.
        format: format of the files; None: recognized by name and content.
        doubts_classes: the labels were taken for classes only by their appearance, so a training file with nearly as many
            labels as examples is refused.
    """

    columns: Columns
    format: FileFormat | None = None
    doubts_classes: bool = False

    @classmethod
    def of_record(cls, kind: str, record: Mapping[str, Any]) -> UserFileSource:
        """The source from its `record`.

        Args:
            kind: kind of the labels.
        """
        tagging = NumberedColumns if record["format"] == "conll" else TaggingColumns
        columns: Any = {"tags": tagging, "spans": QuestionColumns}.get(kind, ClassificationColumns)
        return cls(columns(**record["columns"]), record["format"])

    def configured(self, config: TaskConfig) -> UserFileSource:
        """The source unchanged: its columns are named in `[files]`.

        Raises:
            ConfigError: the settings give the columns of a named task.
        """
        usual = TaggingConfig()
        for key, option in (("word_column", "--words"), ("tag_column", "--tags")):
            given = getattr(config, key, None)
            if given not in (None, getattr(usual, key)):
                raise ConfigError(
                    f"task.{key} is {given}, but it applies to named tasks only", hint=f"for your own files, use {option} {given}"
                )
        return self

    def record(self) -> dict[str, Any]:
        return {"columns": asdict(self.columns), "format": self.format}

    def splits(self, folder: Path) -> dict[str, Path]:
        """Empty: the files are named one by one."""
        return {}

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[Any]:
        if isinstance(self.columns, NumberedColumns):
            return _read_word_per_line(path, self.columns, split, labeled=labeled)
        if isinstance(self.columns, TaggingColumns) and has_word_per_line(path, self.format):
            return _read_word_per_line(path, numbered_columns(path), split, labeled=labeled)
        format = cast(TableFormat | None, self.format)
        if isinstance(self.columns, ClassificationColumns):
            reading = read_classification(path, self.columns, format=format, labeled=labeled)
            if self.doubts_classes and split == "train":
                _refuse_too_many_classes(reading, self.columns.label)
            return reading
        if isinstance(self.columns, TaggingColumns):
            return read_tagging(path, self.columns, format=format, labeled=labeled)
        return read_questions(path, self.columns, format=format, labeled=labeled, keep_unfound=split != "train")


def _refuse_too_many_classes(reading: Reading[ClassificationExample], column: str | None) -> None:
    """Raise a DataError if the labels are probably not classes, such as whole numbers that nearly all differ."""
    classes, examples = label_counts(reading.examples), len(reading.examples)
    if len(classes) < _TOO_MANY_CLASSES or 2 * len(classes) <= examples:
        return
    numbers = all(number_in(name) is not None for name in classes)
    raise DataError(
        f"{reading.source}: the column '{column}' has {len(classes):,} different labels in {examples:,} examples, such as "
        f"'{next(iter(classes))}'; that is too many to treat as classes",
        hint=("--set files.label_kind=number for a score" if numbers else "choose another column: --label COLUMN")
        + "; if they are classes: --set files.label_kind=label",
    )


def has_word_per_line(path: Path, format: str | None) -> bool:
    """Whether a user's file has one word per line, by its given format or its name."""
    return format == "conll" or (format is None and suffix_of(path) in COLUMN_SUFFIXES)


def _read_word_per_line(path: Path, columns: NumberedColumns, split: str, *, labeled: bool) -> Reading[Any]:
    if suffix_of(path) in _TABLES:
        raise ConfigError(
            f"{path} is a table, judging by its name, but the training file has one word per line",
            hint="give all files in one format; `discern predict` takes any",
        )
    reading = ConllSource(columns.words, columns.tags).read(path, split, labeled=labeled)
    if labeled and split == "dev" and reading.examples[0].tags is None:
        raise DataError(f"{path} has a single column, so there are no tags to evaluate on", hint="give words and tags")
    return replace(reading, notes=(f"columns: words = {columns.words}, tags = {columns.tags}", *reading.notes))


def user_task(given: Settings) -> TaskFiles:
    """The task that the section `[files]` of the settings describes, with its files.

    Raises:
        ConfigError: there is no training file, or the columns are those of different families.
        DataError: the training file cannot be read.
    """
    # The task must be known before the other sections can be resolved.
    section = {key: setting for key, setting in given.items() if key.startswith("files.")}
    files = resolve(_Files, section).config.files
    if files.train is None:
        raise ConfigError(
            "nothing to train on", hint="name a task (--task sst2 --data DIR) or a file (--train FILE --label COLUMN)"
        )
    paths = {
        split: path for split, path in (("train", files.train), ("dev", files.dev), ("test", files.test)) if path is not None
    }
    if files.format is not None and files.format not in _FORMATS:
        raise ConfigError(f"unknown format of files '{files.format}'", hint=did_you_mean(files.format, _FORMATS))
    predicted = ("test",) if files.test is not None else ()
    if files.task == "pairs":
        settings = {key.removeprefix("task."): each.value for key, each in given.items() if key.startswith("task.")}
        return TaskFiles(_pairs(files.train, files, settings), paths, predicted)
    columns = _columns(files.train, files)
    format = "conll" if isinstance(columns, NumberedColumns) else files.format
    doubts_classes = files.label_kind is None and isinstance(columns, ClassificationColumns) and columns.kind == "label"
    source = UserFileSource(columns, cast(FileFormat | None, format), doubts_classes)
    if isinstance(columns, ClassificationColumns):
        definition = Definition(NAME, families.load("classification"), source, _METRICS[columns.kind])
    elif isinstance(columns, TaggingColumns | NumberedColumns):
        definition = Definition(NAME, families.load("tagging"), source, ("f1", "precision", "recall", "accuracy"))
    else:
        reading = source.read(files.train, "train")
        some_impossible = any(example.impossible for example in reading.examples)
        family = families.load("squad2" if some_impossible else "squad1")
        defaults = {"finetune.epochs": 2.0}
        definition = Definition(NAME, family, source, ("exact_match", "f1"), defaults=defaults)
    return TaskFiles(definition, paths, predicted)


def recorded_source(kind: str, record: Mapping[str, Any]) -> Source[Any]:
    """The source of the user's own files from its record.

    Args:
        kind: kind of the task's labels.
    """
    return PairsSource.of_record(record) if kind == "vectors" else UserFileSource.of_record(kind, record)


def _pairs(train: Path, files: FilesConfig, settings: Mapping[str, object]) -> Definition[Any]:
    other = next((name for name in ("words", "tags", "question", "context", "answer") if getattr(files, name) is not None), None)
    if other is not None:
        raise ConfigError(f"--{other} is not a column of pairs", hint="--text ANCHOR --pair POSITIVE --label SCORE")
    if files.format == "conll":
        raise ConfigError("pairs are read from tables, not from CoNLL columns", hint="leave out files.format")
    columns = GroupColumns(files.text, files.pair, files.label)
    return pairs_definition(train, files.dev, columns, cast(TableFormat | None, files.format), settings)


def _columns(train: Path, files: FilesConfig) -> Columns:
    format = cast(TableFormat | None, files.format)
    tagging, asking = (files.words, files.tags), (files.question, files.context, files.answer)
    classifying = (files.text, files.pair, files.label)
    named = [name for name, given in (("tags", tagging), ("answers", asking), ("a label", classifying)) if any(given)]
    if len(named) > 1:
        raise ConfigError(
            f"the columns belong to different kinds of task: {' and '.join(named)}", hint="name the columns of one kind of task"
        )
    if has_word_per_line(train, files.format):
        if any(asking) or any(classifying):
            raise ConfigError(
                f"{train} has one word per line, which is for tagging, but the columns are those of {named[0]}",
                hint="--words N --tags N; or for a table --set files.format=csv",
            )
        return numbered_columns(train, words=files.words, tags=files.tags)
    if any(tagging):
        return tagging_columns(train, words=files.words, tags=files.tags, format=format)
    if any(asking):
        return question_columns(
            train, question=files.question, context=files.context, answer=files.answer, start=files.start, format=format
        )
    return classification_columns(
        train,
        text=files.text,
        pair=files.pair,
        label=files.label,
        kind=files.label_kind,
        separator=files.label_separator,
        format=format,
    )
