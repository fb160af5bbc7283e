"""`--submission`: refused before training where it cannot be, and written whole with what was not run filled and named."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.finetuning import sweep as sweeping
from discern.finetuning.seed import FinetunePlan
from discern.finetuning.submission import SUBMISSION_FILES, check_submission
from discern.model_files.finetuned import seed_folder
from discern.progress import Silent
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune, sweep
from tests.tasks.data_folder import write

OFFICIAL = 146


class Listener(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def asked(folder: Path, test_rows: int | None) -> Finetuning:
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


def test_a_whole_test_file_is_predicted_and_the_rest_filled(tmp_path: Path) -> None:
    listener = Listener()
    results = finetune(asked(tmp_path, OFFICIAL), listener)
    assert results["submitted"] == ["WNLI.tsv"]
    assert results["majority"] == [file.name for file in SUBMISSION_FILES if file.task != "wnli"]
    assert any(note == f"files filled in with the majority answer: {', '.join(results['majority'])}" for note in listener.notes)
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
    with pytest.raises(DataError, match=rf"{rows} rows, but the official test file of wnli has {OFFICIAL}") as caught:
        finetune(asked(tmp_path, rows), Silent())
    assert "remove this one from --data" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "zip").exists()


def test_without_a_test_file_all_is_filled_and_that_is_said(tmp_path: Path) -> None:
    listener = Listener()
    results = finetune(asked(tmp_path, None), listener)
    assert results["submitted"] == []
    assert len(results["majority"]) == len(SUBMISSION_FILES)
    assert "wnli: no test file, so the submission contains the majority answer for this task" in listener.notes
    assert any(": no predictions" in note for note in listener.notes)


def test_a_submission_may_be_asked_for_afterwards(tmp_path: Path) -> None:
    request = asked(tmp_path, OFFICIAL)
    finetune(replace(request, submission=None), Silent())
    assert not list(tmp_path.glob("out/seed-0/predictions-wnli-test.jsonl"))
    assert finetune(request, Silent())["submitted"] == ["WNLI.tsv"]
    # As if it had been asked for at once.
    at_once = replace(request, out=tmp_path / "other", submission=tmp_path / "other-zip")
    assert finetune(at_once, Silent())["submitted"] == ["WNLI.tsv"]
    assert (tmp_path / "zip" / "submission.zip").read_bytes() == (tmp_path / "other-zip" / "submission.zip").read_bytes()


def test_without_any_weights_nothing_is_submitted(tmp_path: Path) -> None:
    request = asked(tmp_path, OFFICIAL)
    overflow = ("train.max_steps=1", "optimizer.learning_rate=1e25", "optimizer.warmup_steps=0")
    with pytest.raises(DataError, match=r"seed 0 of \S+ diverged: .*; it left no weights") as caught:
        finetune(replace(request, overrides=overflow), Silent())
    assert "lower the learning rate" in str(caught.value.hint)
    assert not (tmp_path / "zip").exists()


def test_a_sweep_submits_the_best_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def submitted(plan: FinetunePlan, seed: int, folder: Path, *_: object) -> dict[str, str]:
        assert (seed_folder(plan.out, seed) / "predictions-wnli-test.jsonl").is_file()
        written.append(plan.out.name)
        return {"submission": str(folder)}

    monkeypatch.setattr(sweeping, "submit", submitted)
    request = asked(tmp_path, OFFICIAL)
    # The last one diverges.
    found = sweep(request, ["learning_rate=1e-4,1e25"], Silent())
    assert found["submission"] == str(request.submission)
    assert written == [found["best_folder"]] == ["learning_rate=1e-4"]


def test_only_what_glue_has_a_file_for_is_submitted(tmp_path: Path) -> None:
    request = asked(tmp_path, OFFICIAL)
    for split in ("train", "dev", "test"):
        write(tmp_path / "chunk" / f"{split}.txt", *(("the O", "file B-NP", "") if split != "test" else ("the", "file")))
    tasks = [*request.tasks, ("chunk", tmp_path / "chunk")]
    listener = Listener()
    results = finetune(replace(request, tasks=tasks), listener)
    assert results["submitted"] == ["WNLI.tsv"]
    assert not any("chunk: no test file" in note for note in listener.notes)


def test_tasks_of_others_are_refused() -> None:
    check_submission(["chunk", "rte"])
    with pytest.raises(ConfigError, match="--submission is for tasks of GLUE, not for chunk, squad1") as caught:
        check_submission(["chunk", "squad1"])
    assert "--task cola or sst2" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="not for files of your own"):
        check_submission([])
