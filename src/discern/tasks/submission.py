"""The zip file that the GLUE site takes: a TSV file a task, complete, each `index<TAB>prediction` below that header.

The site refuses a zip that lacks a task. Tasks without predictions are filled with the answer that is most frequent in their
training data (for STS-B its mean), and named, so that nobody takes the site's average for a result.
Reference: gluebenchmark.com, FAQ "What should a submission look like?".
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from discern.artifacts.files import whole_binary_file
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.readers.glue import GLUE

ARCHIVE_NAME = "submission.zip"


@dataclass(frozen=True, slots=True)
class SubmissionFile:
    """A file of the zip.

    Attributes:
        task, split: whose predictions it holds, as `discern.tasks.readers.glue` names them.
        rows: how many the official test set has.
        majority: the most frequent answer in the training data; STS-B's is the mean score.
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
    """A zip that was written.

    Attributes:
        predicted: names of the files with predictions.
        filled: names of the files filled with the majority answer.
    """

    path: Path
    predicted: tuple[str, ...]
    filled: tuple[str, ...]


def write_submission(folder: Path, predictions: Mapping[tuple[str, str], Sequence[str | float]]) -> Submission:
    """Write `submission.zip` into a folder, which is made if need be; a zip of that name is replaced.

    The same predictions give the same bytes.

    Args:
        predictions: by task and split, in the order of the test file; classes as the training files write them, STS-B on its
            scale from 0 to 5 (what lies outside is brought to its ends).

    Raises:
        ConfigError: no such task or split in a submission.
        DataError: another number of predictions than the test set has rows, or an answer that the task does not have; then
            nothing is written.
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
            # Without a date of its own an entry has the day of writing: the same predictions would give other bytes.
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    given = tuple(file.name for file in SUBMISSION_FILES if (file.task, file.split) in predictions)
    return Submission(path, given, tuple(file.name for file in SUBMISSION_FILES if file.name not in given))


def _content(file: SubmissionFile, answers: Sequence[str | float]) -> str:
    if len(answers) != file.rows:
        raise DataError(
            f"{file.name}: {len(answers):,} predictions, the official test set of {file.task} has {file.rows:,} rows",
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
