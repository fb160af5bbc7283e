"""Schemes of tags, by hand and by all short sequences."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discern.errors import DataError
from discern.tasks.tags import Scheme, Span, convert, detect_scheme, spans_of, split_tag, tags_of


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-A I-A O B-B", [(0, 2, "A"), (3, 4, "B")]),
        ("I-A I-A O I-B", [(0, 2, "A"), (3, 4, "B")]),  # IOB1
        ("I-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]),
        ("B-A I-B I-B", [(0, 1, "A"), (1, 3, "B")]),  # a change of type begins a span
        ("O I-A I-B O", [(1, 2, "A"), (2, 3, "B")]),
        ("S-A B-A E-A S-A", [(0, 1, "A"), (1, 3, "A"), (3, 4, "A")]),
        ("B-A E-A E-A I-A", [(0, 2, "A"), (2, 3, "A"), (3, 4, "A")]),
        ("S-A I-A O E-A", [(0, 1, "A"), (1, 2, "A"), (3, 4, "A")]),
        ("B-A S-A", [(0, 1, "A"), (1, 2, "A")]),
        ("U-A B-A M-A L-A", [(0, 1, "A"), (1, 4, "A")]),
        ("B-X-Y I-X-Y", [(0, 2, "X-Y")]),
        ("I I O I", [(0, 2, ""), (3, 4, "")]),
        ("O O", []),
    ],
)
def test_spans_as_conlleval_reads_them(tags: str, spans: list[tuple[int, int, str]]) -> None:
    assert spans_of(tags.split()) == [Span(*span) for span in spans]


def published(tags: tuple[str, ...]) -> list[Span]:
    """The rules as the script has them: two questions between each two words, one with what went before."""
    spans, start = [], 0
    before = ("O", "")
    for place, tag in enumerate([*tags, "O"]):
        now = split_tag(tag)
        (old, old_type), (new, new_type) = before, now
        ends = old in "ES" or (old, new) in {("B", "B"), ("B", "S"), ("B", "O"), ("I", "B"), ("I", "S"), ("I", "O")}
        ends = (ends and old != "O") or (old != "O" and old_type != new_type)
        starts = new in "BS" or (new in "EI" and old in "ESO") or (new != "O" and old_type != new_type)
        if ends:
            spans.append(Span(start, place, old_type))
        if starts:
            start = place
        before = now
    return spans


def test_every_short_sequence_agrees_with_the_published_rules() -> None:
    names = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "AB")]
    for length in (1, 2, 3, 4):
        for tags in itertools.product(names, repeat=length):
            assert spans_of(tags) == published(tags), tags


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["B-A I-A O", "B-B"], "iob2"),
        (["I-A I-A O I-B", "I-A B-A"], "iob1"),
        (["I-A O"], "iob1"),
        (["B-A I-A O I-B"], "iob2"),
        (["B-A E-A O S-B"], "bioes"),
        (["B-A L-A U-B"], "bioes"),
        (["B M E S"], "bioes"),
        (["NN VB"], "none"),
        (["PER O"], "none"),
        (["O O"], "iob2"),
    ],
)
def test_schemes_are_recognized(sentences: list[str], scheme: Scheme) -> None:
    assert detect_scheme([tags.split() for tags in sentences]) == scheme


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        ("iob1", "I-A B-A I-A I-B O B-B".replace("O B-B", "O I-B")),
        ("iob2", "B-A B-A I-A B-B O B-B"),
        ("bioes", "S-A B-A E-A S-B O S-B"),
    ],
)
def test_spans_become_tags(scheme: Scheme, tags: str) -> None:
    spans = [Span(0, 1, "A"), Span(1, 3, "A"), Span(3, 4, "B"), Span(5, 6, "B")]
    assert tags_of(spans, 6, scheme) == tags.split()


@given(
    st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B", "E-A", "S-B"]), min_size=1),
    st.sampled_from(["iob1", "iob2", "bioes"]),
)
def test_conversion_keeps_the_spans(tags: list[str], scheme: Scheme) -> None:
    converted = convert(tags, scheme)
    assert spans_of(converted) == spans_of(tags)
    assert convert(converted, scheme) == converted


def test_what_is_no_tag_is_refused() -> None:
    for tag in ("NN", "X-A", "O-A", ""):
        with pytest.raises(DataError, match="neither 'O'"):
            spans_of([tag])
    with pytest.raises(ValueError, match="overlaps"):
        tags_of([Span(0, 2, "A"), Span(1, 3, "A")], 3)
    with pytest.raises(ValueError, match="leaves"):
        tags_of([Span(0, 4, "A")], 3)
