"""SQuAD 1.1, SQuAD 2.0, and CMRC 2018 in both of its formats: files, families of tasks and metrics.

In CMRC 2018 the start of an answer is often wrong, and some answers are paraphrases. So the text of an answer is searched for
in its context, and an answer that does not occur is left out and counted.
Reference: Rajpurkar et al. 2016, 2018; Cui et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from discern.errors import DataError, did_you_mean
from discern.tasks.base import Definition, Prediction, Source, Task
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.metrics import Scores
from discern.tasks.metrics.answers import (
    SquadPrediction,
    cmrc_scores,
    common_piece_f1,
    squad1_scores,
    squad2_scores,
    word_f1_or_nothing,
)
from discern.tasks.questions import Questions
from discern.tasks.readers.answers import QuestionCollector
from discern.tasks.readers.files import clean_text, existing_splits, json_file
from discern.wording import counted

SQUAD_FILES: dict[str, tuple[str, ...]] = {
    "train": ("train.json", "train-v1.1.json", "train-v2.0.json", "cmrc2018_train.json", "cmrc2018_trial.json"),
    "dev": ("dev.json", "dev-v1.1.json", "dev-v2.0.json", "cmrc2018_dev.json"),
    "test": ("test.json", "test-v1.1.json", "test-v2.0.json", "cmrc2018_test.json"),
}
_SHAPE = 'expected {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'


def read_squad(path: Path, *, keep_unfound: bool = False, labeled: bool = True) -> Reading[QuestionExample]:
    """The questions of a file in SQuAD's format.

    `impossible` is taken from the file if it is given. Otherwise, it is False for a question with `answers`, and None without.

    Args:
        keep_unfound: keep questions without an answer that occurs in the context, for evaluation, where the official metric
            counts them; otherwise they are left out and counted.
        labeled: False: do not read answers.

    Raises:
        DataError: the file is not JSON or not in this format, a context is empty, or two questions have the same id.
    """
    collector = QuestionCollector(keep_unfound)
    seen: set[str] = set()
    for context, question, where in _questions(json_file(path), str(path)):
        identity = str(_field(question, ("id", "query_id"), where))
        where = f"{where} question {identity}"
        if identity in seen:
            raise DataError(
                f"{where}: the id occurs twice", hint="give every question a unique id, by which predictions are matched"
            )
        seen.add(identity)
        text = _field(question, ("question", "query_text"), where)
        if isinstance(text, str) and not text.strip():
            # CMRC's trial file has one.
            collector.problems.add("question without text, " + ("kept" if keep_unfound else "left out"), where)
            if not keep_unfound:
                continue
        else:
            text = _text(question, ("question", "query_text"), where)
        if not labeled:
            question = {key: value for key, value in question.items() if key not in ("answers", "is_impossible")}
        answers = question.get("answers")
        marked = question.get("is_impossible")
        if marked not in (None, True, False):
            raise DataError(f"{where}: 'is_impossible' is {marked!r:.40}, expected true or false", hint=_SHAPE)
        impossible = bool(marked) if marked is not None else None if answers is None else False
        if impossible and answers:
            raise DataError(
                f"{where}: 'is_impossible' is true, but there are answers", hint="remove the answers, or set it to false"
            )
        example = QuestionExample(identity, text, context, impossible=impossible)
        collector.add(example, _answers(answers or [], where), str(path))
    if not collector.examples:
        raise DataError(f"{path} has no usable questions", hint=_SHAPE)
    return Reading(tuple(collector.examples), str(path), collector.problems.summary(), _notes(collector.examples))


def _notes(examples: list[QuestionExample]) -> tuple[str, ...]:
    impossible = sum(example.impossible is True for example in examples)
    unknown = sum(example.impossible is None for example in examples)
    notes = [f"{impossible:,} of {len(examples):,} questions without an answer in their context"] if impossible else []
    return tuple(notes + ([f"{counted(unknown, 'question')} whose answers are not given"] if unknown else []))


def _questions(data: Any, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Context, question and place of each question."""
    articles = data.get("data") if isinstance(data, dict) else data
    if not isinstance(articles, list) or not all(isinstance(article, dict) for article in articles):
        held = f"its keys: {', '.join(list(data)[:10])}" if isinstance(data, dict) else f"it is a JSON {type(data).__name__}"
        near = f"; {did_you_mean('data', data)}" if isinstance(data, dict) else ""
        raise DataError(f"{name} is not in SQuAD's format: {held}", hint=f"{_SHAPE}{near}")
    for number, article in enumerate(articles):
        paragraphs = article.get("paragraphs", [article])
        if not isinstance(paragraphs, list):
            raise DataError(f"{name}: article {number}: 'paragraphs' is not a list", hint=_SHAPE)
        for place, paragraph in enumerate(paragraphs):
            where = f"{name}: article {number} paragraph {place}"
            context = _text(paragraph, ("context", "context_text"), where)
            questions = _field(paragraph, ("qas",), where)
            if not isinstance(questions, list) or not all(isinstance(question, dict) for question in questions):
                raise DataError(f"{where}: 'qas' is not a list of objects", hint=_SHAPE)
            for question in questions:
                yield context, question, where


def _answers(answers: Any, where: str) -> Iterator[tuple[str, int | None]]:
    """Text and expected start of each answer; CMRC's own format has texts only, and numbers for numeric texts."""
    if not isinstance(answers, list):
        raise DataError(f"{where}: 'answers' is not a list", hint=_SHAPE)
    for answer in answers:
        text = _field(answer, ("text",), where) if isinstance(answer, dict) else answer
        start = answer.get("answer_start") if isinstance(answer, dict) else None
        if isinstance(text, float) and text.is_integer():
            text = int(text)
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise DataError(f"{where}: an answer is not a text: {text!r:.60}", hint=_SHAPE)
        if isinstance(start, float):
            start = int(start) if start.is_integer() else None
        yield clean_text(str(text)), start if isinstance(start, int) else None


def _field(record: Any, names: tuple[str, ...], where: str) -> Any:
    if isinstance(record, dict):
        for name in names:
            if name in record:
                return record[name]
    held = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise DataError(f"{where}: no '{names[0]}'; it has: {held[:200] or 'nothing'}", hint=_SHAPE)


def _text(record: Any, names: tuple[str, ...], where: str) -> str:
    value = _field(record, names, where)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: '{names[0]}' is empty or not a text", hint="a question and its context need at least one character"
        )
    return clean_text(value)


@final
class Squad1Questions(Questions):
    """Every question has an answer; scored as SQuAD 1.1."""

    family: ClassVar[str] = "squad1"

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        return squad1_scores(examples, answers_by_id(predictions))


@final
class Squad2Questions(Questions):
    """Some questions have no answer; scored as SQuAD 2.0, with the threshold of the settings and with the best one."""

    family: ClassVar[str] = "squad2"
    has_impossible: ClassVar[bool] = True

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        by_id = {each["id"]: SquadPrediction(each["best_answer"], each["no_answer"]) for each in predictions}
        return squad2_scores(examples, by_id, self.settings.threshold)

    def overlap(self, answer: str, gold: str) -> float:
        return word_f1_or_nothing(answer, gold)


@final
class CmrcQuestions(Questions):
    """Every question has an answer; scored as CMRC 2018, by characters."""

    family: ClassVar[str] = "cmrc"

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        return cmrc_scores(examples, answers_by_id(predictions))

    def overlap(self, answer: str, gold: str) -> float:
        return common_piece_f1(answer, gold)


@dataclass(frozen=True)
class QuestionSource(Source[QuestionExample]):
    """The official files of one data set.

    Attributes:
        reader: reader of the format.
        files: possible file names of each split; the first that exists is used.
    """

    reader: Callable[..., Reading[QuestionExample]]
    files: Mapping[str, tuple[str, ...]]

    def splits(self, folder: Path) -> dict[str, Path]:
        return existing_splits(folder, self.files)

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[QuestionExample]:
        return self.reader(path, keep_unfound=split != "train", labeled=labeled)


def answers_by_id(predictions: Sequence[Prediction]) -> dict[str, str]:
    return {prediction["id"]: prediction["answer"] for prediction in predictions}


# The released code applies these to tasks whose name contains "qa" or "squad", and so misses naturalqs.
DEFAULTS: dict[str, object] = {"task.sequence_length": 512, "finetune.epochs": 2.0}


def _squad(
    name: str, family: type[Task[QuestionExample]], files: Mapping[str, tuple[str, ...]], **further: object
) -> Definition[QuestionExample]:
    defaults = DEFAULTS | {f"task.{key}": value for key, value in further.items()}
    return Definition(name, family, QuestionSource(read_squad, files), ("exact_match", "f1"), defaults=defaults)


def _squad_files(version: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{split}.json", f"{split}-{version}.json") for split in ("train", "dev", "test")}


# The trial file of 1,002 questions is published with the others; it is used if there is no other training file.
_CMRC_TRAIN = ("cmrc2018_train.json", "train.json", "cmrc2018_trial.json")
_CMRC_FILES = {"train": _CMRC_TRAIN, **{split: (f"cmrc2018_{split}.json", f"{split}.json") for split in ("dev", "test")}}

SQUAD1 = _squad("squad1", Squad1Questions, _squad_files("v1.1"))
SQUAD2 = _squad("squad2", Squad2Questions, _squad_files("v2.0"))
# A token is a character: 30 of them hold 94.5% of the dev set's answers, 50 hold 99%.
CMRC2018 = _squad("cmrc2018", CmrcQuestions, _CMRC_FILES, max_answer_length=50)
