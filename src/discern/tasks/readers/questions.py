"""Files of questions about contexts in the formats of SQuAD, CMRC 2018 and MRQA 2019.

The start of an answer is often wrong in CMRC 2018, and some answers are paraphrases. So the text of an answer is searched for in
its context, and an answer that does not occur is left out and counted.
Reference: Rajpurkar et al. 2016, 2018; Cui et al. 2019; Fisch et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from discern.data.sources.documents import ProblemLog
from discern.data.tables import clean_text, numbered_lines, parsed_json, whole_text, without_blank_end
from discern.errors import DataError
from discern.tasks.base import Answer, QuestionExample, Reading

_SQUAD = '{"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'
_MRQA = (
    '{"context": ..., "qas": [{"qid": ..., "question": ..., "answers": [...], '
    '"detected_answers": [{"text": ..., "char_spans": [[start, end]]}]}]}'
)


def _as_text(value: object) -> object:
    """A text or number of a file; CMRC writes some answers as numbers, 39 as 39.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return clean_text(value) if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(_as_text)]


class Record(BaseModel):
    """An object of a file; keys that are not needed are ignored."""

    model_config = ConfigDict(coerce_numbers_to_str=True)


class AnswerRecord(Record):
    """An answer: its text with its start in SQuAD, or with spans in MRQA's detected answers; only its text otherwise.

    A span is a pair of character positions, where the second is inclusive.
    """

    text: _Text
    answer_start: int | None = None
    char_spans: list[tuple[int, int]] = []

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: object) -> object:
        return value if isinstance(value, dict) else {"text": value}

    def located(self, context: str) -> Iterator[tuple[str, int | None]]:
        """Text and expected start of each occurrence."""
        if not self.char_spans:
            yield self.text, self.answer_start
        for start, last in self.char_spans:
            # The span is more reliable than the text, which differs in white space or case in some data sets.
            spanned = context[start : last + 1]
            same = spanned.split() == self.text.split() or spanned.casefold() == self.text.casefold()
            yield spanned if same else self.text, start


class QuestionRecord(Record):
    """A question. Without any answers and without `is_impossible` it is not known whether it has an answer."""

    id: _Text = Field(validation_alias=AliasChoices("id", "qid", "query_id"))
    question: _Text = Field(validation_alias=AliasChoices("question", "query_text"))
    answers: list[AnswerRecord] | None = None
    detected_answers: list[AnswerRecord] | None = None
    is_impossible: bool | None = None


class Paragraph(Record):
    """A context with its questions."""

    context: _Text = Field(validation_alias=AliasChoices("context", "context_text"))
    qas: list[QuestionRecord]


class Article(Record):
    """The paragraphs of an article."""

    paragraphs: list[Paragraph]


class SquadFile(Record):
    """The content of a file in SQuAD's format."""

    data: list[Article]


def read_squad(path: Path, *, labeled: bool = True) -> Reading[QuestionExample]:
    """The questions of a file in SQuAD's format, or in CMRC's own, which is a list of paragraphs.

    Args:
        labeled: False: do not read answers.

    Raises:
        DataError: the file is not JSON or not in this format, or two questions have the same id.
    """
    data = parsed_json(whole_text(path), str(path))
    squad = _validated(SquadFile, {"data": [{"paragraphs": data}]} if isinstance(data, list) else data, str(path), _SQUAD)
    paragraphs = ((str(path), paragraph) for article in squad.data for paragraph in article.paragraphs)
    return _reading(paragraphs, str(path), _SQUAD, labeled=labeled)


def read_mrqa(path: Path, *, labeled: bool = True) -> Reading[QuestionExample]:
    """The questions of a file in MRQA's format, compressed or not: JSON lines with one context each, below a header.

    The answers are all spans of the detected answers, in their order; the golds are the texts of `answers`, which the official
    metric compares with. The header may be missing.

    Args:
        labeled: False: do not read answers.

    Raises:
        DataError: the file is not JSON lines or not in this format, or two questions have the same id.
    """

    def paragraphs() -> Iterator[tuple[str, Paragraph]]:
        for number, line in without_blank_end(numbered_lines(path)):
            where = f"{path}:{number}"
            record = parsed_json(line, where)
            if not (isinstance(record, dict) and "header" in record):
                yield where, _validated(Paragraph, record, where, _MRQA)

    return _reading(paragraphs(), str(path), _MRQA, labeled=labeled)


FORMATS = {"squad": read_squad, "mrqa": read_mrqa}
"""Readers of formats that are not tables."""

_Model = TypeVar("_Model", bound=Record)


def _validated(model: type[_Model], value: Any, where: str, shape: str) -> _Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "the value"
        value = problem["input"]
        content = f"the keys {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)
        raise DataError(f"{where}: {key}: {problem['msg']}; found {content[:100]}", hint=f"expected {shape}") from error


def _reading(paragraphs: Iterable[tuple[str, Paragraph]], source: str, shape: str, *, labeled: bool) -> Reading[QuestionExample]:
    """The questions of some paragraphs, each given with its place in the file."""
    problems = ProblemLog()
    examples: dict[str, QuestionExample] = {}
    for where, paragraph in paragraphs:
        for question in paragraph.qas:
            place = f"{where} question {question.id}"
            if question.id in examples:
                raise DataError(
                    f"{place}: the id occurs twice", hint="give every question a unique id, by which predictions are matched"
                )
            example = QuestionExample(question.id, question.question, paragraph.context)
            if labeled:
                answers, impossible = question.answers or [], question.is_impossible
                pairs = [pair for answer in question.detected_answers or answers for pair in answer.located(paragraph.context)]
                if impossible and pairs:
                    raise DataError(
                        f"{place}: 'is_impossible' is true, but there are answers", hint="remove the answers, or set it to false"
                    )
                if impossible is None and (question.answers is not None or question.detected_answers is not None):
                    impossible = False
                example = replace(example, golds=tuple(answer.text for answer in answers), impossible=impossible)
                example = with_answers(example, pairs, place, problems)
            examples[question.id] = example
    if not examples:
        raise DataError(f"{source} has no questions", hint=f"expected {shape}")
    return Reading(tuple(examples.values()), source, problems.summary())


def with_answers(
    question: QuestionExample, answers: Sequence[tuple[str, int | None]], where: str, problems: ProblemLog
) -> QuestionExample:
    """The question with its `answers`, given as text and expected start, located in its context.

    An answer that does not occur is left out and counted. The golds are the texts of the answers, unless the question has golds.
    """
    located: dict[Answer, None] = {}
    for text, start in answers:
        answer = locate(question.context, text, start)
        if answer is None:
            problems.add("answer that does not occur in its context, left out", f"{where}: {text[:40]!r}")
            continue
        if start is not None and answer.start != start:
            problems.add("answer found elsewhere than at its start", f"{where}: {text[:40]!r} at {answer.start}, not {start}")
        located[answer] = None
    return replace(question, answers=tuple(located), golds=question.golds or tuple(text for text, _ in answers))


def locate(context: str, text: str, start: int | None = None) -> Answer | None:
    """Locate an answer in its context: the occurrence nearest to `start`; without a start, the first.

    If it is not found, it is searched for without leading and trailing white space. None if the context does not contain it.
    """
    start = max(start or 0, 0)
    for wanted in filter(None, (text, text.strip())):
        nearest = (context.rfind(wanted, 0, start + len(wanted)), context.find(wanted, start))
        occurrences = [position for position in nearest if position >= 0]
        if occurrences:
            return Answer(wanted, min(occurrences, key=lambda position: abs(position - start)))
    return None
