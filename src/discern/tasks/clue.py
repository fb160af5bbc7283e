"""Chinese classification: ChnSentiCorp, and the tasks of CLUE from JSON lines (with the same keys as FewCLUE).

Reference: Xu et al. 2020, CLUE: A Chinese Language Understanding Evaluation Benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from discern.data.sources.problems import ProblemLog
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.base import Definition, Source
from discern.tasks.classification import Classification
from discern.tasks.examples import ClassificationExample, Reading
from discern.tasks.readers.files import clean_text, existing_splits, numbered_lines, parsed_json

CHNSENTICORP_FILES: dict[str, tuple[str, ...]] = {split: (f"{split}.tsv",) for split in ("train", "dev", "test")}
CLUE_FILES: dict[str, tuple[str, ...]] = {
    "train": ("train.json", "train_few_all.json"),
    "dev": ("dev.json", "dev_few_all.json"),
    "test": ("test_public.json", "test.json"),
}


@dataclass(frozen=True, slots=True)
class ClueTask:
    """A task of CLUE, scored by accuracy: the keys of its texts, and its classes.

    Attributes:
        labels: classes; empty if they are taken from the training file.
    """

    name: str
    text: str
    pair: str | None
    labels: tuple[str, ...] = ()


CLUE: dict[str, ClueTask] = {
    task.name: task
    for task in (
        ClueTask("tnews", "sentence", None),
        ClueTask("iflytek", "sentence", None),
        ClueTask("afqmc", "sentence1", "sentence2", ("0", "1")),
        ClueTask("ocnli", "sentence1", "sentence2", ("contradiction", "entailment", "neutral")),
        ClueTask("cmnli", "sentence1", "sentence2", ("contradiction", "entailment", "neutral")),
    )
}


def read_clue(name: str, path: Path, *, labeled: bool = True) -> Reading[ClassificationExample]:
    """The examples of a task of CLUE. Rows labeled "-" (no majority of the annotators) are left out and counted, as in CLUE.

    The id is that of the file, or the number of the row.

    Args:
        labeled: False: do not read labels.

    Raises:
        ConfigError: the task does not exist.
        DataError: the file is not JSON lines, lacks a key, has an unknown label, an empty text, or labels in some rows only.
    """
    if name not in CLUE:
        raise ConfigError(f"unknown CLUE task '{name}'", hint=did_you_mean(name, CLUE))
    task = CLUE[name]
    problems = ProblemLog()
    examples: list[ClassificationExample] = []
    bare: str | None = None  # the first row without a label
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = parsed_json(line, where)
        if not isinstance(record, dict):
            raise DataError(
                f"{where}: not a JSON object", hint=f"--task {name} reads the files of CLUE: one JSON object per line"
            )
        label = str(record["label"]) if labeled and record.get("label") is not None else None
        if label == "-":
            problems.add("row without an agreed label, left out", where)
            continue
        if label is not None and task.labels and label not in task.labels:
            raise DataError(f"{where}: label '{label}' is not one of {', '.join(task.labels)}", hint=f"give a file of {name}")
        bare = where if label is None and bare is None else bare
        pair = _text(record, task.pair, where, name) if task.pair else None
        identity = str(record.get("id", number - 1))
        examples.append(ClassificationExample(identity, _text(record, task.text, where, name), pair, label))
    if not examples:
        raise DataError(f"{path} has no rows", hint=f"--task {name} reads the files of CLUE: one JSON object per line")
    if bare is not None and any(example.label is not None for example in examples):
        raise DataError(f"{bare}: no 'label', which other rows of the file have", hint="add it, or remove the row")
    if len({example.id for example in examples}) < len(examples):  # some of CLUE's files repeat ids
        examples = [
            ClassificationExample(str(place), example.text, example.pair, example.label) for place, example in enumerate(examples)
        ]
    return Reading(tuple(examples), str(path), problems.summary())


def read_chnsenticorp(path: Path, *, labeled: bool = True) -> Reading[ClassificationExample]:
    """The examples of ChnSentiCorp: `label<TAB>text_a` below a header, perhaps after `qid`, without quoting.

    Ids are row numbers.

    Args:
        labeled: False: do not read labels.

    Raises:
        DataError: the header lacks a column, a line has another number of columns, or a label or text is invalid.
    """
    lines = numbered_lines(path)
    _, header = next(lines, (1, ""))
    columns = header.split("\t")
    hint = (
        "--task chnsenticorp reads label<TAB>text_a with a header; for other columns: --train FILE --text COLUMN --label COLUMN"
    )
    if "text_a" not in columns:
        raise DataError(f"{path}:1: no column 'text_a'; its columns: {', '.join(columns)[:200]}", hint=hint)
    text_place = columns.index("text_a")
    label_place = columns.index("label") if labeled and "label" in columns else None
    examples: list[ClassificationExample] = []
    for number, line in lines:
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise DataError(f"{path}:{number} has {len(fields)} columns, but the header has {len(columns)}", hint=hint)
        label = fields[label_place] if label_place is not None else None
        if label not in ("0", "1", None):
            raise DataError(f"{path}:{number}: label '{label[:20]}' is neither 0 nor 1", hint=hint)
        if not fields[text_place].strip():
            raise DataError(f"{path}:{number}: the text is empty", hint=hint)
        examples.append(ClassificationExample(str(len(examples)), fields[text_place].strip(), None, label))
    if not examples:
        raise DataError(f"{path} has no rows", hint=hint)
    return Reading(tuple(examples), str(path))


def _text(record: dict[str, object], key: str, where: str, task: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: no text '{key}'; its keys: {', '.join(record)[:200]}", hint=f"give a file of {task}")
    if not value.strip():
        raise DataError(f"{where}: '{key}' is empty", hint="remove the row, or give it a text")
    return clean_text(value).strip()


@dataclass(frozen=True)
class ClueSource(Source[ClassificationExample]):
    """The JSON lines of one task of CLUE, or of FewCLUE."""

    task: str

    def text_names(self) -> tuple[tuple[str, ...], ...]:
        task = CLUE[self.task]
        return tuple((name,) for name in (task.text, task.pair) if name is not None)

    def splits(self, folder: Path) -> dict[str, Path]:
        return existing_splits(folder, CLUE_FILES)

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[ClassificationExample]:
        return read_clue(self.task, path, labeled=labeled)


@dataclass(frozen=True)
class ChnSentiCorpSource(Source[ClassificationExample]):
    """The TSV files of ChnSentiCorp."""

    def text_names(self) -> tuple[tuple[str, ...], ...]:
        return (("text_a",),)

    def splits(self, folder: Path) -> dict[str, Path]:
        return existing_splits(folder, CHNSENTICORP_FILES)

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[ClassificationExample]:
        return read_chnsenticorp(path, labeled=labeled)


# A review has 100 characters on average and up to some thousands; BERT-wwm and others truncate it to 256.
CHNSENTICORP: Definition[ClassificationExample] = Definition(
    "chnsenticorp",
    Classification,
    ChnSentiCorpSource(),
    ("accuracy",),
    ("0", "1"),
    {"task.sequence_length": 256},
    ("test",),
)


def _definition(name: str) -> Definition[ClassificationExample]:
    """A task of CLUE. The test files of FewCLUE have labels; they are evaluated only if there is no dev file."""
    return Definition(name, Classification, ClueSource(name), ("accuracy",), CLUE[name].labels)


TNEWS, IFLYTEK, AFQMC, OCNLI, CMNLI = (_definition(name) for name in ("tnews", "iflytek", "afqmc", "ocnli", "cmnli"))
