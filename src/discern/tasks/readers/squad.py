"""SQuAD 1.1 and 2.0 files, and CMRC 2018 in both of its forms.

In CMRC 2018 the start of an answer is often wrong and some answers are paraphrases: so the text is searched for, and an
answer that its context does not hold is counted and left out.
Reference: Rajpurkar et al. 2016, 2018; Cui et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from discern.errors import DataError, did_you_mean
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.readers.answers import QuestionCollector
from discern.tasks.readers.files import clean_text, json_file

SQUAD_FILES: dict[str, tuple[str, ...]] = {
    "train": ("train.json", "train-v1.1.json", "train-v2.0.json", "cmrc2018_train.json", "cmrc2018_trial.json"),
    "dev": ("dev.json", "dev-v1.1.json", "dev-v2.0.json", "cmrc2018_dev.json"),
    "test": ("test.json", "test-v1.1.json", "test-v2.0.json", "cmrc2018_test.json"),
}
_SHAPE = 'expected {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'


def read_squad(path: Path, *, keep_unfound: bool = False, labelled: bool = True) -> Reading[QuestionExample]:
    """The questions of a file in SQuAD's format.

    `impossible` is what the file says, False where it says nothing but has answers, None where a question has no `answers`.

    Args:
        keep_unfound: keep a question none of whose answers occurs in its context, for evaluation, where the official metric
            counts it; otherwise it is left out and counted.
        labelled: False leaves answers out, whatever they are.

    Raises:
        DataError: not JSON, not this format, an empty context, or two questions of one id.
    """
    collector = QuestionCollector(keep_unfound)
    seen: set[str] = set()
    for context, question, where in _questions(json_file(path), str(path)):
        identity = str(_field(question, ("id", "query_id"), where))
        where = f"{where} question {identity}"
        if identity in seen:
            raise DataError(f"{where}: the id occurs twice", hint="give every question its own id: predictions are matched by it")
        seen.add(identity)
        text = _field(question, ("question", "query_text"), where)
        if isinstance(text, str) and not text.strip():
            # CMRC's trial file has one.
            collector.problems.add("question without text, " + ("kept" if keep_unfound else "left out"), where)
            if not keep_unfound:
                continue
        else:
            text = _text(question, ("question", "query_text"), where)
        if not labelled:
            question = {key: value for key, value in question.items() if key not in ("answers", "is_impossible")}
        answers = question.get("answers")
        impossible = bool(question["is_impossible"]) if "is_impossible" in question else None if answers is None else False
        example = QuestionExample(identity, text, context, impossible=impossible)
        collector.add(example, _answers(answers or [], where), str(path))
    if not collector.examples:
        raise DataError(f"{path} holds no question that can be used", hint=_SHAPE)
    return Reading(tuple(collector.examples), str(path), collector.problems.summary(), _notes(collector.examples))


def _notes(examples: list[QuestionExample]) -> tuple[str, ...]:
    impossible = sum(example.impossible is True for example in examples)
    unknown = sum(example.impossible is None for example in examples)
    notes = [f"{impossible:,} of {len(examples):,} questions without an answer in their context"] if impossible else []
    return tuple(notes + ([f"{unknown:,} questions whose answers are not given"] if unknown else []))


def _questions(data: Any, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Context, question and place of every question."""
    articles = data.get("data") if isinstance(data, dict) else data
    if not isinstance(articles, list) or not all(isinstance(article, dict) for article in articles):
        held = f"its keys: {', '.join(list(data)[:10])}" if isinstance(data, dict) else f"it is a JSON {type(data).__name__}"
        near = f"; {did_you_mean('data', data)}" if isinstance(data, dict) else ""
        raise DataError(f"{name} is not in SQuAD's format: {held}", hint=f"{_SHAPE}{near}")
    for number, article in enumerate(articles):
        paragraphs = article.get("paragraphs", [article])
        for place, paragraph in enumerate(paragraphs):
            where = f"{name}: article {number} paragraph {place}"
            context = _text(paragraph, ("context", "context_text"), where)
            questions = _field(paragraph, ("qas",), where)
            if not isinstance(questions, list) or not all(isinstance(question, dict) for question in questions):
                raise DataError(f"{where}: 'qas' is no list of objects", hint=_SHAPE)
            for question in questions:
                yield context, question, where


def _answers(answers: Any, where: str) -> Iterator[tuple[str, int | None]]:
    """Text and claimed start of every answer; CMRC's own form has the text alone, and numbers for texts that are numbers."""
    if not isinstance(answers, list):
        raise DataError(f"{where}: 'answers' is no list", hint=_SHAPE)
    for answer in answers:
        text = _field(answer, ("text",), where) if isinstance(answer, dict) else answer
        start = answer.get("answer_start") if isinstance(answer, dict) else None
        if isinstance(text, float) and text.is_integer():
            text = int(text)
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise DataError(f"{where}: an answer is no text: {text!r:.60}", hint=_SHAPE)
        yield clean_text(str(text)), int(start) if isinstance(start, (int, float)) else None


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
        raise DataError(f"{where}: '{names[0]}' is empty or no text", hint="a question and its context need at least a character")
    return clean_text(value)
