"""Inputs of predictions as Python values: strings, pairs, lists of words, questions with their contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from discern.errors import ConfigError
from discern.tasks.base import Task
from discern.tasks.conll import ConllSource
from discern.tasks.examples import ClassificationExample, QuestionExample, TaggingExample
from discern.tasks.readers.files import clean_text
from discern.workflows.prediction_input import known_definition

_EXPECTED = {
    "pair": "a pair of texts: (first, second)",
    "text": "a text",
    "tags": "a text, or a list of its words",
    "spans": "a pair (question, context)",
}


def examples_of(task: Task[Any], record: Mapping[str, Any], texts: Iterable[Any]) -> list[Any]:
    """The examples of a task. Ids number them, from 0.

    Args:
        record: of the task, as finetuned.json has it.
        texts: for classification and regression, texts or pairs of texts, as in training; for tagging, texts (split
            at white space) or lists of words; for question answering, pairs (question, context) or mappings with these keys.

    Raises:
        ConfigError: `texts` is a single text, or one of them is not what the task reads.
    """
    if isinstance(texts, str):  # a sequence of characters, by its type
        raise ConfigError("expected a list of texts, found a single text", hint="put it into a list: [text]")
    of_tags = _characters if _reads_characters(task) else _tagging
    make = {"tags": of_tags, "spans": _question}.get(task.labels.kind, _classification)
    wants = _wants(task, record)
    return [make(str(number), value, _Refusal(number, wants)) for number, value in enumerate(texts)]


def _wants(task: Task[Any], record: Mapping[str, Any]) -> str:
    """What a task reads: 'tags', 'spans', 'text', 'pair', or 'either' where nobody knows."""
    if task.labels.kind in ("tags", "spans"):
        return task.labels.kind
    definition = known_definition(task)
    if definition is not None:
        return "pair" if len(definition.source.text_names()) > 1 else "text"
    columns = (record.get("source") or {}).get("columns")
    if columns is None:
        return "either"
    return "pair" if columns.get("pair") else "text"


def _reads_characters(task: Task[Any]) -> bool:
    definition = known_definition(task)
    return definition is not None and isinstance(definition.source, ConllSource) and definition.source.characters


class _Refusal:
    """The error about one of the texts."""

    def __init__(self, number: int, wants: str) -> None:
        self.number = number
        self.wants = wants

    def __call__(self, value: Any) -> ConfigError:
        expected = _EXPECTED.get(self.wants, "a text, or a pair of texts")
        return ConfigError(f"item {self.number} is {value!r:.60}, expected {expected}", hint="every item must be of that form")


def _text(value: Any, refusal: Callable[[Any], ConfigError]) -> str:
    if not isinstance(value, str):
        raise refusal(value)
    return clean_text(value)


def _two(value: Any) -> tuple[Any, Any] | None:
    """The halves of a pair, which may also be a row of an array; None of anything else."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or len(value) != 2:
        return None
    return value[0], value[1]


def _classification(identity: str, value: Any, refusal: _Refusal) -> ClassificationExample:
    halves = _two(value)
    if (refusal.wants == "pair" and halves is None) or (refusal.wants == "text" and halves is not None):
        raise refusal(value)
    first, second = halves if halves is not None else (value, None)
    other = None if second is None else _text(second, refusal).strip()
    return ClassificationExample(identity, _text(first, refusal).strip(), other)


def _tagging(identity: str, value: Any, refusal: _Refusal) -> TaggingExample:
    if isinstance(value, str):
        return TaggingExample(identity, tuple(clean_text(value).split()))
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise refusal(value)
    return TaggingExample(identity, tuple(_text(word, refusal) for word in value))


def _characters(identity: str, value: Any, refusal: _Refusal) -> TaggingExample:
    """As `_tagging`, every character of a text being a word."""
    made = _tagging(identity, value, refusal)
    return TaggingExample(identity, tuple("".join(made.words))) if isinstance(value, str) else made


def _question(identity: str, value: Any, refusal: _Refusal) -> QuestionExample:
    halves = (value.get("question"), value.get("context")) if isinstance(value, Mapping) else _two(value)
    if halves is None:
        raise refusal(value)
    # The context is not stripped: the places of answers count its characters.
    return QuestionExample(identity, _text(halves[0], refusal).strip(), _text(halves[1], refusal))
