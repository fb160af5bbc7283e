"""The nine tasks of GLUE and its diagnostic set, from the official TSV files.

The files are read without quoting: a quotation mark is text. Columns are found by the names in the header, whose order and
number differ between splits (MNLI has 12 columns in train, 16 in dev and 10 in test); only CoLA has no header in train and
dev. A line whose number of columns differs from the header (QQP's train file has some) is left out and counted.
Reference: Wang et al. 2019, GLUE: A Multi-Task Benchmark and Analysis Platform, and the files of gluebenchmark.com.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from discern.data.sources.problems import ProblemLog
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.base import Definition, Source
from discern.tasks.classification import Classification
from discern.tasks.examples import ClassificationExample, Label, Reading
from discern.tasks.readers.files import existing_splits, numbered_lines, split_file

# With a larger fraction of malformed lines, the file is not a file of the task.
MAX_MALFORMED = 0.01
_DIAGNOSTIC = (
    "diagnostic.tsv",
    "AX.tsv",
    "diagnostic-full.tsv",
    "../diagnostic/diagnostic.tsv",
    "../AX/AX.tsv",
    "../AX/diagnostic.tsv",
)


@dataclass(frozen=True, slots=True)
class GlueTask:
    """One task of GLUE: its files, their columns, and its metrics.

    Attributes:
        folder: official name of the folder, for messages.
        files: file names of each split; the first that exists is used. Splits: train, dev, test, and for MNLI also
            dev_mismatched, test_mismatched and diagnostic.
        columns: alternative column names of the text, and of the second text.
        label: alternative names of the label column.
        labels: classes in the order of the original code; empty for a score.
        metrics: metrics that GLUE reports; the first is the headline metric of the ELECTRA paper.
        headerless: columns of files without a header.
    """

    name: str
    folder: str
    files: dict[str, tuple[str, ...]]
    columns: tuple[tuple[str, ...], ...]
    label: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    headerless: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score."""
        return not self.labels


def _files(**more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",), **more}


_SENTENCES = (("sentence1",), ("sentence2",))
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI_FILES = {
    "train": ("train.tsv",),
    "dev": ("dev_matched.tsv", "dev.tsv"),
    "dev_mismatched": ("dev_mismatched.tsv",),
    "test": ("test_matched.tsv", "test.tsv"),
    "test_mismatched": ("test_mismatched.tsv",),
    "diagnostic": _DIAGNOSTIC,
}

GLUE: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            "cola",
            "CoLA",
            _files(),
            (("sentence",),),
            ("label",),
            ("0", "1"),
            ("matthews", "accuracy"),
            ("source", "label", "mark", "sentence"),
        ),
        GlueTask("sst2", "SST-2", _files(), (("sentence",),), ("label",), ("0", "1"), ("accuracy",)),
        GlueTask(
            "mrpc",
            "MRPC",
            _files(test=("test.tsv", "msr_paraphrase_test.txt")),
            (("#1 String",), ("#2 String",)),
            ("Quality",),
            ("0", "1"),
            ("accuracy", "f1"),
        ),
        GlueTask("stsb", "STS-B", _files(), _SENTENCES, ("score",), (), ("spearman", "pearson")),
        GlueTask("qqp", "QQP", _files(), (("question1",), ("question2",)), ("is_duplicate",), ("0", "1"), ("accuracy", "f1")),
        GlueTask(
            "mnli",
            "MNLI",
            _MNLI_FILES,
            (("sentence1", "Premise"), ("sentence2", "Hypothesis")),
            ("gold_label", "Label"),
            ("contradiction", "entailment", "neutral"),
            ("accuracy",),
        ),
        GlueTask("qnli", "QNLI", _files(), (("question",), ("sentence",)), ("label",), _ENTAILMENT, ("accuracy",)),
        GlueTask("rte", "RTE", _files(), _SENTENCES, ("label",), _ENTAILMENT, ("accuracy",)),
        GlueTask("wnli", "WNLI", _files(), _SENTENCES, ("label",), ("0", "1"), ("accuracy",)),
    )
}


def glue_splits(name: str, folder: Path) -> dict[str, Path]:
    """The file of each split of a task in a folder.

    Raises:
        ConfigError: the task or the folder does not exist.
    """
    return existing_splits(folder, glue_task(name).files)


def glue_task(name: str) -> GlueTask:
    """A task by its name.

    Raises:
        ConfigError: the task does not exist; the hint names the most similar one.
    """
    if name not in GLUE:
        raise ConfigError(f"unknown GLUE task '{name}'", hint=did_you_mean(name, GLUE))
    return GLUE[name]


def read_glue(name: str, folder: Path, split: str) -> Reading[ClassificationExample]:
    """The examples of a split.

    The id of an example is the number of its line below the header, from 0, which is GLUE's `index` in the test files.

    Raises:
        ConfigError: the task, the split or the folder does not exist.
        DataError: the file is missing, lacks a column, has an invalid score, or more than 1% malformed lines.
    """
    task = glue_task(name)
    if split not in task.files:
        raise ConfigError(f"{name} has no split '{split}'", hint=did_you_mean(split, task.files))
    return read_glue_file(name, split_file(folder, task.files[split], f"{name} {split}"))


def read_glue_file(name: str, path: Path, *, labeled: bool = True) -> Reading[ClassificationExample]:
    """The examples of a file in the format of a task, see `read_glue`.

    Args:
        labeled: False: do not read labels. A malformed line is then an error, since every line is to be predicted.
    """
    task = glue_task(name)
    problems = ProblemLog()
    lines = numbered_lines(path)
    columns, first = _columns(task, path, lines, labeled=labeled)
    examples: list[ClassificationExample] = []
    count = malformed = 0
    for number, line in _with_first(first, lines):
        where = f"{path}:{number}"
        fields = line.split("\t")
        identity, count = str(count), count + 1
        reason = f"{len(fields)} columns instead of {columns.count}" if len(fields) != columns.count else None
        texts = [] if reason else [fields[place].strip() for place in columns.texts]
        label: Label = None
        if not reason and columns.label is not None:
            label, reason = _label(task, fields[columns.label].strip(), where)
        if reason and not labeled and line.strip():
            raise DataError(f"{where}: {reason}", hint="correct the line: every row is to be predicted")
        if reason:
            malformed += 1
            problems.add("malformed line, left out", f"{where} ({reason})")
            continue
        if not all(texts):
            problems.add("empty text, kept", where)
        examples.append(ClassificationExample(identity, texts[0], texts[1] if len(texts) > 1 else None, label))
    if not examples or malformed > max(10, MAX_MALFORMED * count):
        shown = "; ".join(str(problem) for problem in problems.summary()) or "no line below the header"
        raise DataError(
            f"{path} is not a file of {name}: {shown}", hint=f"--task {name} takes the official files of GLUE's {task.folder}"
        )
    notes = () if columns.label is not None or not labeled else (f"{path.name} has no labels",)
    return Reading(tuple(examples), str(path), problems.summary(), notes)


@dataclass(frozen=True, slots=True)
class _Columns:
    count: int
    texts: tuple[int, ...]
    label: int | None


def _columns(
    task: GlueTask, path: Path, lines: Iterator[tuple[int, str]], *, labeled: bool
) -> tuple[_Columns, tuple[int, str] | None]:
    """The positions of the columns, and the first line if it is not a header."""
    number, line = next(lines, (1, ""))
    fields = [field.strip() for field in line.split("\t")]
    first = None
    if task.headerless and len(fields) == len(task.headerless) and task.headerless[-1] not in fields:
        first = (number, line)
        fields = list(task.headerless)
    places: list[int] = []
    for names in task.columns:
        held = [fields.index(name) for name in names if name in fields]
        if not held:
            raise DataError(
                f"{path}:{number}: no column '{names[0]}'; its columns: {', '.join(fields)[:300] or 'none'}",
                hint=f"{did_you_mean(names[0], fields)} --task {task.name} takes the official files of GLUE's {task.folder}",
            )
        places.append(held[0])
    label = next((fields.index(name) for name in task.label if name in fields), None) if labeled else None
    return _Columns(len(fields), tuple(places), label), first


def _with_first(first: tuple[int, str] | None, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    if first is not None:
        yield first
    yield from lines


def _label(task: GlueTask, text: str, where: str) -> tuple[Label, str | None]:
    """The label, or the reason why the line is malformed."""
    if not task.is_regression:
        return (text, None) if text in task.labels else (None, f"label {text[:20]!r} is not one of {', '.join(task.labels)}")
    try:
        score = float(text)
    except ValueError:
        return None, f"score {text[:20]!r} is not a number"
    if not 0 <= score <= 5:  # false for NaN too
        raise DataError(
            f"{where}: score {text} is not between 0 and 5", hint=f"--task {task.name} takes the official files of {task.folder}"
        )
    return score, None


# ELECTRA paper, appendix B: three epochs, ten for the two smallest tasks.
_EPOCHS = {"rte": 10.0, "stsb": 10.0}


@dataclass(frozen=True)
class GlueSource(Source[ClassificationExample]):
    """The official TSV files of one task."""

    task: str

    def text_names(self) -> tuple[tuple[str, ...], ...]:
        return GLUE[self.task].columns

    def splits(self, folder: Path) -> dict[str, Path]:
        return glue_splits(self.task, folder)

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[ClassificationExample]:
        return read_glue_file(self.task, path, labeled=labeled)


def _definition(name: str) -> Definition[ClassificationExample]:
    task = GLUE[name]
    # The scores of STS-B range from 0 to 5; the network predicts 0 to 1, as in the released code.
    labels = task.labels or ("0", "5")
    defaults: dict[str, object] = {"finetune.epochs": _EPOCHS[name]} if name in _EPOCHS else {}
    further = ("dev_mismatched",) if "dev_mismatched" in task.files else ()
    return Definition(name, Classification, GlueSource(name), task.metrics, labels, defaults, further)


COLA, SST2, MRPC, STSB, QQP, MNLI, QNLI, RTE, WNLI = map(_definition, GLUE)
