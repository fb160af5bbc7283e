"""Chinese classification: ChnSentiCorp, and tasks of CLUE from their JSON lines (the same keys as in FewCLUE).

Reference: Xu et al. 2020, CLUE: A Chinese Language Understanding Evaluation Benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from discern.data.problems import ProblemLog
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.examples import ClassificationExample, Reading
from discern.tasks.readers.files import clean_text, numbered_lines, parsed_json

CHNSENTICORP_FILES: dict[str, tuple[str, ...]] = {split: (f"{split}.tsv",) for split in ("train", "dev", "test")}
CLUE_FILES: dict[str, tuple[str, ...]] = {
    "train": ("train.json", "train_few_all.json"),
    "dev": ("dev.json", "dev_few_all.json"),
    "test": ("test_public.json", "test.json"),
}


@dataclass(frozen=True, slots=True)
class ClueTask:
    """A task of CLUE: the keys of its texts, and its classes where they are few enough to list.

    Attributes:
        labels: empty where they are taken from the training file. CLUE scores all of them by accuracy.
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


def read_clue(name: str, path: Path, *, labelled: bool = True) -> Reading[ClassificationExample]:
    """The examples of a task of CLUE. A row labelled "-" (no majority among the annotators) is left out and counted, as by CLUE.

    The id is the one of the file, or the number of the row.

    Args:
        labelled: False leaves labels out, whatever they are.

    Raises:
        ConfigError: no such task.
        DataError: not JSON lines, a key missing, an unknown label, an empty text.
    """
    if name not in CLUE:
        raise ConfigError(f"unknown CLUE task '{name}'", hint=did_you_mean(name, CLUE))
    task = CLUE[name]
    problems = ProblemLog()
    examples: list[ClassificationExample] = []
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = parsed_json(line, where)
        if not isinstance(record, dict):
            raise DataError(f"{where}: no JSON object", hint=f"--task {name} takes CLUE's files: a JSON object a line")
        label = str(record["label"]) if labelled and record.get("label") is not None else None
        if label == "-":
            problems.add("row without an agreed label, left out", where)
            continue
        if label is not None and task.labels and label not in task.labels:
            raise DataError(f"{where}: label '{label}' is none of {', '.join(task.labels)}", hint=f"is it a file of {name}?")
        pair = _text(record, task.pair, where, name) if task.pair else None
        identity = str(record.get("id", number - 1))
        examples.append(ClassificationExample(identity, _text(record, task.text, where, name), pair, label))
    if not examples:
        raise DataError(f"{path} holds no row", hint=f"--task {name} takes CLUE's files: a JSON object a line")
    if len({example.id for example in examples}) < len(examples):  # some of CLUE's files repeat ids
        examples = [
            ClassificationExample(str(place), example.text, example.pair, example.label) for place, example in enumerate(examples)
        ]
    return Reading(tuple(examples), str(path), problems.summary())


def read_chnsenticorp(path: Path, *, labelled: bool = True) -> Reading[ClassificationExample]:
    """The examples of ChnSentiCorp: `label<TAB>text_a` (or `qid` before it) below a header, quoting off. Ids number the rows.

    Args:
        labelled: as of `read_clue`.

    Raises:
        DataError: another header, a line with other columns, an unknown label or an empty text.
    """
    lines = numbered_lines(path)
    _, header = next(lines, (1, ""))
    columns = header.split("\t")
    hint = "--task chnsenticorp takes label<TAB>text_a below a header; other columns: --train FILE --text COLUMN --label COLUMN"
    if "text_a" not in columns:
        raise DataError(f"{path}:1: no column 'text_a'; its columns: {', '.join(columns)[:200]}", hint=hint)
    text_place = columns.index("text_a")
    label_place = columns.index("label") if labelled and "label" in columns else None
    examples: list[ClassificationExample] = []
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise DataError(f"{path}:{number} has {len(fields)} columns, the header {len(columns)}", hint=hint)
        label = fields[label_place] if label_place is not None else None
        if label not in ("0", "1", None):
            raise DataError(f"{path}:{number}: label '{label[:20]}' is neither 0 nor 1", hint=hint)
        if not fields[text_place].strip():
            raise DataError(f"{path}:{number}: the text is empty", hint=hint)
        examples.append(ClassificationExample(str(len(examples)), fields[text_place].strip(), None, label))
    if not examples:
        raise DataError(f"{path} holds no row", hint=hint)
    return Reading(tuple(examples), str(path))


def _text(record: dict[str, object], key: str, where: str, task: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: no text '{key}'; its keys: {', '.join(record)[:200]}", hint=f"is it a file of {task}?")
    if not value.strip():
        raise DataError(f"{where}: '{key}' is empty", hint="take the row out, or give it a text")
    return clean_text(value).strip()
