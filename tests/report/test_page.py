"""Pages stand alone, escape what they show, are legible in light and dark, and are the same for the same input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from discern.report.charts import Chart, Line, chart_svg
from discern.report.page import (
    Confusion,
    Page,
    Piece,
    Table,
    Texts,
    entity_pieces,
    render_page,
    shaded_pieces,
)

NASTY = "<script>alert('&\"')</script>"
CHART = Chart("Loss $x$", "nats", (Line("training", (1, 2, 3), (3.0, 2.0, 1.5)), Line("held out", (3,), (1.6,), 2)))


class Structure(HTMLParser):
    """Collects the attributes of all elements, and unclosed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "hr", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def structure(html: str) -> Structure:
    parsed = Structure()
    parsed.feed(html)
    assert parsed.open == []
    return parsed


def full_page() -> Page:
    mistake = {"words": [NASTY, "went"], "spans": [[0, 1, NASTY]], "invented": [[0, 1, NASTY]], "missed": []}
    shaded = shaded_pieces(f"a {NASTY}", [(0, 1), (2, 10)], [0.125, 0.875])
    return Page(
        title=f"run {NASTY}",
        facts=[("Steps", NASTY)],
        verdict=[f"`a` & {NASTY}"],
        charts=[CHART, CHART],
        sections=[
            Table("Metrics", ("name", "value"), [[NASTY, 0.5]], NASTY),
            Confusion(NASTY, [NASTY, "x"], [[1, 1], [0, 0]]),
            Texts(NASTY, [(NASTY, shaded)]),
            Texts("Mistakes", [("", entity_pieces(mistake))], shaded=False),
        ],
        configuration=NASTY,
        notes=[NASTY],
    )


def assert_stands_alone(html: str) -> None:
    """Nothing in the page is fetched, from the network or from beside it."""
    assert "http" not in html
    assert not re.search(r"@import|<script|<link|<img|<iframe|\bsrc\s*=", html, re.IGNORECASE)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)', html))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", html))


def test_a_full_page_stands_alone_and_is_well_formed() -> None:
    html = render_page(full_page())
    assert_stands_alone(html)
    ids = [attributes["id"] for _, attributes in structure(html).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', html)) <= set(ids)
    assert html.count("<svg") == 2
    assert "a0b0c" not in html, "colors of charts are the page's"
    for shown in (
        "var(--line-2)",
        "<code>a</code> &amp; &lt;script",
        '<span class="token" style="--p:0.125" title="0.125">a</span> ',
        '<span class="token marked" style="--p:0.875" title="0.875">&lt;script&gt;</span>alert',
        '<td class="wrong" style="--p:0.500">1</td>',
        '<span class="entity invented">&lt;script',
    ):
        assert shown in html, shown
    assert html == render_page(full_page())


def test_empty_parts_are_left_out_and_half_a_surrogate_pair_can_be_written() -> None:
    html = render_page(Page("run \udcff", sections=[Table("Nothing", ("name",), [])]))
    assert not {tag for tag, _ in structure(html).elements} & {"table", "svg", "details", "dl", "h2"}
    assert html.encode("utf-8")


@pytest.mark.parametrize("options", [{"logarithmic": True}, {"scatter": True}, {"level": 0.0, "slope": 1.0}])
def test_a_chart_of_one_point_or_of_one_value_can_be_drawn(options: dict[str, Any]) -> None:
    for values in ((0.0,), (2.0, 2.0)):
        assert "<svg" in chart_svg(Chart("x", "y", (Line("x", values, values),), **options), "c")


def test_numbers_are_right_aligned_and_empty_columns_left_out() -> None:
    rows: list[list[Any]] = [["a", 0.0, 1024, "0.5 \u00b1 0.01", "", "2 runs"], ["b", None, "-3.5%", "0.25", None, "3"]]
    html = render_page(Page("a run", sections=[Table("Scores", ("name", "score", "tokens", "spread", "empty", "text"), rows)]))
    assert re.findall(r'<th scope="col">(\w+)</th>', html) == ["name", "text"]
    assert re.findall(r'<th scope="col" class="number">(\w+)</th>', html) == ["score", "tokens", "spread"]
    assert re.findall(r'<td class="number">(.*?)</td>', html) == ["0.0000", "1,024", "0.5 \u00b1 0.01", "", "-3.5%", "0.25"]


@pytest.mark.parametrize(
    ("text", "offsets", "probabilities", "pieces"),
    [
        (" ab c.", [(1, 3), (4, 5)], [0.1, 0.9], [Piece(" "), Piece("ab", 0.1), Piece(" "), Piece("c", 0.9), Piece(".")]),
        ("é", [(0, 1), (0, 1)], [0.2, 0.7], [Piece("é", 0.7)]),
        ("abc", [(0, 0), (0, 2), (1, 3)], [0.9, 0.2, 0.7], [Piece("ab", 0.2), Piece("c", 0.7)]),
        ("nothing", [], [], [Piece("nothing")]),
    ],
)
def test_shaded_pieces(text: str, offsets: list[tuple[int, int]], probabilities: list[float], pieces: list[Piece]) -> None:
    assert shaded_pieces(text, offsets, probabilities) == pieces


MISTAKE: dict[str, Any] = {
    "words": "Ann Lee went to New York and Paris on Monday".split(),
    "spans": [[0, 2, "PER"], [5, 6, "LOC"], [7, 8, "ORG"], [9, 10, "LOC"]],
    "invented": [[5, 6, "LOC"], [7, 8, "ORG"], [9, 10, "LOC"]],
    "missed": [[4, 6, "LOC"], [7, 8, "LOC"]],
}


@pytest.mark.parametrize(
    ("record", "text", "marked"),
    [
        (
            MISTAKE,
            "Ann Lee went to New York and Paris on Monday",
            [
                ("Ann Lee", "right", "PER"),
                ("New York", "missed", "LOC missed"),  # "York" was marked
                ("Paris", "confused", "ORG, not LOC"),
                ("Monday", "invented", "LOC invented"),
            ],
        ),
        # Chinese has no spaces.
        (
            {"words": list("我在北京ok"), "spans": [[2, 4, "LOC"]], "invented": [], "missed": []},
            "我在北京o k",
            [("北京", "right", "LOC")],
        ),
        # Tags of single words are marked where they are wrong.
        (
            {"words": ["time", "flies", "fast"], "gold": ["NN", "VB", "RB"], "tags": ["NN", "NNS", "RB"]},
            "time flies fast",
            [("flies", "confused", "NNS, not VB")],
        ),
    ],
)
def test_entities_are_marked_with_what_went_wrong(record: dict[str, Any], text: str, marked: list[tuple[str, str, str]]) -> None:
    pieces = entity_pieces(record)
    assert "".join(piece.text for piece in pieces) == text
    assert [(piece.text, piece.outcome, piece.label) for piece in pieces if piece.outcome] == marked
