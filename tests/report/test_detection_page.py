"""The page of judged texts: nothing from outside, nothing unescaped, legible in light and dark."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from discern.report.detection_page import (
    CheckedText,
    DetectionPage,
    PlaceProposals,
    render_detections,
)
from discern.report.page import DARK, LIGHT, ShadedText, ShadingColors

EVIL = '<script>alert("x")</script> & </p>'
ARABIC = "في مدينة"


def judged(text: str, probabilities: list[float], proposals: bool = True, label: str = "1") -> CheckedText:
    """A text whose tokens are its words."""
    offsets = [match.span() for match in re.finditer(r"\S+", text)]
    places = [PlaceProposals([("</script>", 0.5), ("the", 0.25)], 0.125) for _ in offsets]
    return CheckedText(label, ShadedText(text, offsets, probabilities), places if proposals else None)


def rendered(*texts: CheckedText, threshold: float = 0.5, notes: tuple[str, ...] = ()) -> str:
    return render_detections(DetectionPage("<b>model", [("Model", "<i>&")], texts, threshold, notes))


class Reader(HTMLParser):
    """What a browser would see: elements with their attributes, and the text of the tokens."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: dict[str, str] = {}
        self.paragraphs: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = tag, dict(attrs)
        self.elements.append(element)
        if tag not in ("meta", "i"):
            self._open.append(element)
        if tag == "p" and "text" in (element[1].get("class") or "").split():
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if any(tag == "p" and "text" in (attributes.get("class") or "").split() for tag, attributes in self._open):
            self.paragraphs[-1] += data
        if self._open and (self._open[-1][1].get("class") or "").startswith("token"):
            self.tokens[str(self._open[-1][1]["id"])] = data


def embedded(html: str) -> Any:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.S)
    return json.loads(data)


def test_texts_are_whole_and_escaped() -> None:
    html = rendered(judged(EVIL, [0.2, 0.9, 0.5]), judged(ARABIC, [0.1, 0.8], label="2"))
    seen = Reader(html)
    assert seen.paragraphs == [EVIL, ARABIC]
    assert list(seen.tokens.values()) == [*EVIL.split(), *ARABIC.split()]
    assert [attributes["aria-label"] for _, attributes in seen.elements if attributes.get("role") == "group"] == [EVIL, ARABIC]
    assert [tag for tag, _ in seen.elements].count("script") == 2, "the data and the page's own"
    assert "<b>model" not in html
    assert "<i>&" not in html
    assert embedded(html)[0][0] == [0.125, [["</script>", 0.5], ["the", 0.25]]]


def test_nothing_comes_from_outside_and_no_other_script_runs() -> None:
    html = rendered(judged(EVIL, [0.2, 0.9, 0.5]))
    seen = Reader(html)
    for _, attributes in seen.elements:
        assert not attributes.keys() & {"src", "srcset", "data", "action"}
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:|@import|url\(", html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.S)
    (policy,) = [attributes["content"] for _, attributes in seen.elements if "http-equiv" in attributes]
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{expected}'"
    assert "innerHTML" not in script


def test_marks_begin_at_the_threshold() -> None:
    seen = Reader(rendered(judged("a b c", [0.39, 0.4, 0.41]), threshold=0.4))
    tokens = [attributes for _, attributes in seen.elements if (attributes.get("class") or "").startswith("token")]
    assert [attributes["class"] for attributes in tokens] == ["token", "token marked", "token marked"]
    assert [attributes["style"] for attributes in tokens] == ["--p:0.390", "--p:0.400", "--p:0.410"]
    assert tokens[1]["aria-label"] == "b: 0.40, marked"


def test_each_text_is_one_stop_of_the_keyboard() -> None:
    seen = Reader(rendered(judged("a b c", [0.1, 0.2, 0.3]), judged("d e", [0.1, 0.2])))
    tokens = [attributes for _, attributes in seen.elements if (attributes.get("class") or "").startswith("token")]
    assert [attributes["tabindex"] for attributes in tokens] == ["0", "-1", "-1", "0", "-1"]
    assert all(attributes["role"] == "button" for attributes in tokens)


def test_an_empty_text_keeps_its_place() -> None:
    html = rendered(judged("a", [0.1]), judged("", [], label="2"), judged("b", [0.2], label="3"))
    assert Reader(html).paragraphs == ["a", "(empty line)", "b"]
    assert "t2-0" in Reader(html).tokens


def test_without_a_generator_the_page_says_so() -> None:
    html = rendered(judged("a b", [0.1, 0.2], proposals=False))
    assert embedded(html) == [None]
    assert "came without a generator" in html
    assert "to see what the generator" not in html


def test_halves_of_surrogate_pairs_do_not_stop_it() -> None:
    rendered(judged("a\ud800 b", [0.1, 0.2])).encode("utf-8")


def test_the_same_page_gives_the_same_string() -> None:
    assert rendered(judged("a b", [0.1, 0.2])) == rendered(judged("a b", [0.1, 0.2]))


def luminance(color: tuple[float, ...]) -> float:
    linear = [c / 3294.6 if c <= 10.31475 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colors", [LIGHT, DARK])
def test_words_are_legible_on_every_shade(colors: ShadingColors) -> None:
    """Contrast of 4.5 to 1 or more, which WCAG 2.1 asks of text; and the shade grows."""
    shades = [luminance(colors.behind(step / 20)) for step in range(21)]
    ink = luminance(colors.ink)
    for shade in shades:
        light, dark = max(shade, ink), min(shade, ink)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    assert shades == sorted(shades, reverse=colors is LIGHT)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_shows_what_the_generator_would_put(tmp_path: Path) -> None:
    """An address with a token in it chooses that token, as a click does."""
    page = tmp_path / "page.html"
    page.write_text(rendered(judged(EVIL, [0.2, 0.9, 0.5])), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run([*command, "--dump-dom", f"{page.as_uri()}#t0-1"], capture_output=True, text=True, timeout=120)
    shown = re.search(r'<section id="panel".*?</section>', done.stdout, flags=re.S)
    assert shown is not None, done.stderr[-500:]
    assert "<li><bdi>&lt;/script&gt;</bdi><span>50.0%</span>" in shown.group()
    assert '<b data-part="replaced">0.900, marked</b>' in shown.group()
