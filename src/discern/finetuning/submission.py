"""The zip file that the GLUE site accepts: one TSV file per task, complete, with the columns `index` and `prediction`.

The site refuses a zip that lacks a task. Tasks without predictions are filled with the most frequent answer of their training
data (for STS-B its mean), and listed, so that the site's average is not mistaken for a result.
Reference: gluebenchmark.com, FAQ "What should a submission look like?".
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from discern.errors import ConfigError, DataError, did_you_mean
from discern.finetuning.seed import FinetunePlan, predict_split
from discern.model_files.finetuned import FinetunedFolder, predictions_file, seed_folder
from discern.progress import Progress
from discern.storage.checksums import parse_json, read_lines, understood
from discern.storage.files import whole_binary_file
from discern.tasks.glue import GLUE


def check_submission(tasks: Sequence[str]) -> None:
    """Raise a ConfigError, before any training, if no task is one of GLUE."""
    if not any(name in GLUE for name in tasks):
        raise ConfigError(
            f"--submission is for tasks of GLUE, not for {', '.join(tasks) or 'files of your own'}",
            hint=f"--task {' or '.join(GLUE)}",
        )


def check_rows(plan: FinetunePlan) -> None:
    """Raise a DataError, before any training, if a test file is not the official one."""
    rows = {(file.task, file.split): file.rows for file in SUBMISSION_FILES}
    for name, data in plan.data.items():
        for split, part in data.unlabeled.items():
            expected, found = rows.get((name, split)), len(part.examples)
            if expected is not None and expected != found:
                raise DataError(
                    f"{data.files[split]} has {found:,} rows, but the official {split} file of {name} has {expected:,}",
                    hint="--submission needs the complete test files of GLUE; remove this one from --data to have it filled in",
                )


def submit(plan: FinetunePlan, seed: int, folder: Path, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Write the zip, and return its path and the names of the files with predictions and with the majority answer.

    Test files that were not predicted, because the seed was trained without --submission, are predicted now.

    Raises:
        DataError: no seed has weights to predict with.
    """
    files = {(file.task, file.split) for file in SUBMISSION_FILES}
    answers: dict[tuple[str, str], list[str | float]] = {}
    for name, data in plan.data.items():
        splits = [split for split in data.unlabeled if (name, split) in files]
        for split in splits:
            answers[name, split] = _answers(plan, seed, name, split, device)
        if name in GLUE and not splits:
            progress.note(f"{name}: no test file, so the submission contains the majority answer for this task")
    written = write_submission(folder, answers)
    predicted = f"predictions for {', '.join(written.predicted)}" if written.predicted else "no predictions"
    progress.note(f"wrote {written.path}: {predicted}")
    progress.note(f"files filled in with the majority answer: {', '.join(written.filled)}")
    return {"submission": str(written.path), "submitted": list(written.predicted), "majority": list(written.filled)}


def _answers(plan: FinetunePlan, seed: int, task: str, split: str, device: torch.device) -> list[str | float]:
    path = predictions_file(seed_folder(plan.out, seed), task, split)
    if not path.is_file():
        predict_split(plan, FinetunedFolder(plan.out).task_model(seed).objective.to(device), task, split, path)
    hint = f"remove {path}, then run the same command to write it again"
    lines = read_lines(path, hint=hint)
    with understood(path, hint=hint):
        predictions = [parse_json(line, path, hint=hint) for line in lines]
        return [each["label"] if "label" in each else each["score"] for each in predictions]


ARCHIVE_NAME = "submission.zip"


@dataclass(frozen=True, slots=True)
class SubmissionFile:
    """A file of the zip.

    Attributes:
        task, split: the predictions that the file holds, by the names of `discern.tasks.glue`.
        rows: size of the official test set.
        majority: the most frequent answer in the training data; for STS-B the mean score.
    """

    name: str
    task: str
    split: str
    rows: int
    majority: str


SUBMISSION_FILES: tuple[SubmissionFile, ...] = (
    SubmissionFile("CoLA.tsv", "cola", "test", 1063, "1"),
    SubmissionFile("SST-2.tsv", "sst2", "test", 1821, "1"),
    SubmissionFile("MRPC.tsv", "mrpc", "test", 1725, "1"),
    SubmissionFile("STS-B.tsv", "stsb", "test", 1379, "2.701"),
    SubmissionFile("QQP.tsv", "qqp", "test", 390_965, "0"),
    SubmissionFile("MNLI-m.tsv", "mnli", "test", 9796, "entailment"),
    SubmissionFile("MNLI-mm.tsv", "mnli", "test_mismatched", 9847, "entailment"),
    SubmissionFile("QNLI.tsv", "qnli", "test", 5463, "entailment"),
    SubmissionFile("RTE.tsv", "rte", "test", 3000, "entailment"),
    SubmissionFile("WNLI.tsv", "wnli", "test", 146, "0"),
    SubmissionFile("AX.tsv", "mnli", "diagnostic", 1104, "entailment"),
)


@dataclass(frozen=True, slots=True)
class Submission:
    """A zip file that was written.

    Attributes:
        predicted: names of the files with predictions.
        filled: names of the files filled with the majority answer.
    """

    path: Path
    predicted: tuple[str, ...]
    filled: tuple[str, ...]


def write_submission(folder: Path, predictions: Mapping[tuple[str, str], Sequence[str | float]]) -> Submission:
    """Write `submission.zip` into a folder, which is created if needed. An existing zip of that name is replaced.

    The same predictions give the same bytes.

    Args:
        predictions: by task and split, in the order of the test file; classes as in the training files, STS-B on its scale
            from 0 to 5, clipped to that range.

    Raises:
        ConfigError: GLUE's submission has no file for a task and split.
        DataError: the number of predictions is not that of the test set, or a prediction is not a label of the task; nothing has
            been written.
    """
    files = {(file.task, file.split): file for file in SUBMISSION_FILES}
    for task, split in predictions:
        if (task, split) not in files:
            known = [f"{task} {split}" for task, split in files]
            raise ConfigError(f"GLUE's submission has no file for {task} {split}", hint=did_you_mean(f"{task} {split}", known))
    contents = {
        file.name: _content(file, predictions.get((file.task, file.split), [file.majority] * file.rows))
        for file in SUBMISSION_FILES
    }
    path = folder / ARCHIVE_NAME
    with whole_binary_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            # A fixed date: by default an entry is dated by the day of writing, and the bytes would differ.
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    given = tuple(file.name for file in SUBMISSION_FILES if (file.task, file.split) in predictions)
    return Submission(path, given, tuple(file.name for file in SUBMISSION_FILES if file.name not in given))


def _content(file: SubmissionFile, answers: Sequence[str | float]) -> str:
    if len(answers) != file.rows:
        raise DataError(
            f"{file.name}: {len(answers):,} predictions, but the official test set of {file.task} has {file.rows:,} rows",
            hint=f"predict the whole of GLUE's {GLUE[file.task].folder} {file.split} file, or leave the task out",
        )
    lines = [f"{place}\t{_answer(file, place, answer)}" for place, answer in enumerate(answers)]
    return "\n".join(["index\tprediction", *lines, ""])


def _answer(file: SubmissionFile, place: int, answer: str | float) -> str:
    labels = GLUE[file.task].labels
    if labels:
        if answer in labels:
            return str(answer)
        raise DataError(f"{file.name}: prediction {place} is {answer!r}", hint=f"expected one of {', '.join(labels)}")
    try:
        score = float(answer)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{file.name}: prediction {place} is {answer!r}", hint="expected a number from 0 to 5")
    return f"{min(max(score, 0.0), 5.0):.3f}"
