"""The page stands alone, escapes what it shows, and is the same for the same input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser

from discern.report.charts import Chart, Line, chart_svg
from discern.report.curves import HeldOutMetric
from discern.report.page import Page, ShadedText, Table, render_page

NASTY = "<script>alert('&\"')</script>"
CHART = Chart("Loss $x$", "nats", [Line("training", [1, 2, 3], [3.0, 2.0, 1.5]), Line("held out", [3], [1.6])])


class Structure(HTMLParser):
    """Collects ids and unclosed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
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
    return Page(
        title=f"run {NASTY}",
        facts=[("Steps", NASTY)],
        curves=[CHART, CHART],
        metrics=[HeldOutMetric(NASTY, 0.5, NASTY)],
        evaluated_at=1234,
        detections=[ShadedText(f"a {NASTY}", [(0, 1), (2, 10)], [0.125, 0.875])],
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
    found = structure(html)
    assert len(found.ids) == len(set(found.ids))
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', html)) <= set(found.ids)
    assert html.count("<svg") == 2
    assert "at step 1,234" in html


def test_every_text_is_escaped() -> None:
    html = render_page(full_page())
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(") == 7  # the title twice; a token ends within the one in the shaded text


def test_the_same_page_gives_the_same_bytes() -> None:
    assert render_page(full_page()) == render_page(full_page())


def test_colors_are_the_pages() -> None:
    svg = chart_svg(CHART, "c")
    assert "var(--line-1)" in svg
    assert "var(--line-2)" in svg
    assert "currentColor" in svg
    assert "a0b0c" not in svg


def test_a_token_carries_its_probability() -> None:
    html = render_page(full_page())
    assert '<span class="token" style="--p:0.125" title="0.125">a</span> ' in html
    assert '<span class="token marked" style="--p:0.875" title="0.875">&lt;script&gt;</span>alert' in html


def test_empty_parts_are_left_out() -> None:
    html = render_page(Page("run", [], []))
    assert not structure(html).tags & {"table", "svg", "details", "dl", "h2"}


def test_half_a_surrogate_pair_can_be_written() -> None:
    assert render_page(Page("run \udcff", [], [])).encode("utf-8")


def test_a_chart_of_one_point_or_of_one_value_can_be_drawn() -> None:
    for values in ([0.0], [2.0, 2.0]):
        for logarithmic in (False, all(values)):
            line = Line("x", list(range(1, len(values) + 1)), values)
            assert "<svg" in chart_svg(Chart("x", "y", [line], logarithmic=logarithmic), "c")


def test_columns_of_numbers_are_right_aligned_with_their_headers() -> None:
    rows = [["a", 0.0, "1,024", "0.5 \u00b1 0.01", "", "2 runs"], ["b", "", "-3.5%", "0.25", "", "3"]]
    table = Table("Scores", ["name", "score", "tokens", "spread", "empty", "text"], rows, "From `discern evaluate`.")
    assert table.numeric == {1, 2, 3}
    assert Table("Nothing", ["name"], []).numeric == frozenset()
    html = render_page(Page(title="a run", facts=[], curves=[], tables=[table]))
    assert re.findall(r'<th scope="col" class="number">(\w+)</th>', html) == ["score", "tokens", "spread"]
    assert re.findall(r'<td class="number">(.*?)</td>', html) == ["0.0000", "1,024", "0.5 \u00b1 0.01", "", "-3.5%", "0.25"]
    assert "From <code>discern evaluate</code>." in html
