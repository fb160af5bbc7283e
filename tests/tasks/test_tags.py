"""Schemes of tags, by hand and by all short sequences."""

from __future__ import annotations

import itertools

import pytest

from discern.tasks.tags import Scheme, Span, convert, detect_scheme, spans_of, split_tag


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("I-A I-B I-B", [(0, 1, "A"), (1, 3, "B")]),  # a change of type begins a span
        ("U-A B-A M-A L-A", [(0, 1, "A"), (1, 4, "A")]),
        ("B-X-Y I-X-Y", [(0, 2, "X-Y")]),
        ("I I O I", [(0, 2, ""), (3, 4, "")]),
    ],
)
def test_spans_as_conlleval_reads_them(tags: str, spans: list[tuple[int, int, str]]) -> None:
    assert spans_of(tags.split()) == [Span(*span) for span in spans]


def published(tags: tuple[str, ...]) -> list[Span]:
    """The rules as the script has them: two questions between each two words, one with what went before."""
    spans, start = [], 0
    before = ("O", "")
    for position, tag in enumerate([*tags, "O"]):
        (old, old_type), (new, new_type) = before, split_tag(tag)
        ends = old in "ES" or (old in "BI" and new in "BSO") or (old != "O" and old_type != new_type)
        starts = new in "BS" or (new in "EI" and old in "ESO") or (new != "O" and old_type != new_type)
        if ends:
            spans.append(Span(start, position, old_type))
        if starts:
            start = position
        before = (new, new_type)
    return spans


def test_every_short_sequence_agrees_with_the_published_rules() -> None:
    names = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "AB")]
    for tags in itertools.product(names, repeat=4):
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
        (["B-A O-A"], "none"),
        (["O O"], "iob2"),
    ],
)
def test_schemes_are_recognized(sentences: list[str], scheme: Scheme) -> None:
    assert detect_scheme([tags.split() for tags in sentences]) == scheme


SCHEMES: dict[Scheme, str] = {
    "iob1": "I-A B-A I-A I-B O I-B",
    "iob2": "B-A B-A I-A B-B O B-B",
    "bioes": "S-A B-A E-A S-B O S-B",
}


def test_tags_are_converted_to_any_scheme() -> None:
    for tags, (scheme, converted) in itertools.product(SCHEMES.values(), SCHEMES.items()):
        assert convert(tags.split(), scheme) == converted.split()
