"""What `discern detect` does with texts: judge them one after the other, show or write what was found, make a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.files import whole_file
from discern.artifacts.guard import check_output
from discern.errors import ConfigError
from discern.progress import Progress
from discern.scoring.detection import Detection
from discern.workflows.detect import detect_each, load_detection_model, load_detector
from discern.workflows.detect_calibrate import ChosenThreshold, chosen_threshold
from discern.workflows.detect_input import InputText
from discern.workflows.detect_page import PageTexts, write_page

Show = Callable[[InputText, Detection, ChosenThreshold], None]


@dataclass(frozen=True)
class DetectRequest:
    """What to judge, and where to leave what was found.

    Attributes:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        texts: read once, in order.
        source: file that they come from; None: none.
        threshold: probability from which a token is marked; None: the calibrated one, or one half.
        out: file of JSON lines; None: none.
        page: HTML file; None: none.
    """

    model: Path
    texts: Iterable[InputText]
    threshold: float | None = None
    out: Path | None = None
    page: Path | None = None
    source: Path | None = None


@dataclass(frozen=True)
class Detected:
    """How much was judged.

    Attributes:
        texts, tokens: how many.
        marked: tokens from the threshold on.
        threshold: that was gone by.
    """

    texts: int
    tokens: int
    marked: int
    threshold: ChosenThreshold


def detect_texts(request: DetectRequest, show: Show, progress: Progress, warn: Callable[[str], None]) -> Detected:
    """Judge texts in order, computed in float32; some hundreds are held at a time, unless a page is made of them.

    Args:
        show: told of each.
        warn: told of texts in several windows, of damaged checkpoints that were passed over, and of a threshold that is stale.

    Raises:
        ConfigError: the model has no discriminator, or `out` or `page` is a folder, or the input.
        DataError: no model or no tokenizer there, or the texts cannot be read; nothing is left of `out` and `page`.
        CheckpointError: the model's weights are missing or damaged.
    """
    check_output("--out", request.out, "found.jsonl", request.model, request.source)
    check_output("--html", request.page, "page.html", request.model, request.source)
    if request.out is not None and request.page is not None and request.out.resolve() == request.page.resolve():
        raise ConfigError(f"--out and --html both name {request.out}", hint="give the page another name")
    model = load_detection_model(request.model, warn) if request.page is not None else None
    detector = load_detector(request.model, warn) if model is None else model.detector
    threshold = chosen_threshold(request.model, detector, request.threshold, warn)
    gathered = PageTexts()
    texts = tokens = marked = 0
    with ExitStack() as stack:
        file = stack.enter_context(whole_file(request.out)) if request.out is not None else None
        for text, found in detect_each(detector, request.texts, progress, warn):
            texts, tokens = texts + 1, tokens + len(found.tokens)
            marked += sum(probability >= threshold.value for probability in found.replaced_probability)
            show(text, found, threshold)
            if file is not None:
                line = {"line": text.number, "text": found.text, **detection_values(found, threshold.value)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            if model is not None:
                gathered.add(text, found)
    if request.page is not None and model is not None:
        write_page(request.page, request.model.resolve().name, model, gathered, threshold, progress, warn)
    return Detected(texts, tokens, marked, threshold)


def detection_values(detection: Detection, threshold: float) -> dict[str, Any]:
    """What was found in a text, as JSON has it."""
    return {
        "tokens": detection.tokens,
        "offsets": detection.offsets,
        "replaced_probability": detection.replaced_probability,
        "marked": [probability >= threshold for probability in detection.replaced_probability],
        "threshold": threshold,
    }
