"""`discern evaluate` of a fine-tuned model: the task's metrics on a labeled file, and nothing written."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discern.cli.main import main
from discern.errors import ConfigError, DataError
from discern.finetuning.evaluate import evaluate_finetuned
from discern.inference.prediction import predict
from discern.progress import Silent
from discern.tasks.base import Labels
from tests.small.finetuned import MULTI, NUMBER, SINGLE, SPANS, TAGS, Made, make_finetuned
from tests.small.task import ROWS, Finetuning, Notes, run, write_csv
from tests.tasks.data_folder import write

TEXTS = ["the chef", "purple elephants ate the meal", "hello", "naive guests", "double spaces"]
NAMED = Made("classification", Labels(("contradiction", "entailment", "neutral"), pairs=True), ("accuracy",))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finetuned")
    for name, made in {"single": SINGLE, "multi": MULTI, "number": NUMBER, "tags": TAGS, "spans": SPANS}.items():
        make_finetuned(root / name, own=made)
    make_finetuned(root / "mnli", mnli=NAMED)
    make_finetuned(root / "several", seeds=2, first=SINGLE, second=NUMBER)
    return root


def evaluated(model: Path, data: Path | None, **options: Any) -> dict[str, Any]:
    return evaluate_finetuned(model, data, **options, progress=Silent())


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    return write(path, *map(json.dumps, rows))


def test_the_score_is_of_the_predictions(folders: Path, tmp_path: Path) -> None:
    texts = jsonl(tmp_path / "texts.jsonl", *({"review": text} for text in TEXTS))
    predictions: list[dict[str, Any]] = []
    predict(folders / "single", texts, predictions.extend, Silent())
    labels = [prediction["label"] for prediction in predictions]
    wrong = ["bad" if label != "bad" else "good" for label in labels[:2]] + labels[2:]
    right, worse = (
        evaluated(folders / "single", write_csv(tmp_path / f"{name}.csv", list(zip(TEXTS, column, strict=True))))
        for name, column in (("right", labels), ("wrong", wrong))
    )
    assert (right["task"], right["metric"], right["score"], right["examples"]) == ("own", "accuracy", 1.0, 5)
    assert right["metrics"] == {"accuracy": 1.0}
    assert right["interval"] == pytest.approx([5 / (5 + 1.959964**2), 1])
    assert worse["score"] == pytest.approx(0.6)
    assert worse["loss"] > right["loss"] > 0


@pytest.mark.parametrize(
    ("model", "rows", "metrics"),
    [
        ("multi", [{"text": "the chef", "labels": ["red"]}, {"text": "hello", "labels": ["old", "red"]}], {"micro_f1"}),
        ("number", [{"text": text, "score": 1.5 * n} for n, text in enumerate(TEXTS)], {"pearson"}),
        ("tags", [{"words": ["the", "chef"], "tags": ["O", "B-X"]}], {"f1", "precision", "recall", "accuracy"}),
        ("spans", [{"question": "Who?", "context": "The chef cooked.", "answer": "The chef"}], {"exact_match", "f1"}),
    ],
)
def test_every_kind_of_task(folders: Path, tmp_path: Path, model: str, rows: list[dict[str, Any]], metrics: set[str]) -> None:
    assert metrics <= evaluated(folders / model, jsonl(tmp_path / "a.jsonl", *rows))["metrics"].keys()


def test_an_undefined_metric_is_told(folders: Path, tmp_path: Path) -> None:
    notes = Notes()
    alone = jsonl(tmp_path / "one.jsonl", {"text": "the chef", "score": 1.5})
    assert evaluate_finetuned(folders / "number", alone, progress=notes)["score"] == 0
    assert "pearson on one.jsonl is undefined and counts as 0: a single example has no correlation" in notes.lines


def test_a_named_task_takes_a_file_or_its_folder(folders: Path, tmp_path: Path) -> None:
    header = "sentence1\tsentence2\tgold_label"
    rows = [f"{text}\tthe meal\t{label}" for text, label in zip(TEXTS, ["neutral", "entailment"] * 3, strict=False)]
    write(tmp_path / "dev_matched.tsv", header, *rows)
    mismatched = write(tmp_path / "dev_mismatched.tsv", header, *rows[:3])
    whole = evaluated(folders / "mnli", tmp_path)
    assert set(whole["metrics"]) == {"accuracy", "mismatched_accuracy"}
    assert (whole["split"], whole["examples"]) == ("dev", 5)
    assert evaluated(folders / "mnli", mismatched)["score"] == whole["metrics"]["mismatched_accuracy"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no labeled dev or test file of mnli; it contains nothing"):
        evaluated(folders / "mnli", tmp_path / "empty")
    bare = write(tmp_path / "bare.tsv", "sentence1\tsentence2", "the chef\thello")
    with pytest.raises(DataError, match=r"has no labels to evaluate on\n.*discern predict"):
        evaluated(folders / "mnli", bare)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"stars": "goood"}, "label 'goood' .* does not occur in the training file.*\n.*did you mean 'good'"),
        ({"star": "good"}, "has no column 'stars'"),
        (None, "is evaluated on a labeled file\n.*add --data FILE"),
        ({}, "is a folder"),
    ],
)
def test_wrong_files_are_explained(folders: Path, tmp_path: Path, row: dict[str, str] | None, message: str) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"review": "hello", **row}) if row else tmp_path if row is not None else None
    with pytest.raises((ConfigError, DataError), match=message):
        evaluated(folders / "single", data)


def test_baselines_are_trained_on_what_the_model_was_trained_on(request_: Finetuning, tmp_path: Path) -> None:
    rows = [(f"{text} {n}", label) for n in range(80) for text, label in ROWS]
    train, other = write_csv(tmp_path / "many.csv", rows), write_csv(tmp_path / "other.csv", rows[::7])
    results = run(replace(request_, overrides=(f"files.train='{train}'", "train.max_steps=1")))
    scores = evaluated(request_.out, other)
    assert scores["baselines"]["tfidf"]["train_examples"] == 240 > results["train_examples"]  # with the held-out ones
    assert scores["baselines"]["tfidf"]["metrics"]["accuracy"] == 1.0
    assert (scores["best_baseline"], scores["comparison"]["verdict"]) == ("tfidf", "worse")
    assert evaluated(request_.out, other, baselines=False)["baselines"] == {}
    write_csv(train, (rows * 21)[:5001])
    assert evaluated(request_.out, other)["baselines"] == {}


def test_the_verb(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"review": "hello", "stars": "good"}, {"review": "the chef", "stars": "bad"})

    def call(*arguments: object) -> object:
        monkeypatch.setattr(sys, "argv", ["discern", "evaluate", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code

    before = {path: path.stat().st_mtime_ns for path in folders.rglob("*")}
    assert call(folders / "several", "--data", data, "--task", "first", "--seed", 0, "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    comparisons = {"interval", "baselines", "best_baseline", "beats_baselines", "comparison"}
    assert set(scores) == {"task", "metric", "score", "metrics", "examples", "file", "loss", "split", "seed"} | comparisons
    assert (scores["task"], scores["seed"], scores["baselines"]) == ("first", 0, {})  # its training file is not there
    assert call(folders / "single", "--data", data) == 0
    assert capsys.readouterr().out.startswith("own: accuracy ")
    assert {path: path.stat().st_mtime_ns for path in folders.rglob("*")} == before
    assert call(folders / "single", "--data", data, "--batch-size", 4) == 2
    assert "--batch-size cannot be combined with a fine-tuned model" in capsys.readouterr().err
