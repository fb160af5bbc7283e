"""`--submission`: refused before training where it cannot be, and written whole with what was not run filled and named."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.progress import Silent
from discern.tasks.submission import SUBMISSION_FILES
from discern.workflows.finetune import FinetuneRequest, finetune
from discern.workflows.submission import check_submission
from tests.tasks.data_folder import write
from tests.workflows.small_run import make_run

OFFICIAL = 146


class Listener(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def asked(folder: Path, test_rows: int | None) -> FinetuneRequest:
    """Fine-tuning on a WNLI of made-up sentences, whose test file has that many rows, or is not there."""
    make_run(folder / "run")
    data = folder / "WNLI"
    lines = [f"{n}\tthe model reads\ta tensor {n}\t{n % 2}" for n in range(12)]
    for split in ("train", "dev"):
        write(data / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *lines)
    if test_rows is not None:
        write(data / "test.tsv", "index\tsentence1\tsentence2", *(f"{n}\tthe file\tof shape {n}" for n in range(test_rows)))
    few = ("train.max_steps=2", "optimizer.learning_rate=1e-2")
    return FinetuneRequest(str(folder / "run"), folder / "out", [("wnli", data)], overrides=few, submission=folder / "zip")


def test_a_whole_test_file_is_predicted_and_the_rest_filled(tmp_path: Path) -> None:
    listener = Listener()
    results = finetune(asked(tmp_path, OFFICIAL), listener)
    assert results["submitted"] == ["WNLI.tsv"]
    assert results["majority"] == [file.name for file in SUBMISSION_FILES if file.task != "wnli"]
    assert any(note == f"the majority answer for {', '.join(results['majority'])}" for note in listener.notes)
    predicted = (tmp_path / "out" / "seed-0" / "predictions-wnli-test.jsonl").read_text().splitlines()
    with zipfile.ZipFile(results["submission"]) as archive:
        lines = archive.read("WNLI.tsv").decode().splitlines()
        assert len(archive.namelist()) == len(SUBMISSION_FILES)
        assert set(archive.read("RTE.tsv").decode().splitlines()[1:]) == {f"{n}\tentailment" for n in range(3000)}
    assert len(lines) == len(predicted) + 1 == OFFICIAL + 1
    for place, (line, said) in enumerate(zip(lines[1:], predicted, strict=True)):
        number, label = line.split("\t")
        assert number == str(place)
        assert f'"label": "{label}"' in said


@pytest.mark.parametrize("rows", [OFFICIAL - 1, OFFICIAL + 1])
def test_another_number_of_rows_is_refused_before_training(tmp_path: Path, rows: int) -> None:
    with pytest.raises(DataError, match=rf"test\.tsv has {rows} rows, the official test file of wnli {OFFICIAL}") as caught:
        finetune(asked(tmp_path, rows), Silent())
    assert "take this one out of --data" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "zip").exists()


def test_without_a_test_file_all_is_filled_and_that_is_said(tmp_path: Path) -> None:
    listener = Listener()
    results = finetune(asked(tmp_path, None), listener)
    assert results["submitted"] == []
    assert len(results["majority"]) == len(SUBMISSION_FILES)
    assert "wnli: no test file, so the submission has the majority answer for it" in listener.notes
    assert any("predictions for nothing" in note for note in listener.notes)


def test_tasks_of_others_are_refused() -> None:
    check_submission(["chunk", "rte"])
    with pytest.raises(ConfigError, match="--submission is for tasks of GLUE, not for chunk, squad1") as caught:
        check_submission(["chunk", "squad1"])
    assert "--task cola or sst2" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="not for files of your own"):
        check_submission([])
