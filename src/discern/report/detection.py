"""What a detector says of some texts, as one self-contained HTML page: shaded tokens, and what a generator would have put."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from discern.report.shading import Piece, ShadedText, cut

_TEMPLATE, _SCRIPT = "detection.html", "detection.js"


@dataclass(frozen=True)
class Colours:
    """Of the page, in red, green and blue from 0 to 255.

    Attributes:
        paper: behind the texts.
        ink: of the words.
        shade: laid over the paper, `strength` times the probability of it.
        strength: opacity of the shade at probability 1.
    """

    paper: tuple[int, int, int]
    ink: tuple[int, int, int]
    shade: tuple[int, int, int]
    strength: float

    def behind(self, probability: float) -> tuple[float, ...]:
        """What a token of this probability stands on."""
        opacity = self.strength * probability
        return tuple(opacity * shade + (1 - opacity) * paper for shade, paper in zip(self.shade, self.paper, strict=True))


LIGHT = Colours(paper=(255, 255, 255), ink=(23, 28, 38), shade=(224, 40, 30), strength=0.6)
DARK = Colours(paper=(24, 29, 37), ink=(236, 240, 246), shade=(235, 60, 50), strength=0.6)
"""One hue from none to much, so that the shade can be read without telling red from green."""


@dataclass(frozen=True)
class PlaceProposals:
    """What a generator would put at a token's place.

    Attributes:
        best: (token, probability), the likeliest first.
        own: probability of the token that stands there.
    """

    best: Sequence[tuple[str, float]]
    own: float


@dataclass(frozen=True)
class JudgedText:
    """A text on the page.

    Attributes:
        label: what stands beside it, as the number of its line.
        shaded: the text with its tokens.
        proposals: of each token; None where there is no generator.
    """

    label: str
    shaded: ShadedText
    proposals: Sequence[PlaceProposals] | None = None


@dataclass(frozen=True)
class DetectionPage:
    """What the page shows.

    Attributes:
        facts: (name, value) pairs for its head.
        threshold: probability from which on a token is marked.
        notes: paragraphs below the texts.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    texts: Sequence[JudgedText]
    threshold: float
    notes: Sequence[str] = ()

    @property
    def has_proposals(self) -> bool:
        """Whether a generator was asked."""
        return any(text.proposals is not None for text in self.texts)


def render_detections(page: DetectionPage) -> str:
    """The page as one HTML string: the same page gives the same string, and every text in it is escaped.

    A content security policy in the page itself lets no script run but its own, told by its hash, and nothing be fetched.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    here = files("discern.report")
    script = here.joinpath(_SCRIPT).read_text(encoding="utf-8")
    html = environment.from_string(here.joinpath(_TEMPLATE).read_text(encoding="utf-8")).render(
        page=page,
        texts=[(text.label, text.shaded.text, cut(text.shaded)) for text in page.texts],
        is_marked=lambda piece: _is_marked(piece, page.threshold),
        light=LIGHT,
        dark=DARK,
        data=_embedded([_places(text) for text in page.texts]),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return html.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair, as in a badly encoded argument, becomes "?"


def _is_marked(piece: Piece, threshold: float) -> bool:
    return piece.probability is not None and piece.probability >= threshold


def _places(text: JudgedText) -> list[list[Any]] | None:
    """What the script shows of each token: [probability of the token itself, [[token, probability], ...]]."""
    if text.proposals is None:
        return None
    return [[_short(place.own), [[token, _short(value)] for token, value in place.best]] for place in text.proposals]


def _short(probability: float) -> float:
    return float(f"{probability:.3g}")


def _embedded(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can close the element or begin another."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
