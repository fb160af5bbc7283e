"""Read n-best lists of speech recognizers and translators, in the JSON formats that such tools write."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from discern.errors import DataError
from discern.parsing import json_value
from discern.tasks.readers.files import clean_text, numbered_lines, parsed_json, whole_text

_FORMS = (
    'expected JSON lines {"id": ..., "reference": "...", "hypotheses": [{"text": "...", "score": -1.5}, ...]}, or the JSON of '
    "ESPnet, of mlm-scoring, or of Vosk"
)
_LISTS, _REFERENCES = ("hypotheses", "alternatives", "nbest"), ("reference", "ref")
_TEXTS, _SCORES = ("text", "transcript"), ("score", "confidence")


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
    lists = [_list(record, f"{path}, {where}", number) for number, (where, record) in enumerate(_records(path), 1)]
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
        yield from ((f"utterance {name}", _espnet(name, record)) for name, record in whole["utts"].items())
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


def _espnet(name: str, record: Any) -> Mapping[str, Any]:
    """A list of ESPnet; the recognized text may contain the tokens for space and end."""
    outputs = record.get("output", []) if isinstance(record, dict) else None
    if not isinstance(outputs, list):
        return {"id": name}
    outputs = [output for output in outputs if isinstance(output, dict)]
    references = [output["text"] for output in outputs if isinstance(output.get("text"), str)]
    found = []
    for output in outputs:
        text = output.get("rec_text")
        readable = " ".join(text.replace("<eos>", " ").replace("\u2581", " ").split()) if isinstance(text, str) else None
        found.append({"text": readable, "score": output.get("score")})
    return {"id": name, "reference": references[0] if references else None, "hypotheses": found}


def _list(record: Any, where: str, number: int) -> NBest:
    """A list, after checking that it is complete."""
    found = (
        next((record[name] for name in _LISTS if isinstance(record.get(name), list)), None) if isinstance(record, dict) else None
    )
    if found is None:
        raise DataError(f"{where}: no list of hypotheses", hint=_FORMS)
    if not found:
        raise DataError(f"{where}: the list is empty", hint="remove inputs without hypotheses, or add one with an empty text")
    reference = next((record[name] for name in _REFERENCES if record.get(name) is not None), None)
    if reference is not None and not isinstance(reference, str):
        raise DataError(f"{where}: the reference is {reference!r}, not a text", hint="give one reference, as a string")
    hypotheses = tuple(_hypothesis(each, f"{where}, hypothesis {place}") for place, each in enumerate(found, 1))
    identity = record.get("id")
    if isinstance(identity, str):
        identity = clean_text(identity)
    elif isinstance(identity, float):
        identity = str(identity)
    elif not isinstance(identity, int) or isinstance(identity, bool):
        identity = number
    return NBest(identity, hypotheses, None if reference is None else clean_text(reference.strip()))


def _hypothesis(value: Any, where: str) -> Hypothesis:
    fields = value if isinstance(value, dict) else {}
    text = next((fields[name] for name in _TEXTS if isinstance(fields.get(name), str)), None)
    if text is None:
        raise DataError(f"{where}: no text", hint='give each hypothesis as {"text": "...", "score": -1.5}')
    score = next((fields[name] for name in _SCORES if fields.get(name) is not None), None)
    if not _is_finite(score):
        raise DataError(
            f"{where}: the score is {_shortened(repr(score))}, expected a finite number",
            hint="give the log-probability of the system that proposed it; if it has none, 0 for the whole list",
        )
    return Hypothesis(clean_text(text.strip()), float(score))


def _is_finite(score: Any) -> TypeGuard[int | float]:
    """Whether the value is a number that a finite float can represent."""
    try:
        return not isinstance(score, bool) and isinstance(score, int | float) and math.isfinite(score)
    except OverflowError:
        return False


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
