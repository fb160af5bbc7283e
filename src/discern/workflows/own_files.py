"""A task from a labelled file of one's own: the family that its columns ask for, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from discern.config.base import Section
from discern.config.layers import Settings, parse_overrides, read_file
from discern.config.resolve import resolve
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks import families
from discern.tasks.base import Definition, Source, TaskConfig
from discern.tasks.conll import ConllSource
from discern.tasks.examples import ClassificationExample, Reading, label_counts
from discern.tasks.readers.own_columns import (
    ClassificationColumns,
    NumberedColumns,
    QuestionColumns,
    TaggingColumns,
    classification_columns,
    numbered_columns,
    question_columns,
    tagging_columns,
)
from discern.tasks.readers.own_file import read_classification, read_questions, read_tagging
from discern.tasks.readers.table import TableFormat, number_in
from discern.tasks.readers.tagging import COLUMN_ENDINGS, ending_of
from discern.tasks.tagging import TaggingConfig
from discern.workflows.finetune_settings import FilesConfig
from discern.workflows.task_files import TaskFiles

NAME = "own"
_METRICS = {
    "label": ("accuracy", "macro_f1"),
    "labels": ("micro_f1", "macro_f1", "exact_match"),
    "number": ("spearman", "pearson", "mean_absolute_error"),
}
# So many labels or more, and more than half as many as examples, are no classes.
_SUSPECT = 20
Columns = ClassificationColumns | TaggingColumns | NumberedColumns | QuestionColumns
FileFormat = TableFormat | Literal["conll"]
_TABLES = (".csv", ".tsv", ".tab", ".json", ".jsonl", ".ndjson", ".parquet")
_FORMATS = (*get_args(TableFormat), "conll")


class _Files(Section):
    files: FilesConfig = FilesConfig()


@dataclass(frozen=True)
class OwnSource(Source[Any]):
    """Files of which one's own settings say what is what: tables, or sentences with a word a line.

    Attributes:
        columns: as the training file has them.
        format: where content and name do not tell.
        doubts_classes: the label was taken for a class by how it looks, so a training file with hardly two examples of one is
            refused.
    """

    columns: Columns
    format: FileFormat | None = None
    doubts_classes: bool = False

    @classmethod
    def of_record(cls, kind: str, record: Mapping[str, Any]) -> OwnSource:
        """From what `record` gave.

        Args:
            kind: of the labels.
        """
        of_tags = NumberedColumns if record["format"] == "conll" else TaggingColumns
        columns: Any = {"tags": of_tags, "spans": QuestionColumns}.get(kind, ClassificationColumns)
        return cls(columns(**record["columns"]), record["format"])

    def configured(self, config: TaskConfig) -> OwnSource:
        """The same: columns are named with the files.

        Raises:
            ConfigError: the settings name those of a named task's files.
        """
        usual = TaggingConfig()
        for key, option in (("word_column", "--words"), ("tag_column", "--tags")):
            given = getattr(config, key, None)
            if given not in (None, getattr(usual, key)):
                raise ConfigError(
                    f"task.{key} is {given}, but that is for the files of named tasks", hint=f"{option} {given} for your own"
                )
        return self

    def record(self) -> dict[str, Any]:
        return {"columns": asdict(self.columns), "format": self.format}

    def splits(self, folder: Path) -> dict[str, Path]:
        """None: the files are named one by one."""
        return {}

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[Any]:
        if isinstance(self.columns, NumberedColumns):
            return _read_word_a_line(path, self.columns, split, labelled=labelled)
        if isinstance(self.columns, TaggingColumns) and has_word_a_line(path, self.format):
            return _read_word_a_line(path, numbered_columns(path), split, labelled=labelled)
        format = cast(TableFormat | None, self.format)
        if isinstance(self.columns, ClassificationColumns):
            reading = read_classification(path, self.columns, format=format, labelled=labelled)
            if self.doubts_classes and split == "train":
                _refuse_a_class_a_row(reading)
            return reading
        if isinstance(self.columns, TaggingColumns):
            return read_tagging(path, self.columns, format=format, labelled=labelled)
        return read_questions(path, self.columns, format=format, labelled=labelled, keep_unfound=split != "train")


def _refuse_a_class_a_row(reading: Reading[ClassificationExample]) -> None:
    """Numbers without a fraction look like classes; where nearly each stands once, they are none.

    Raises:
        DataError: more classes than half the examples, and `_SUSPECT` or more.
    """
    classes, examples = label_counts(reading.examples), len(reading.examples)
    if len(classes) < _SUSPECT or 2 * len(classes) <= examples:
        return
    numbers = all(number_in(name) is not None for name in classes)
    raise DataError(
        f"{reading.source}: {len(classes):,} different labels in {examples:,} examples, as '{next(iter(classes))}': "
        "too many to be classes",
        hint=("--set files.label_kind=number for a score" if numbers else "choose another column: --label COLUMN")
        + "; if they are classes: --set files.label_kind=label",
    )


def has_word_a_line(path: Path, format: str | None) -> bool:
    """Whether a file of one's own is said to be, or by its name is, one of columns with a word a line."""
    return format == "conll" or (format is None and ending_of(path) in COLUMN_ENDINGS)


def _read_word_a_line(path: Path, columns: NumberedColumns, split: str, *, labelled: bool) -> Reading[Any]:
    if ending_of(path) in _TABLES:
        raise ConfigError(
            f"{path} is a table by its name, but the training file has a word a line",
            hint="give all files in one format; `discern predict` takes any",
        )
    reading = ConllSource(columns.words, columns.tags).read(path, split, labelled=labelled)
    return replace(reading, notes=(f"columns: words = {columns.words}, tags = {columns.tags}", *reading.notes))


def own_definition(config: Path | None, overrides: Sequence[str]) -> TaskFiles:
    """The task that the settings of `[files]` describe, with its files.

    Raises:
        ConfigError: no training file, or columns of two families.
        DataError: the training file cannot be read.
    """
    files = _files_of(config, overrides)
    if files.train is None:
        raise ConfigError(
            "nothing to train on", hint="name a task (--task sst2 --data DIR) or a file (--train FILE --label COLUMN)"
        )
    paths = {
        split: path for split, path in (("train", files.train), ("dev", files.dev), ("test", files.test)) if path is not None
    }
    if files.format is not None and files.format not in _FORMATS:
        raise ConfigError(f"unknown format of files '{files.format}'", hint=did_you_mean(files.format, _FORMATS))
    columns = _columns(files.train, files)
    format = "conll" if isinstance(columns, NumberedColumns) else files.format
    doubts_classes = files.label_kind is None and isinstance(columns, ClassificationColumns) and columns.kind == "label"
    source = OwnSource(columns, cast(FileFormat | None, format), doubts_classes)
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
    return TaskFiles(definition, paths, predicted=("test",) if files.test is not None else ())


def _files_of(config: Path | None, overrides: Sequence[str]) -> FilesConfig:
    """The section `[files]` alone: the task must be known before the other sections can be."""
    settings: Settings = (read_file(config) if config is not None else {}) | parse_overrides(overrides)
    return resolve(_Files, {key: setting for key, setting in settings.items() if key.startswith("files.")}).config.files


def _columns(train: Path, files: FilesConfig) -> Columns:
    format = cast(TableFormat | None, files.format)
    tagging, asking = (files.words, files.tags), (files.question, files.context, files.answer)
    classifying = (files.text, files.pair, files.label)
    named = [name for name, given in (("tags", tagging), ("answers", asking), ("a label", classifying)) if any(given)]
    if len(named) > 1:
        raise ConfigError(f"the columns given are of {' and of '.join(named)}", hint="name those of one kind of task")
    if has_word_a_line(train, files.format):
        if any(asking) or any(classifying):
            raise ConfigError(
                f"{train} is read with a word a line, which is for tagging, and the columns given are of {named[0]}",
                hint="--words N --tags N; or, where it is a table, --set files.format=csv",
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
