"""The command `discern detect`: check texts one by one, and write the results to a file or a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.data.tokenizer import TokenTexts
from discern.data.tokenizer.plain_text import encode_texts
from discern.errors import ConfigError
from discern.inference.calibration import ChosenThreshold, chosen_threshold
from discern.inference.detection import Detection, DetectionModel, detect_each, load_detection_model, load_detector
from discern.inference.proposals import Proposals, propose
from discern.inference.texts import InputText
from discern.progress import Progress
from discern.report.detection_page import CheckedText, DetectionPage, PlaceProposals, render_detections
from discern.report.page import ShadedText
from discern.storage.files import whole_file
from discern.storage.output import check_output

Show = Callable[[InputText, Detection, ChosenThreshold], None]


@dataclass(frozen=True)
class Detected:
    """Counts of a `discern detect`.

    Attributes:
        texts, tokens: number of texts and number of tokens.
        marked: number of tokens whose probability reaches the threshold.
        threshold: threshold that was used.
    """

    texts: int
    tokens: int
    marked: int
    threshold: ChosenThreshold


def detect_texts(
    model: Path,
    texts: Iterable[InputText],
    show: Show,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    threshold: float | None = None,
    out: Path | None = None,
    page: Path | None = None,
    source: Path | None = None,
    device: str = "auto",
) -> Detected:
    """Detect replaced tokens in texts, in order, in float32. Memory is bounded, unless a page is written.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        texts: read once, in order.
        show: called with the result of each text.
        warn: called with messages about texts that are read in several windows, damaged checkpoints that were skipped, and an
            outdated threshold.
        threshold: probability from which a token is marked; None: the calibrated one, or one half.
        out: JSON lines file to write.
        page: HTML file to write.
        source: file that the texts come from, which must not be overwritten.

    Raises:
        ConfigError: the model has no discriminator, or `out` or `page` is a folder or the input.
        DataError: the folder has no model or no tokenizer, or the texts cannot be read; nothing is left of `out` and `page`.
        CheckpointError: the weights are missing or damaged.
    """
    check_output("--out", out, "found.jsonl", model, source)
    check_output("--html", page, "page.html", model, source)
    if out is not None and page is not None and out.resolve() == page.resolve():
        raise ConfigError(f"--out and --html both name {out}", hint="give the page another name")
    with_generator = load_detection_model(model, warn, device) if page is not None else None
    detector = load_detector(model, warn, device) if with_generator is None else with_generator.detector
    chosen = chosen_threshold(model, detector, threshold, warn)
    page_texts = PageTexts()
    num_texts = tokens = marked = 0
    with ExitStack() as stack:
        file = stack.enter_context(whole_file(out)) if out is not None else None
        for text, found in detect_each(detector, texts, progress, warn):
            num_texts, tokens = num_texts + 1, tokens + len(found.tokens)
            marked += sum(probability >= chosen.value for probability in found.replaced_probability)
            show(text, found, chosen)
            if file is not None:
                line = {"line": text.number, "text": found.text, **detection_values(found, chosen.value)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if with_generator is not None:
                page_texts.add(text, found)
    if page is not None and with_generator is not None:
        write_page(page, model.resolve().name, with_generator, page_texts, chosen, progress, warn)
    return Detected(num_texts, tokens, marked, chosen)


def detection_values(detection: Detection, threshold: float) -> dict[str, Any]:
    """The result for a text, as in `--json`."""
    return {
        "tokens": detection.tokens,
        "offsets": detection.offsets,
        "replaced_probability": detection.replaced_probability,
        "marked": [probability >= threshold for probability in detection.replaced_probability],
        "threshold": threshold,
    }


NUM_PROPOSALS = 5
# More would make a browser slow, and a generator may need one forward pass per token.
MAX_TOKENS, MAX_TEXTS = 20_000, 5_000


class PageTexts:
    """Collects the texts of a page until it is full.

    Attributes:
        kept: texts that the page shows, with their results.
        left_out: number of further texts.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[InputText, Detection]] = []
        self.left_out = 0
        self._tokens = 0

    def add(self, text: InputText, detection: Detection) -> None:
        """Add a text if there is room; there always is for the first one."""
        self._tokens += len(detection.tokens)
        full = self.left_out or self._tokens > MAX_TOKENS or len(self.kept) >= MAX_TEXTS
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
    """Write the page, completely or not at all.

    Args:
        name: name of the model on the page.
        warn: called if some texts have no room.

    Raises:
        DataError: the file cannot be written.
    """
    proposals = _proposals(model, [detection for _, detection in texts.kept], progress)
    checked = [
        CheckedText(f"{text.number}", ShadedText(found.text, found.offsets, found.replaced_probability), proposed)
        for (text, found), proposed in zip(texts.kept, proposals, strict=True)
    ]
    notes = []
    if texts.left_out:
        warn(f"{out} shows the first {len(texts.kept):,} texts; {texts.left_out:,} more do not fit on a page")
        notes.append(f"This page shows the first {len(texts.kept):,} texts; {texts.left_out:,} more do not fit on it.")
    tokens = [probability for _, found in texts.kept for probability in found.replaced_probability]
    facts = [
        ("Model", name),
        ("Texts", f"{len(texts.kept):,}"),
        ("Tokens", f"{len(tokens):,}"),
        ("Marked", f"{sum(probability >= threshold.value for probability in tokens):,}"),
        ("Threshold", f"{threshold.value:.3g} ({threshold.described})"),
        ("Generator", "predicts every token" if model.proposer else "not part of the model"),
    ]
    page = DetectionPage(f"Which tokens look replaced: {name}", facts, checked, threshold.value, [*notes, _NOTE])
    with whole_file(out) as file:
        file.write(render_detections(page))


_NOTE = (
    "The probability is the discriminator's estimate that a token is not the original one. It shows how unusual the token is in "
    "this context for this model; correct names and rare words may look replaced. The generator predicts each token from all "
    "other tokens of the text; its likeliest tokens come first."
)


def _proposals(
    model: DetectionModel, found: Sequence[Detection], progress: Progress
) -> Sequence[Sequence[PlaceProposals] | None]:
    """Proposals for each token of each text; None for each text without a generator."""
    if model.proposer is None:
        return [None] * len(found)
    tokenizer = model.detector.tokenizer
    encodings = encode_texts(tokenizer, [each.text for each in found])
    ids = [encoding.ids for encoding in encodings]
    progress.start("asking the generator", sum(map(len, ids)), "tokens")
    try:
        proposed = propose(model.proposer, ids, model.proposer_window, NUM_PROPOSALS, progress.advance)
    finally:
        progress.finish()
    texts = TokenTexts(tokenizer)
    return [[_place(texts, each) for each in text] for text in proposed]


def _place(texts: TokenTexts, proposals: Proposals) -> PlaceProposals:
    best = [(texts.shown(number), value) for number, value in zip(proposals.ids, proposals.probabilities, strict=True)]
    return PlaceProposals(best, proposals.own)
