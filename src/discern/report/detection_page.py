"""The page of `discern detect --html`: shaded tokens, and the tokens that a generator predicts at their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from discern.report.page import ShadedPiece, ShadedText, embedded, package_text, render_template, script_hash, shaded_pieces

_TEMPLATE, _SCRIPT = "detection_page.html", "detection_page.js"


@dataclass(frozen=True)
class PlaceProposals:
    """The generator's predictions at the position of a token.

    Attributes:
        best: (token, probability) pairs, the most likely first.
        own: probability of the token in the text.
    """

    best: Sequence[tuple[str, float]]
    own: float


@dataclass(frozen=True)
class CheckedText:
    """A text on the page.

    Attributes:
        label: label shown beside the text, such as its line number.
        shaded: the text with its tokens.
        proposals: one for each token; None without a generator.
    """

    label: str
    shaded: ShadedText
    proposals: Sequence[PlaceProposals] | None = None


@dataclass(frozen=True)
class DetectionPage:
    """The contents of the page.

    Attributes:
        facts: (name, value) pairs for the head of the page.
        threshold: tokens of this probability or more are marked.
        notes: paragraphs below the texts.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    texts: Sequence[CheckedText]
    threshold: float
    notes: Sequence[str] = ()

    @property
    def has_proposals(self) -> bool:
        """Whether there are predictions of a generator."""
        return any(text.proposals is not None for text in self.texts)


def render_detections(page: DetectionPage) -> str:
    """The page as an HTML string. The same page gives the same string, and every text in it is escaped.

    The content security policy of the page allows only its own script, identified by its hash, and allows nothing to be fetched.
    """
    script = package_text(_SCRIPT)
    return render_template(
        _TEMPLATE,
        page=page,
        texts=[(text.label, text.shaded.text, shaded_pieces(text.shaded)) for text in page.texts],
        is_marked=lambda piece: _is_marked(piece, page.threshold),
        data=embedded([_places(text) for text in page.texts]),
        script=script,
        script_hash=script_hash(script),
    )


def _is_marked(piece: ShadedPiece, threshold: float) -> bool:
    return piece.probability is not None and piece.probability >= threshold


def _places(text: CheckedText) -> list[list[Any]] | None:
    """The data that the script reads for each token: [probability of the token itself, [[token, probability], ...]]."""
    if text.proposals is None:
        return None
    return [[_short(place.own), [[token, _short(value)] for token, value in place.best]] for place in text.proposals]


def _short(probability: float) -> float:
    return float(f"{probability:.3g}")
