"""Tag schemes: their detection, and conversion between tags and spans.

A tag is a prefix and a type ("B-NP") or "O". Spans begin and end by the rule of conlleval, which needs no scheme: a span begins
at B or S, after O, after E or S, and where the type changes. The rule reads IOB1, IOB2, BIOES, and broken sequences. The
prefixes of BILOU and BMES are read as those of BIOES.
Reference: Tjong Kim Sang and Buchholz 2000; the script conlleval; BIOES as in its later versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple

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


def is_span_tag(tag: str) -> bool:
    """Whether a tag is "O" or a prefix with a type, unlike a part of speech."""
    prefix, hyphen, _ = tag.partition("-")
    # A bare "I" is a span without a type, as for conlleval; word segmentation has such tags.
    return prefix in _PREFIXES and not (prefix == "O" and hyphen)


@cache  # files have few tags and many words
def split_tag(tag: str) -> tuple[str, str]:
    """Prefix (one of B, I, O, E, S) and type of a tag that `is_span_tag`; the type follows the first hyphen."""
    prefix, _, kind = tag.partition("-")
    return _PREFIXES[prefix], kind


def join_tag(prefix: str, kind: str) -> str:
    """The inverse of `split_tag`."""
    return f"{prefix}-{kind}" if kind else prefix


def spans_of(tags: Sequence[str]) -> list[Span]:
    """The spans of a sentence, in order, by the rules of conlleval."""
    spans: list[Span] = []
    start, last_prefix, last_kind = 0, "O", ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, kind = split_tag(tag)
        continues = prefix in "IE" and last_prefix in "BI" and kind == last_kind
        if not continues:
            if last_prefix != "O":
                spans.append(Span(start, position, last_kind))
            start = position
        last_prefix, last_kind = prefix, kind
    return spans


def tags_of(spans: Iterable[Span], length: int, scheme: Scheme = "bioes") -> list[str]:
    """The tags of a sentence of `length` words in a scheme that marks spans.

    Args:
        spans: spans that do not overlap, in order.
    """
    tags = ["O"] * length
    previous: Span | None = None
    for span in spans:
        prefixes = ["B", *"I" * (span.stop - span.start - 1)]
        if scheme == "bioes":
            prefixes[-1] = "E" if len(prefixes) > 1 else "S"
        elif scheme == "iob1" and not (previous and (previous.stop, previous.type) == (span.start, span.type)):
            prefixes[0] = "I"
        tags[span.start : span.stop] = [join_tag(prefix, span.type) for prefix in prefixes]
        previous = span
    return tags


def convert(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The tags of the same spans in another scheme; unchanged for 'none', if tags mark no spans."""
    return list(tags) if scheme == "none" else tags_of(spans_of(tags), len(tags), scheme)


def detect_scheme(sentences: Iterable[Sequence[str]]) -> Scheme:
    """The scheme of the tags of a file.

    'none': some tag marks no span, such as a part of speech. 'bioes': E or S (or L, U, M) occurs. 'iob1': some span begins with
    I, and B occurs only between adjacent spans of the same type. 'iob2': otherwise, even if some span begins with I.
    """
    sentences = [list(tags) for tags in sentences]
    names = {tag for tags in sentences for tag in tags}
    if not all(map(is_span_tag, names)):
        return "none"
    if any(tag[0] in "ESLUM" for tag in names):
        return "bioes"
    # The scheme that leaves the tags unchanged; a file without spans fits both.
    if all(convert(tags, "iob1") == tags for tags in sentences) and any(convert(tags, "iob2") != tags for tags in sentences):
        return "iob1"
    return "iob2"


def resemble_marks(tags: Iterable[str]) -> bool:
    """Whether tags look as if they should mark spans, though `detect_scheme` says 'none'.

    Args:
        tags: different tags of a file, the most frequent first.
    """
    most_frequent, *others = tags
    return most_frequent.upper() in _OUTSIDE or any(map(_LIKE_A_MARK.fullmatch, (most_frequent, *others)))
