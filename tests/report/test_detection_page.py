"""The page of judged texts: nothing from outside, nothing unescaped, usable by keyboard."""

from __future__ import annotations

import json
import re
from typing import Any

from discern.report.detection_page import CheckedText, PlaceProposals, render_detections
from discern.report.page import script_hash
from tests.report.test_page import structure

EVIL = '<script>alert("x")</script> & </p>'
ARABIC = "في مدينة"


def judged(text: str, probabilities: list[float], proposals: bool = True) -> CheckedText:
    """A text whose tokens are its words."""
    offsets = [match.span() for match in re.finditer(r"\S+", text)]
    places = [PlaceProposals([("</script>", 0.5), ("the", 0.25)], 0.125) for _ in offsets]
    return CheckedText("1", text, offsets, probabilities, places if proposals else None)


def rendered(*texts: CheckedText, threshold: float = 0.5) -> str:
    return render_detections("<b>model", [("Model", "<i>&")], texts, threshold)


def tokens(html: str) -> list[dict[str, Any]]:
    return [attributes for _, attributes in structure(html).elements if (attributes.get("class") or "").startswith("token")]


def test_texts_are_whole_and_escaped_and_only_the_pages_own_script_runs() -> None:
    html = rendered(judged(EVIL, [0.2, 0.9, 0.5]), judged(ARABIC + "\ud800", [0.1, 0.8]))
    elements = structure(html).elements
    assert [attributes["aria-label"] for _, attributes in elements if attributes.get("role") == "group"] == [EVIL, ARABIC + "?"]
    assert "<b>model" not in html
    assert "<i>&" not in html
    for _, attributes in elements:
        assert not attributes.keys() & {"src", "srcset", "data", "action"}
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:|@import|url\(", html)
    data, script = re.findall(r"<script.*?>(.*?)</script>", html, flags=re.S)
    assert json.loads(data)[0][0] == [0.125, [["</script>", 0.5], ["the", 0.25]]]
    (policy,) = [attributes["content"] for _, attributes in elements if "http-equiv" in attributes]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash(script)}'"
    assert "innerHTML" not in script


def test_marks_begin_at_the_threshold_and_each_text_is_one_stop_of_the_keyboard() -> None:
    found = tokens(rendered(judged("a b c", [0.39, 0.4, 0.41]), judged("", []), judged("d e", [0.1, 0.2]), threshold=0.4))
    assert [each["class"] for each in found] == ["token", "token marked", "token marked", "token", "token"]
    assert [each["style"] for each in found[:3]] == ["--p:0.390", "--p:0.400", "--p:0.410"]
    assert found[1]["aria-label"] == "b: 0.40, marked"
    assert [each["tabindex"] for each in found] == ["0", "-1", "-1", "0", "-1"]
    assert [each["id"] for each in found[2:]] == ["t0-2", "t2-0", "t2-1"], "an empty text keeps its place"


def test_without_a_generator_the_page_says_so() -> None:
    html = rendered(judged("a b", [0.1, 0.2], proposals=False))
    assert '<script type="application/json" id="data">[null]</script>' in html
    assert "came without a generator" in html
    assert "to see what the generator" not in html
