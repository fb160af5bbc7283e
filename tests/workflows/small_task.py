"""A labelled file of three sentences, and a fine-tuning on it that takes a second."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from discern.progress import Silent
from discern.workflows.finetune import FinetuneRequest, finetune

ROWS = [("the model reads the file", "good"), ("a tensor of shape", "bad"), ("returns none", "so-so")]
FAST = ("train.max_steps=60", "optimizer.learning_rate=3e-3", "finetune.dropout=0", "train.sequences_per_step=12")


def write_csv(path: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("review", "stars")) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def small_request(model: Path, folder: Path) -> FinetuneRequest:
    """Fine-tune a model on files in a folder, into its `out`."""
    train = write_csv(folder / "train.csv", ROWS * 20)
    dev = write_csv(folder / "dev.csv", ROWS * 4)
    files = (f"files.train='{train}'", f"files.dev='{dev}'", "files.text=review", "files.label=stars")
    return FinetuneRequest(str(model), folder / "out", overrides=(*files, *FAST))


def run(request: FinetuneRequest) -> dict[str, Any]:
    return finetune(request, Silent())
