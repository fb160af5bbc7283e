"""How well a detector finds the wrong words of sentences in which they are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from discern.errors import DataError
from discern.objectives.metrics import area_under_curve
from discern.progress import Progress
from discern.scoring.detection import Detection
from discern.scoring.thresholds import ThresholdCurve
from discern.scoring.words import overlapping, word_probabilities, words_of
from discern.workflows.detect import detect_each, load_detector
from discern.workflows.detect_calibrate import chosen_threshold, rate_values
from discern.workflows.detect_input import CheckedText, read_checked

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class EvaluateDetectionRequest:
    """What to evaluate on what.

    Attributes:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        sentences: as `read_checked` takes them; `-` is standard input.
        text_field: of JSON lines; None as of `read_checked`.
        threshold: to tell of besides the usual ones; None: the calibrated one, or one half.
    """

    model: Path
    sentences: Path
    text_field: str | None = None
    threshold: float | None = None


@dataclass
class _Words:
    """What is gathered of all words: a number and a truth each, and the kinds of the wrong ones."""

    sentences: int = 0
    probabilities: list[float] = field(default_factory=list)
    wrong: list[bool] = field(default_factory=list)
    kinds: list[tuple[str, float]] = field(default_factory=list)

    def add(self, checked: CheckedText, detection: Detection) -> None:
        """Take in a sentence. A word is wrong if it shares a character with a wrong span."""
        words = words_of(checked.text)
        probabilities = word_probabilities(detection, words)
        wrong = [False] * len(words)
        for span in checked.wrong:
            touched = overlapping(words, (span.start, span.end))
            for number in touched:
                wrong[number] = True
            self.kinds.append((span.kind, max(probabilities[number] for number in touched)))
        self.sentences += 1
        self.probabilities += probabilities
        self.wrong += wrong


def evaluate_detection(request: EvaluateDetectionRequest, progress: Progress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Precision, recall and F1 by word, at many thresholds and at the model's own; a word has its worst token's probability.

    `auc` is None where every word is wrong: there is nothing to rank them above.

    Raises:
        ConfigError: the model has no discriminator.
        DataError: the folder holds no model, or the file no sentence, no wrong word, or something else; with the line.
        CheckpointError: the model's weights are missing or damaged.
    """
    detector = load_detector(request.model, warn)
    threshold = chosen_threshold(request.model, detector, request.threshold, warn)
    gathered = _Words()
    for each, detection in detect_each(detector, read_checked(request.sentences, request.text_field), progress, warn):
        gathered.add(each, detection)
    name = "standard input" if str(request.sentences) == "-" else request.sentences
    if not any(gathered.wrong):
        held = "no sentence" if not gathered.sentences else f"{gathered.sentences:,} sentences and no wrong word"
        raise DataError(f"{name} holds {held}", hint="mark what is wrong: The chef [[eight]] it.")
    curve = ThresholdCurve(gathered.probabilities, gathered.wrong)
    best = curve.best_f1()
    area = area_under_curve(np.array(gathered.probabilities, np.float32), np.array(gathered.wrong))
    return {
        "sentences": gathered.sentences,
        "words": len(gathered.wrong),
        "wrong": sum(gathered.wrong),
        "auc": None if all(gathered.wrong) else area,
        "threshold": threshold.value,
        "threshold_origin": threshold.origin,
        "at_threshold": rate_values(curve.at(threshold.value)),
        "best_f1": rate_values(best) if best is not None else None,
        "thresholds": [rate_values(curve.at(value)) for value in THRESHOLDS],
        "by_kind": _by_kind(gathered.kinds, threshold.value),
    }


def _by_kind(kinds: Sequence[tuple[str, float]], threshold: float) -> dict[str, dict[str, float | int]]:
    """Share of the wrong spans of each kind that have a marked word; empty where the file names no kind."""
    if not any(kind for kind, _ in kinds):
        return {}
    total = Counter(kind for kind, _ in kinds)
    found = Counter(kind for kind, probability in kinds if probability >= threshold)
    return {kind: {"wrong": total[kind], "recall": found[kind] / total[kind]} for kind in sorted(total)}
