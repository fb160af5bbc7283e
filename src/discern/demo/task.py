"""The demonstration's labeled task: does a documentation string describe a module, a class or a function?"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from discern.finetuning.run import finetune
from discern.progress import Progress
from discern.storage.files import write_text

# Per kind, for training and for evaluation: few, because pre-training matters most with few labels.
_OF_EACH_KIND = 200
_LONGEST = 200
SEEDS = 3
_SETTINGS = ("finetune.epochs=5", "files.text=text", "files.label=kind", "task.sequence_length=32")


@dataclass(frozen=True)
class LabeledTask:
    """The benefit of pre-training on a labeled task.

    Attributes:
        examples: number of training examples.
        pretrained: results of `finetune` for the pre-trained network.
        untrained: the same for a network of its sizes with random weights.
    """

    examples: int
    pretrained: dict[str, Any]
    untrained: dict[str, Any]

    @property
    def difference(self) -> float:
        """Difference of the medians; positive if pre-training helped."""
        return float(self.pretrained["median"] - self.untrained["median"])

    @property
    def verdict(self) -> str:
        """The conclusion that the seeds allow."""
        if self.pretrained["worst"] > self.untrained["best"]:
            return "every pre-trained seed is above every untrained one"
        if self.pretrained["best"] < self.untrained["worst"]:
            return "every pre-trained seed is below every untrained one"
        return "no difference: the seeds of the two overlap"


def labeled_task(out: Path, step: int, progress: Progress, overrides: tuple[str, ...] = ()) -> LabeledTask | None:
    """Fine-tune the demonstration's run and an untrained network, three seeds each; None if there is too little text.

    Args:
        out: folder of the demonstration, with its text and its run.
        step: step of the run; after more training it is another model, which is fine-tuned in another folder.
    """
    folder = out / "task"
    files = {split: folder / f"{split}.csv" for split in ("train", "dev")}
    if not all(path.is_file() for path in files.values()):
        kinds = _kinds(out / "text.jsonl")
        if len(kinds) < 2 or min(map(len, kinds.values())) < 10:
            return None
        folder.mkdir(exist_ok=True)
        for split, path in files.items():
            write_text(path, _table(kinds, 0 if split == "train" else 1))
    paths = (f"files.{split}={json.dumps(str(path), ensure_ascii=False)}" for split, path in files.items())
    settings = (*paths, *_SETTINGS, *overrides)
    results = [
        finetune(
            str(out / "run"),
            out=folder / name,
            overrides=settings,
            seeds=SEEDS,
            untrained=untrained,
            baselines=not untrained,
            progress=progress,
        )
        for name, untrained in ((f"pretrained-{step}", False), ("untrained", True))
    ]
    return LabeledTask(results[0]["train_examples"], results[0], results[1])


def _kinds(text: Path) -> dict[str, list[str]]:
    """First paragraphs by the kind of object they document, in an order that depends on the texts alone."""
    found: dict[str, list[str]] = {}
    for kind, paragraph in _labeled(text):
        found.setdefault(kind, []).append(paragraph)
    for paragraphs in found.values():
        paragraphs.sort(key=lambda paragraph: blake2b(paragraph.encode(), digest_size=8).digest())
    return found


def _labeled(text: Path) -> Iterator[tuple[str, str]]:
    with text.open(encoding="utf-8") as stream:
        for line in stream:
            record = json.loads(line)
            if "kind" in record:
                yield record["kind"], record["text"].partition("\n")[0][:_LONGEST]


def _table(kinds: dict[str, list[str]], part: int) -> str:
    """One half of the examples as CSV, with equally many of each kind."""
    each = min(_OF_EACH_KIND, *(len(paragraphs) // 2 for paragraphs in kinds.values()))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["text", "kind"])
    for kind in sorted(kinds):
        writer.writerows([paragraph, kind] for paragraph in kinds[kind][part * each : (part + 1) * each])
    return stream.getvalue()
