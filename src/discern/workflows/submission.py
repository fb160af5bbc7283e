"""The predictions of a seed as the zip that the GLUE site takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.records import parse_json, read_text, understood
from discern.tasks.readers.glue import GLUE
from discern.tasks.submission import SUBMISSION_FILES, write_submission
from discern.workflows.finetune_seed import Plan, predict_split
from discern.workflows.finetuned import load_finetuned, predictions_file, seed_folder


def check_submission(tasks: Sequence[str]) -> None:
    """Raise a ConfigError, before any training, where no task is one of GLUE."""
    if not any(name in GLUE for name in tasks):
        raise ConfigError(
            f"--submission is for tasks of GLUE, not for {', '.join(tasks) or 'files of your own'}",
            hint=f"--task {' or '.join(GLUE)}",
        )


def check_rows(plan: Plan) -> None:
    """Raise a DataError, before any training, where a test file is not the official one."""
    rows = {(file.task, file.split): file.rows for file in SUBMISSION_FILES}
    for name, data in plan.data.items():
        for split, part in data.unlabelled.items():
            expected, found = rows.get((name, split)), len(part.examples)
            if expected is not None and expected != found:
                raise DataError(
                    f"{data.files[split]} has {found:,} rows, the official {split} file of {name} {expected:,}",
                    hint="--submission needs the whole test files of GLUE; take this one out of --data to have it filled up",
                )


def submit(plan: Plan, seed: int, folder: Path, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Write the zip; gives where it is, and which of its files hold predictions and which the majority answer.

    Test files that the seed has not predicted, having been trained without --submission, are predicted now.

    Raises:
        DataError: no seed has weights to predict with.
    """
    files = {(file.task, file.split) for file in SUBMISSION_FILES}
    answers: dict[tuple[str, str], list[str | float]] = {}
    for name, data in plan.data.items():
        splits = [split for split in data.unlabelled if (name, split) in files]
        for split in splits:
            answers[name, split] = _answers(plan, seed, name, split, device)
        if name in GLUE and not splits:
            progress.note(f"{name}: no test file, so the submission has the majority answer for it")
    written = write_submission(folder, answers)
    progress.note(f"wrote {written.path}: predictions for {', '.join(written.predicted) or 'nothing'}")
    progress.note(f"the majority answer for {', '.join(written.filled)}")
    return {"submission": str(written.path), "submitted": list(written.predicted), "majority": list(written.filled)}


def _answers(plan: Plan, seed: int, task: str, split: str, device: torch.device) -> list[str | float]:
    path = predictions_file(seed_folder(plan.out, seed), task, split)
    if not path.is_file():
        predict_split(plan, load_finetuned(plan.out, seed).objective.to(device), task, split, path)
    hint = f"remove {path}, then run the same command: it is written again"
    lines = read_text(path, hint=hint).splitlines()
    with understood(path, hint=hint):
        said = [parse_json(line, path, hint=hint) for line in lines]
        return [each["label"] if "label" in each else each["score"] for each in said]
