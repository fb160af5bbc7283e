"""The page of `discern detect --html`: shaded tokens, and the tokens that a generator predicts at their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from discern.report.page import Page, package_text, render_template, script_hash, shaded_pieces


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
        offsets: (start, end) of each token in the text, in characters.
        probabilities: for each token, the probability that it was replaced.
        proposals: one for each token; None without a generator.
    """

    label: str
    text: str
    offsets: Sequence[tuple[int, int]]
    probabilities: Sequence[float]
    proposals: Sequence[PlaceProposals] | None = None


def render_detections(
    title: str, facts: Sequence[tuple[str, str]], texts: Sequence[CheckedText], threshold: float, notes: Sequence[str] = ()
) -> str:
    """The page as an HTML string. The same texts give the same string, and every text in it is escaped.

    The content security policy of the page allows only its own script, identified by its hash, and allows nothing to be fetched.

    Args:
        facts: (name, value) pairs for the head of the page.
        threshold: tokens of this probability or more are marked.
        notes: paragraphs below the texts.
    """
    script = package_text("detection_page.js")
    # For each token: [probability of the token itself, [[token, probability], ...]]; null for a text without proposals.
    predictions = [
        [[round(proposals.own, 4), [[token, round(p, 4)] for token, p in proposals.best]] for proposals in text.proposals]
        if text.proposals is not None
        else None
        for text in texts
    ]
    return render_template(
        "detection_page.html",
        page=Page(title, facts=facts, notes=notes),
        texts=[(text.label, text.text, shaded_pieces(text.text, text.offsets, text.probabilities)) for text in texts],
        threshold=threshold,
        has_proposals=any(predictions),
        data=predictions,
        script=script,
        script_hash=script_hash(script),
    )
