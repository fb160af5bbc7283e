"""A task from a labelled file of one's own: the family that its columns ask for, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from discern.config.base import Section
from discern.config.layers import Settings, parse_overrides, read_file
from discern.config.resolve import resolve
from discern.errors import ConfigError
from discern.tasks import families
from discern.tasks.base import Definition, Source
from discern.tasks.examples import Reading
from discern.tasks.readers.own_file import (
    ClassificationColumns,
    QuestionColumns,
    TaggingColumns,
    classification_columns,
    question_columns,
    read_classification,
    read_questions,
    read_tagging,
    tagging_columns,
)
from discern.tasks.readers.table import TableFormat
from discern.workflows.finetune_settings import FilesConfig
from discern.workflows.task_files import TaskFiles

NAME = "own"
_METRICS = {
    "label": ("accuracy", "macro_f1"),
    "labels": ("micro_f1", "macro_f1", "exact_match"),
    "number": ("spearman", "pearson", "mean_absolute_error"),
}
Columns = ClassificationColumns | TaggingColumns | QuestionColumns


class _Files(Section):
    files: FilesConfig = FilesConfig()


@dataclass(frozen=True)
class OwnSource(Source[Any]):
    """Tables of which one's own settings say what is what.

    Attributes:
        columns: as the training file has them.
        format: where content and name do not tell.
    """

    columns: Columns
    format: TableFormat | None = None

    @classmethod
    def of_record(cls, kind: str, record: Mapping[str, Any]) -> OwnSource:
        """From what `record` gave.

        Args:
            kind: of the labels.
        """
        columns = {"tags": TaggingColumns, "spans": QuestionColumns}.get(kind, ClassificationColumns)
        return cls(columns(**record["columns"]), record["format"])

    def record(self) -> dict[str, Any]:
        return {"columns": asdict(self.columns), "format": self.format}

    def splits(self, folder: Path) -> dict[str, Path]:
        """None: the files are named one by one."""
        return {}

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[Any]:
        if isinstance(self.columns, ClassificationColumns):
            return read_classification(path, self.columns, format=self.format, labelled=labelled)
        if isinstance(self.columns, TaggingColumns):
            return read_tagging(path, self.columns, format=self.format, labelled=labelled)
        return read_questions(path, self.columns, format=self.format, labelled=labelled, keep_unfound=split != "train")


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
    columns = _columns(files.train, files)
    source = OwnSource(columns, cast(TableFormat | None, files.format))
    if isinstance(columns, ClassificationColumns):
        definition = Definition(NAME, families.load("classification"), source, _METRICS[columns.kind])
    elif isinstance(columns, TaggingColumns):
        definition = Definition(NAME, families.load("tagging"), source, ("f1", "precision", "recall", "accuracy"))
    else:
        reading = source.read(files.train, "train")
        some_impossible = any(example.impossible for example in reading.examples)
        family = families.load("squad2" if some_impossible else "squad1")
        defaults = {"finetune.epochs": 2.0}
        definition = Definition(NAME, family, source, ("exact_match", "f1"), defaults=defaults)
    return TaskFiles(definition, paths)


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
