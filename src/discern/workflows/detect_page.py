"""What a detector says of some texts as an HTML page, with what its generator would have put at every place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from discern.artifacts.files import whole_file
from discern.progress import Progress
from discern.report.detection import DetectionPage, JudgedText, PlaceProposals, render_detections
from discern.report.shading import ShadedText
from discern.scoring.detection import Detection
from discern.scoring.proposals import Proposals, propose
from discern.workflows.detect import DetectionModel
from discern.workflows.detect_calibrate import ChosenThreshold
from discern.workflows.detect_input import InputText

BEST = 5
# A browser is slow with more; and a generator may need a pass for every token.
MOST_TOKENS, MOST_TEXTS = 20_000, 5_000


class PageTexts:
    """Gathers texts for a page until it is full.

    Attributes:
        kept: those that the page shows.
        left_out: how many more there were.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[InputText, Detection]] = []
        self.left_out = 0
        self._tokens = 0

    def add(self, text: InputText, detection: Detection) -> None:
        """Take it in, if there is room; the first always is."""
        self._tokens += len(detection.tokens)
        full = self.left_out or self._tokens > MOST_TOKENS or len(self.kept) >= MOST_TEXTS
        if self.kept and full:
            self.left_out += 1
        else:
            self.kept.append((text, detection))


def write_page(
    out: Path,
    name: str,
    model: DetectionModel,
    texts: PageTexts,
    threshold: ChosenThreshold,
    progress: Progress,
    warn: Callable[[str], None],
) -> None:
    """Write the page; it appears whole or not at all.

    Args:
        name: of the model, as the page calls it.
        warn: told where some texts have no room.

    Raises:
        DataError: the file cannot be written.
    """
    proposals = _proposals(model, [detection for _, detection in texts.kept], progress)
    judged = [
        JudgedText(f"{text.number}", ShadedText(found.text, found.offsets, found.replaced_probability), said)
        for (text, found), said in zip(texts.kept, proposals, strict=True)
    ]
    notes = []
    if texts.left_out:
        warn(f"{out} shows the first {len(texts.kept):,} texts; {texts.left_out:,} more have no room on a page")
        notes.append(f"This page shows the first {len(texts.kept):,} texts; {texts.left_out:,} more have no room on it.")
    tokens = [probability for _, found in texts.kept for probability in found.replaced_probability]
    facts = [
        ("Model", name),
        ("Texts", f"{len(texts.kept):,}"),
        ("Tokens", f"{len(tokens):,}"),
        ("Marked", f"{sum(probability >= threshold.value for probability in tokens):,}"),
        ("Threshold", f"{threshold.value:.3g} ({threshold.described})"),
        ("Generator", "asked at every place" if model.proposer else "none came with the model"),
    ]
    page = DetectionPage(f"Which tokens look replaced: {name}", facts, judged, threshold.value, [*notes, _NOTE])
    with whole_file(out) as file:
        file.write(render_detections(page))


_NOTE = (
    "A probability is the discriminator's: that the token is not the one that stood there. It says how unusual a token is to "
    "this model, in this context; names and rare words may be right and look replaced. What the generator would put is told "
    "from all other tokens of the text, likeliest first."
)


def _proposals(
    model: DetectionModel, found: Sequence[Detection], progress: Progress
) -> Sequence[Sequence[PlaceProposals] | None]:
    """Of each token of each text; None for texts where there is no generator."""
    if model.proposer is None:
        return [None] * len(found)
    tokenizer = model.detector.tokenizer
    encodings = tokenizer.encode_batch([each.text for each in found], add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    progress.start("asking the generator", sum(map(len, ids)), "tokens")
    try:
        said = propose(model.proposer, ids, model.proposer_room, BEST, progress.advance)
    finally:
        progress.finish()
    return [[_place(tokenizer, each) for each in text] for text in said]


def _place(tokenizer: Tokenizer, said: Proposals) -> PlaceProposals:
    best = [(shown(tokenizer, number), value) for number, value in zip(said.ids, said.probabilities, strict=True)]
    return PlaceProposals(best, said.own)


def shown(tokenizer: Tokenizer, number: int) -> str:
    """A token as people read it: bytes and word marks decoded where that gives text, `##` left where a word goes on."""
    text = str(tokenizer.decode([number], skip_special_tokens=False)).strip()
    return text if text and "\ufffd" not in text else str(tokenizer.id_to_token(number))
