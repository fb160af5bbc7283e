"""Evaluate a detector on sentences whose wrong words are marked: precision, recall and F1 over words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from discern.errors import DataError
from discern.inference.detection import Detection, chosen_threshold, detect_each, load_detector
from discern.inference.texts import Span, overlapping, read_checked, words_of
from discern.inference.threshold_curve import ThresholdCurve
from discern.objectives.metrics import area_under_curve
from discern.progress import Progress
from discern.wording import counted

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def evaluate_detection(
    model: Path,
    sentences: Path,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    text_field: str | None = None,
    threshold: float | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Precision, recall and F1 by word, at many thresholds and at the model's own.

    The probability of a word is the highest of its tokens. `auc` is None if every word is wrong.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA discriminator.
        sentences: file as in `read_checked`; `-` is standard input.
        text_field: field of JSON lines, as in `read_checked`.
        threshold: threshold to report besides the usual ones; None: the calibrated one, or one half.

    Raises:
        ConfigError: the model has no discriminator.
        DataError: the folder has no model, or the file has no sentence, no wrong word, or a line that cannot be read.
        CheckpointError: the weights are missing or damaged.
    """
    detector = load_detector(model, warn, device)
    chosen = chosen_threshold(model, detector, threshold, warn)
    num_sentences, probabilities, wrong, kinds = 0, list[float](), list[bool](), list[tuple[str, float]]()
    for checked, detection in detect_each(detector, read_checked(sentences, text_field), progress, warn):
        words = words_of(checked.text)
        by_word = word_probabilities(detection, words)
        is_wrong = [False] * len(words)
        # A word is wrong if it shares a character with a wrong span.
        for span in checked.wrong:
            touched = overlapping(words, (span.start, span.end))
            for number in touched:
                is_wrong[number] = True
            kinds.append((span.kind, max(by_word[number] for number in touched)))
        num_sentences += 1
        probabilities += by_word
        wrong += is_wrong
    name = "standard input" if str(sentences) == "-" else sentences
    if not any(wrong):
        contents = "no sentences" if not num_sentences else f"{counted(num_sentences, 'sentence')} but no wrong words"
        raise DataError(f"{name} has {contents}", hint="mark what is wrong: The chef [[eight]] it.")
    curve = ThresholdCurve(probabilities, wrong)
    best = curve.best_f1()
    area = area_under_curve(np.array(probabilities, np.float32), np.array(wrong))
    return {
        "sentences": num_sentences,
        "words": len(wrong),
        "wrong": sum(wrong),
        "auc": None if all(wrong) else area,
        "threshold": chosen.value,
        "threshold_origin": chosen.origin,
        "at_threshold": vars(curve.at(chosen.value)),
        "best_f1": None if best is None else vars(best),
        "thresholds": [vars(curve.at(value)) for value in THRESHOLDS],
        "by_kind": _by_kind(kinds, chosen.value),
    }


def word_probabilities(detection: Detection, words: Sequence[Span]) -> list[float]:
    """The highest probability among the tokens of each word; 0 for a word that the tokenizer drops.

    Args:
        words: words of the detection's text, in order, not overlapping.
    """
    found = [0.0] * len(words)
    first = 0
    for (start, end), probability in zip(detection.offsets, detection.replaced_probability, strict=True):
        while first < len(words) and words[first][1] <= start:
            first += 1
        word = first
        while word < len(words) and words[word][0] < end:
            if words[word][1] > start and end > start:
                found[word] = max(found[word], probability)
            word += 1
    return found


def _by_kind(kinds: Sequence[tuple[str, float]], threshold: float) -> dict[str, dict[str, float | int]]:
    """Fraction of the wrong spans of each kind that have a marked word; empty if the file names no kinds."""
    if not any(kind for kind, _ in kinds):
        return {}
    total = Counter(kind for kind, _ in kinds)
    found = Counter(kind for kind, probability in kinds if probability >= threshold)
    return {kind: {"wrong": total[kind], "recall": found[kind] / total[kind]} for kind in sorted(total)}
