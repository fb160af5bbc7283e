"""`--submission`: refused before training where it cannot be, and complete, with the tasks that were not run filled in."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.finetuning.submission import SUBMISSION_FILES, check_submission, write_submission
from discern.progress import Silent
from tests.small.run import make_run
from tests.small.task import Finetuning, Notes, finetune
from tests.tasks.data_folder import write

OFFICIAL = 146


def wnli(folder: Path, test_rows: int | None) -> Finetuning:
    """Fine-tuning on a WNLI of made-up sentences, whose test file has that many rows, or is not there."""
    make_run(folder / "run")
    data = folder / "WNLI"
    lines = [f"{n}\tthe model reads\ta tensor {n}\t{n % 2}" for n in range(12)]
    for split in ("train", "dev"):
        write(data / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *lines)
    if test_rows is not None:
        write(data / "test.tsv", "index\tsentence1\tsentence2", *(f"{n}\tthe file\tof shape {n}" for n in range(test_rows)))
    few = ("train.max_steps=2", "optimizer.learning_rate=1e-2")
    return Finetuning(str(folder / "run"), folder / "out", [("wnli", data)], overrides=few, submission=folder / "zip")


def test_a_test_file_is_predicted_and_the_rest_filled(tmp_path: Path) -> None:
    request, notes = wnli(tmp_path, OFFICIAL), Notes()
    finetune(replace(request, submission=None), Silent())
    assert not list(tmp_path.glob("out/seed-0/predictions-wnli-test.jsonl"))
    results = finetune(request, notes)  # asked for afterwards
    assert results["submitted"] == ["WNLI.tsv"]
    assert results["majority"] == [file.name for file in SUBMISSION_FILES if file.task != "wnli"]
    assert f"files filled in with the majority answer: {', '.join(results['majority'])}" in notes.lines
    predictions = (tmp_path / "out" / "seed-0" / "predictions-wnli-test.jsonl").read_text().splitlines()
    with zipfile.ZipFile(results["submission"]) as archive:
        lines = archive.read("WNLI.tsv").decode().splitlines()
    assert lines == ["index\tprediction", *(f"{n}\t{json.loads(line)['label']}" for n, line in enumerate(predictions))]
    at_once = replace(request, out=tmp_path / "other", submission=tmp_path / "other-zip")
    finetune(at_once, Silent())
    assert (tmp_path / "zip" / "submission.zip").read_bytes() == (tmp_path / "other-zip" / "submission.zip").read_bytes()


def test_a_sweep_submits_the_best_and_only_tasks_of_glue(tmp_path: Path) -> None:
    request = wnli(tmp_path, None)
    for split in ("train", "dev"):
        write(tmp_path / "chunk" / f"{split}.txt", "the O", "file B-NP", "")
    # The last value diverges.
    request = replace(request, tasks=[*request.tasks, ("chunk", tmp_path / "chunk")], sweep=["learning_rate=1e-4,1e25"])
    results = finetune(request, Silent())
    assert (results["best_folder"], results["submitted"]) == ("learning_rate=1e-4", [])
    assert len(results["majority"]) == len(SUBMISSION_FILES)


def test_another_number_of_rows_is_refused_before_training(tmp_path: Path) -> None:
    message = rf"{OFFICIAL - 1} rows, but the official test file of wnli has {OFFICIAL}\n.*remove this one from --data"
    with pytest.raises(DataError, match=message):
        finetune(wnli(tmp_path, OFFICIAL - 1), Silent())
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "zip").exists()


@pytest.mark.parametrize(("names", "shown"), [(["chunk", "squad1"], "chunk, squad1"), ([], "files of your own")])
def test_tasks_of_others_are_refused(names: list[str], shown: str) -> None:
    with pytest.raises(ConfigError, match=f"for tasks of GLUE, not for {shown}\n.*--task cola or sst2"):
        check_submission(names)
    check_submission([*names, "rte"])


def test_every_file_is_there_with_all_its_rows(tmp_path: Path) -> None:
    answers = {"WNLI.tsv": ["1", "0"] * 73, "STS-B.tsv": [6.0, -1.0, 2.5, *[1.0] * 1376]}
    path = write_submission(tmp_path / "zip", answers)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    assert {name: (lines[0], len(lines) - 1, lines[-1].split("\t")[0]) for name, lines in files.items()} == {
        file.name: ("index\tprediction", file.rows, str(file.rows - 1)) for file in SUBMISSION_FILES
    }
    assert files["WNLI.tsv"][1:3] == ["0\t1", "1\t0"]
    assert files["STS-B.tsv"][1:4] == ["0\t5.000", "1\t0.000", "2\t2.500"]
    assert files["AX.tsv"][1] == "0\tentailment"
