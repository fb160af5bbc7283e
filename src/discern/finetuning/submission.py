"""The zip file that the GLUE site accepts: one TSV file per task, complete, with the columns `index` and `prediction`.

The site refuses a zip that lacks a task. Tasks without predictions are filled with the most frequent answer of their training
data (for STS-B its mean), and listed, so that the site's average is not mistaken for a result.
Reference: gluebenchmark.com, FAQ "What should a submission look like?".
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from discern.errors import ConfigError, DataError
from discern.finetuning.plan import FinetunePlan
from discern.finetuning.run import predict_split
from discern.model_files.finetuned import FinetunedFolder, predictions_file, seed_folder
from discern.progress import Progress
from discern.storage.checksums import read_lines, understood, write_lines
from discern.storage.files import whole_binary_file

ARCHIVE_NAME = "submission.zip"


class SubmissionFile(NamedTuple):
    """A file of the zip.

    Attributes:
        task, split: the predictions that the file holds, by their names in `discern.tasks.named`.
        rows: size of the official test set.
        majority: the most frequent answer in the training data; for STS-B the mean score.
    """

    name: str
    task: str
    split: str
    rows: int
    majority: str


SUBMISSION_FILES = (
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


def check_submission(tasks: Sequence[str]) -> None:
    """Raise a ConfigError, before any training, if no task is one of GLUE."""
    glue = dict.fromkeys(file.task for file in SUBMISSION_FILES)
    if not glue.keys() & set(tasks):
        raise ConfigError(
            f"--submission is for tasks of GLUE, not for {', '.join(tasks) or 'files of your own'}",
            hint=f"--task {' or '.join(glue)}",
        )


def check_rows(plan: FinetunePlan) -> None:
    """Raise a DataError, before any training, if a test file is not the official one."""
    for file in SUBMISSION_FILES:
        split = plan.data[file.task].unlabeled.get(file.split) if file.task in plan.data else None
        if split is not None and len(split.examples) != file.rows:
            raise DataError(
                f"{plan.data[file.task].files[file.split]} has {len(split.examples):,} rows, but the official {file.split} file "
                f"of {file.task} has {file.rows:,}",
                hint="--submission needs the complete test files of GLUE; remove this one from --data to have it filled in",
            )


def submit(plan: FinetunePlan, seed: int, folder: Path, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Write the zip, and return its path and the names of the files with predictions and with the majority answer.

    Test files that were not predicted, because the seed was trained without --submission, are predicted now.

    Raises:
        DataError: no seed has weights to predict with.
    """
    answers: dict[str, list[str | float]] = {}
    for file in SUBMISSION_FILES:
        data = plan.data.get(file.task)
        if data is None or file.split not in data.unlabeled:
            continue
        path = predictions_file(seed_folder(plan.out, seed), file.task, file.split)
        hint = f"remove {path}, then run the same command to write it again"
        if not path.is_file():
            objective = FinetunedFolder(plan.out).task_model(seed).objective.to(device)
            write_lines(path, predict_split(objective, data, file.split)[0])
        with understood(path, hint=hint):
            predictions = read_lines(path, hint=hint)
            answers[file.name] = [each["label"] if "label" in each else each["score"] for each in predictions]
    path = write_submission(folder, answers)
    filled = [file.name for file in SUBMISSION_FILES if file.name not in answers]
    progress.note(f"wrote {path}: predictions for {', '.join(answers) or 'no task'}")
    progress.note(f"files filled in with the majority answer: {', '.join(filled)}")
    return {"submission": str(path), "submitted": list(answers), "majority": filled}


def write_submission(folder: Path, answers: Mapping[str, Sequence[str | float]]) -> Path:
    """Write `submission.zip` into a folder, which is created if needed, and return its path.

    An existing zip of that name is replaced. The same answers give the same bytes.

    Args:
        answers: by name of the file, in the order of the test file; classes as in the training files, STS-B on its scale from 0
            to 5, clipped to that range.
    """
    path = folder / ARCHIVE_NAME
    with whole_binary_file(path) as target, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in SUBMISSION_FILES:
            lines = ["index\tprediction"]
            for row, answer in enumerate(answers.get(file.name, [file.majority] * file.rows)):
                lines.append(f"{row}\t{f'{min(max(answer, 0.0), 5.0):.3f}' if isinstance(answer, float) else answer}")
            # A fixed date: by default an entry is dated by the day of writing, and the bytes would differ.
            entry = zipfile.ZipInfo(file.name, (1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, "\n".join([*lines, ""]), zipfile.ZIP_DEFLATED)
    return path
