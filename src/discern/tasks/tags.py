"""Tag schemes: their detection, and conversion between tags and spans.

A tag is a prefix and a type ("B-NP") or "O". Spans begin and end by the rule of conlleval, which needs no scheme: a span begins
at B or S, after O, after E or S, and where the type changes. The rule reads IOB1, IOB2, BIOES, and broken sequences. The
prefixes of BILOU and BMES are read as those of BIOES.
Reference: Tjong Kim Sang and Buchholz 2000; the script conlleval; BIOES as in its later versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from discern.errors import DataError

Scheme = Literal["iob1", "iob2", "bioes", "none"]

# The tag of words outside of spans, as some files write it, and a prefix that is in lower case or lacks its hyphen.
_OUTSIDE = frozenset({"O", "0", "-", "_", "NONE", "OTHER"})
_LIKE_A_MARK = re.compile("[bi][-_:/|].+", re.IGNORECASE)
_PREFIXES = {"B": "B", "I": "I", "O": "O", "E": "E", "S": "S", "L": "E", "U": "S", "M": "I"}


class Span(NamedTuple):
    """Words `start` to `stop - 1` of a sentence, of one type."""

    start: int
    stop: int
    type: str


def split_tag(tag: str) -> tuple[str, str]:
    """Prefix (one of B, I, O, E, S) and type of a tag; the type follows the first hyphen.

    Raises:
        DataError: the tag is neither "O" nor a prefix with a type.
    """
    prefix, hyphen, kind = tag.partition("-")
    # A bare "I" is a span without a type, as for conlleval; word segmentation has such tags.
    if prefix not in _PREFIXES or (prefix == "O" and hyphen):
        raise DataError(
            f"tag '{tag}' is neither 'O' nor of the form 'B-TYPE'",
            hint="tags that mark no spans (parts of speech) are scored by accuracy; choose another tag column for spans",
        )
    return _PREFIXES[prefix], kind


def spans_of(tags: Sequence[str]) -> list[Span]:
    """The spans of a sentence, in order, by the rules of conlleval.

    Raises:
        DataError: a tag is neither "O" nor a prefix with a type.
    """
    spans: list[Span] = []
    start: int | None = None
    before, kind_before = "O", ""
    for place, tag in enumerate(tags):
        prefix, kind = split_tag(tag)
        goes_on = prefix in "IE" and before in "BI" and kind == kind_before
        if not goes_on:
            if start is not None:
                spans.append(Span(start, place, kind_before))
            start = None if prefix == "O" else place
        before, kind_before = prefix, kind
    if start is not None:
        spans.append(Span(start, len(tags), kind_before))
    return spans


def detect_scheme(sentences: Iterable[Sequence[str]]) -> Scheme:
    """The scheme of the tags of a file.

    'none': some tag marks no span, such as a part of speech. 'bioes': E or S (or L, U, M) occurs. 'iob1': some span begins with
    I, and B occurs only between adjacent spans of the same type. 'iob2': otherwise, even if some span begins with I.
    """
    prefixes: set[str] = set()
    inside_begins = needless_begin = False
    for tags in sentences:
        before, kind_before = "O", ""
        for tag in tags:
            prefix, hyphen, kind = tag.partition("-")
            if prefix not in _PREFIXES or (hyphen and prefix == "O"):
                return "none"
            prefixes.add(prefix)
            after_same = before != "O" and kind_before == kind
            inside_begins |= prefix == "I" and not after_same
            needless_begin |= prefix == "B" and not after_same
            before, kind_before = prefix, kind
    if prefixes & set("ESLUM"):
        return "bioes"
    return "iob1" if inside_begins and not needless_begin else "iob2"


def resemble_marks(tags: Iterable[str]) -> bool:
    """Whether tags look as if they should mark spans, though `detect_scheme` says 'none'.

    Args:
        tags: different tags of a file, the most frequent first.
    """
    usual, *others = tags
    return usual.upper() in _OUTSIDE or any(map(_LIKE_A_MARK.fullmatch, (usual, *others)))


def broken_starts(sentences: Iterable[Sequence[str]]) -> int:
    """Number of spans that begin with I or E although the scheme (iob2, bioes) requires B or S."""
    return sum(split_tag(tags[span.start])[0] in "IE" for tags in sentences for span in spans_of(tags))


def tags_of(spans: Iterable[Span], length: int, scheme: Scheme = "bioes") -> list[str]:
    """The tags of a sentence of `length` words in a scheme.

    Raises:
        ValueError: spans overlap or exceed the sentence, or the scheme marks no spans.
    """
    if scheme == "none":
        raise ValueError("scheme 'none' marks no spans")
    tags = ["O"] * length
    end, kind_before = 0, None
    for span in sorted(spans):
        if not end <= span.start < span.stop <= length:
            raise ValueError(f"{span} overlaps the span before it, or leaves a sentence of {length} words")
        size = span.stop - span.start
        first, last = "B", "I"
        if scheme == "bioes":
            first, last = ("S" if size == 1 else "B"), "E"
        elif scheme == "iob1" and not (end == span.start and kind_before == span.type):
            first = "I"
        marks = [first] + ["I"] * (size - 2) + [last] * (size > 1)
        tags[span.start : span.stop] = [f"{mark}-{span.type}" if span.type else mark for mark in marks]
        end, kind_before = span.stop, span.type
    return tags


def convert(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The tags of the same spans in another scheme.

    Raises:
        DataError: a tag is neither "O" nor a prefix with a type.
    """
    return tags_of(spans_of(tags), len(tags), scheme)
