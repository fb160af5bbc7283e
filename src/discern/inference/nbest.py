"""Read n-best lists of speech recognizers and translators, in the JSON formats that such tools write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from discern.data.tables import clean_text, numbered_lines, parsed_json, whole_text
from discern.errors import DataError
from discern.parsing import json_value
from discern.storage.checksums import Record, understood

_FORMS = (
    'expected JSON lines {"id": ..., "reference": "...", "hypotheses": [{"text": "...", "score": -1.5}, ...]}, or the JSON of '
    "ESPnet, of mlm-scoring, or of Vosk; leave out inputs without hypotheses, and give 0 as the score of a system that has none"
)
_LISTS = ("hypotheses", "alternatives", "nbest")


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis.

    Attributes:
        score: score of the system that proposed it, such as a log-probability; higher is better.
    """

    text: str
    score: float


@dataclass(frozen=True)
class NBest:
    """The hypotheses for one input.

    Attributes:
        id: id in the file, with fractions as text; without one, the number of the list, from 1.
        hypotheses: hypotheses in the order of the file, at least one.
        reference: the correct text; None if the file has none.
    """

    id: str | int
    hypotheses: tuple[Hypothesis, ...]
    reference: str | None


def _clean(value: Any) -> Any:
    return clean_text(value).strip() if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(_clean)]


class _WithoutNulls(Record):
    @model_validator(mode="before")
    @classmethod
    def _drop(cls, value: Any) -> Any:
        """A null under one name of a field must not hide the value under another."""
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


class _HypothesisRecord(_WithoutNulls):
    text: _Text = Field(validation_alias=AliasChoices("text", "transcript"))
    score: float = Field(validation_alias=AliasChoices("score", "confidence"))


class _NBestRecord(_WithoutNulls):
    id: Any = None
    reference: _Text | None = Field(None, validation_alias=AliasChoices("reference", "ref"))
    hypotheses: list[_HypothesisRecord] = Field(min_length=1, validation_alias=AliasChoices(*_LISTS))


def read_nbest(path: Path) -> list[NBest]:
    """The lists of a file, compressed or not, in their order.

    These formats are recognized by content:

    - JSON lines, or an array, of `{"id", "reference", "hypotheses": [{"text", "score"}]}`; id and reference are optional;
    - the answers of Vosk and other Kaldi servers, one per line: `{"alternatives": [{"text", "confidence"}]}`;
    - the object of mlm-scoring (Shin et al. 2019, Salazar et al. 2020): `{ID: {"ref", "hyp_1": {"text", "score"}, ...}}`;
    - data.json of ESPnet 1: `{"utts": {ID: {"output": [{"rec_text", "score", "text"}, ...]}}}`, where "text" is the reference.

    Raises:
        DataError: the file is missing or empty, has another format, or has an empty or invalid list; the message names it.
    """
    lists = []
    for number, (where, record) in enumerate(_records(path), 1):
        with understood(f"{path}, {where}", hint=_FORMS):
            found = _NBestRecord.model_validate(record)
        identity = found.id
        if isinstance(identity, str | float):
            identity = clean_text(str(identity))
        elif not isinstance(identity, int) or isinstance(identity, bool):
            identity = number
        hypotheses = tuple(Hypothesis(each.text, each.score) for each in found.hypotheses)
        lists.append(NBest(identity, hypotheses, found.reference))
    if not lists:
        raise DataError(f"{path} has no lists", hint=_FORMS)
    return lists


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each list in the first format, with its location."""
    lines = list(islice((line for _, line in numbered_lines(path) if line.strip()), 2))
    if not lines:
        return
    first = _parsed(lines[0])
    # If the first line is a complete value and there are more lines, the file has one value per line.
    if _is_record(first) or (first is not None and len(lines) > 1):
        for number, line in numbered_lines(path):
            if line.strip():
                yield f"line {number}", parsed_json(line, f"{path}, line {number}")
        return
    whole = parsed_json(whole_text(path), str(path))
    if isinstance(whole, list):
        yield from ((f"list {number}", record) for number, record in enumerate(whole, 1))
    elif _is_record(whole):
        yield "list 1", whole
    elif isinstance(whole, dict) and isinstance(whole.get("utts"), dict):
        yield from (
            (f"utterance {name}", _espnet(f"{path}, utterance {name}", name, record)) for name, record in whole["utts"].items()
        )
    elif isinstance(whole, dict) and whole and all(_is_numbered(record) for record in whole.values()):
        yield from ((f"utterance {name}", _numbered(name, record)) for name, record in whole.items())
    else:
        raise DataError(f"{path} is JSON, but not a file of n-best lists", hint=_FORMS)


def _parsed(line: str) -> Any:
    try:
        return json_value(line)
    except ValueError:  # the reader of the whole file reports the error
        return None


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(name), list) for name in _LISTS)


def _is_numbered(value: Any) -> bool:
    return isinstance(value, dict) and any(_number_of(name) is not None for name in value)


def _number_of(name: str) -> int | None:
    number = name.removeprefix("hyp_")
    return int(number) if number != name and number.isdecimal() else None


def _numbered(name: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A list of mlm-scoring, ordered by number: JSON objects often have hyp_10 before hyp_2."""
    numbered = sorted((number, key) for key in record if (number := _number_of(key)) is not None)
    return {"id": name, "reference": record.get("ref"), "hypotheses": [record[key] for _, key in numbered]}


def _espnet(where: str, name: str, record: Any) -> Mapping[str, Any]:
    """A list of ESPnet; the recognized text may contain the tokens for space and end."""
    with understood(where, hint=_FORMS):
        outputs = record["output"]
        texts = [" ".join(output["rec_text"].replace("<eos>", " ").replace("\u2581", " ").split()) for output in outputs]
        return {
            "id": name,
            "reference": next((output["text"] for output in outputs if isinstance(output.get("text"), str)), None),
            "hypotheses": [{"text": text, "score": output["score"]} for text, output in zip(texts, outputs, strict=True)],
        }
