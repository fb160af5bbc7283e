"""The predictions of a fine-tuned classifier, as a confusion matrix and a reliability diagram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.model_files.finetuned import predictions_file
from discern.report.charts import Chart, Line, reliability_chart
from discern.storage.checksums import read_lines, understood

_MOST_LABELS = 20  # a larger matrix cannot be read
_LARGEST_BYTES = 1 << 28
_BINS = 10


@dataclass(frozen=True)
class Judged:
    """A prediction with the correct label.

    Attributes:
        confidence: the probability of the predicted label.
    """

    gold: str
    predicted: str
    confidence: float


@dataclass(frozen=True)
class Confusion:
    """How often each label was predicted for each correct label.

    Attributes:
        rows: for each correct label, the counts of the predicted labels in the same order.
    """

    title: str
    labels: Sequence[str]
    rows: Sequence[Sequence[int]]
    note: str = ""

    def cells(self, row: int) -> list[tuple[int, str, str]]:
        """For each cell of a row: its count, its share of the row, and "right", "wrong" or "" if it is empty."""
        total = max(sum(self.rows[row]), 1)
        return [
            (count, f"{count / total:.3f}", "right" if row == column else "wrong" if count else "")
            for column, count in enumerate(self.rows[row])
        ]


def read_judged(seed: Path, task: str, mistakes: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """The predictions of a seed for a task with one label per example; empty if the task is another one.

    Every prediction that is not among the mistakes is correct.

    Args:
        seed: folder of the seed.
        mistakes: all mistakes of the seed.

    Raises:
        DataError: the predictions are damaged.
    """
    path = predictions_file(seed, task)
    if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
        return []
    hint = f"remove it for a page without these pictures; to create it again, remove {seed} and fine-tune again"
    found: list[Judged] = []
    ids: set[str] = set()
    with understood(path, hint=hint):
        gold = {str(each["id"]): str(each["gold"]) for each in mistakes if "id" in each and "gold" in each}
        if len(gold) < len(mistakes):
            return []
        for record in read_lines(path, hint=hint):
            if "label" not in record or "probabilities" not in record:
                return []
            label, identity = str(record["label"]), str(record["id"])
            found.append(Judged(gold.get(identity, label), label, float(record["probabilities"][record["label"]])))
            ids.add(identity)
    # With ids that repeat, a mistake could not be told from a correct prediction.
    return found if len(ids) == len(found) else []


def confusion(title: str, judged: Sequence[Judged]) -> Confusion | None:
    """The confusion matrix; None without predictions, or with more labels than can be read."""
    labels = sorted({each.gold for each in judged} | {each.predicted for each in judged})
    if len(labels) < 2 or len(labels) > _MOST_LABELS:
        return None
    place = {label: number for number, label in enumerate(labels)}
    rows = [[0] * len(labels) for _ in labels]
    for each in judged:
        rows[place[each.gold]][place[each.predicted]] += 1
    right = sum(rows[number][number] for number in range(len(labels)))
    return Confusion(title, labels, rows, f"{right:,} of {len(judged):,} predictions are correct: those on the diagonal.")


def reliability(title: str, judged: Sequence[Judged]) -> Chart | None:
    """Accuracy against confidence, in ten bins of equal width; None without predictions."""
    bins: list[list[Judged]] = [[] for _ in range(_BINS)]
    for each in judged:
        bins[min(int(each.confidence * _BINS), _BINS - 1)].append(each)
    filled = [each for each in bins if each]
    if not filled:
        return None
    sure = [sum(each.confidence for each in part) / len(part) for part in filled]
    right = [sum(each.gold == each.predicted for each in part) / len(part) for part in filled]
    error = sum(len(part) * abs(a - b) for part, a, b in zip(filled, sure, right, strict=True)) / len(judged)
    label = f"expected calibration error {error:.3f}"
    return reliability_chart(title, Line(label, sure, right), "confidence", "share correct")
