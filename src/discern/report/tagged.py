"""A tagged text with its entities: found, missed, invented, or given another name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Mark = Literal["", "right", "missed", "invented", "confused"]
_Span = tuple[int, int, str]
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f]")
_NOWHERE: _Span = (-1, -1, "")


@dataclass(frozen=True)
class MarkedText:
    """Some words in a row.

    Attributes:
        text: of them, with the blanks between.
        mark: whether they are an entity, and whether that was said of them; "" outside of all entities.
        label: what they are called: "PER", "PER missed", "PER invented", "PER, not LOC".
        after: what parts them from the next piece: a blank, or nothing in Chinese and Japanese.
    """

    text: str
    mark: Mark = ""
    label: str = ""
    after: str = ""


@dataclass(frozen=True)
class TaggedTexts:
    """Texts of one task, under a title."""

    title: str
    texts: Sequence[Sequence[MarkedText]]


def marked(record: Mapping[str, Any]) -> list[MarkedText]:
    """The text of a mistake of a tagging task, in pieces.

    Args:
        record: `words` and `tags` as predicted, `gold` tags, and where tags mark spans also `spans`, `missed` and `invented`,
            each (start, end, kind) in words.
    """
    words = [str(word) for word in record["words"]]
    if "spans" in record:
        said = {_span(each) for each in record["spans"]}
        gold = (said - {_span(each) for each in record["invented"]}) | {_span(each) for each in record["missed"]}
        pairs = list(zip(_by_word(gold, len(words)), _by_word(said, len(words)), strict=True))
    else:  # tags of single words, as parts of speech: those that are right are not marked
        both = zip(record["gold"], record["tags"], strict=True)
        pairs = [
            (_NOWHERE, _NOWHERE) if one == other else ((place, place + 1, str(one)), (place, place + 1, str(other)))
            for place, (one, other) in enumerate(both)
        ]
    return _pieces(words, pairs)


def _pieces(words: Sequence[str], pairs: Sequence[tuple[_Span, _Span]]) -> list[MarkedText]:
    """Runs of words that are of the same entity and said to be of the same one."""
    pieces: list[MarkedText] = []
    begins = 0
    for place in range(1, len(words) + 1):
        if place < len(words) and pairs[place] == pairs[begins]:
            continue
        text = words[begins]
        for before, word in zip(words[begins : place - 1], words[begins + 1 : place], strict=True):
            text += _between(before, word) + word
        after = _between(words[place - 1], words[place]) if place < len(words) else ""
        pieces.append(MarkedText(text, *_said_of(*pairs[begins]), after))
        begins = place
    return pieces


def _said_of(gold: _Span, said: _Span) -> tuple[Mark, str]:
    if gold == said == _NOWHERE:
        return "", ""
    if said == _NOWHERE:
        return "missed", f"{gold[2]} missed"
    if gold == _NOWHERE:
        return "invented", f"{said[2]} invented"
    return ("right", gold[2]) if gold[2] == said[2] else ("confused", f"{said[2]}, not {gold[2]}")


def _by_word(spans: set[_Span], count: int) -> list[_Span]:
    """The span that each word belongs to."""
    found = [_NOWHERE] * count
    for span in spans:
        found[span[0] : span[1]] = [span] * (span[1] - span[0])
    return found


def _span(values: Sequence[Any]) -> _Span:
    start, end, kind = values
    return int(start), int(end), str(kind)


def _between(before: str, after: str) -> str:
    return "" if _IDEOGRAPH.match(before[-1:]) or _IDEOGRAPH.match(after[:1]) else " "
