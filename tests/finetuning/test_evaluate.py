"""`discern evaluate` of a fine-tuned model: the task's metrics on a labeled file, and nothing written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from discern.cli.main import main
from discern.errors import ConfigError, DataError
from discern.finetuning.evaluate import evaluate_finetuned, labeled_examples
from discern.inference.predict import predict
from discern.model_files.folder import open_model
from discern.progress import Silent
from discern.tasks.base import Labels
from tests.small.finetuned import MULTI, NUMBER, SINGLE, SPANS, TAGS, Made, make_finetuned

TEXTS = ["the chef", "purple elephants ate the meal", "hello", "naive guests", "double spaces"]
NAMED = Made("classification", Labels(("contradiction", "entailment", "neutral")), ("accuracy",))


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
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_score_is_of_the_predictions(folders: Path, tmp_path: Path) -> None:
    texts = jsonl(tmp_path / "texts.jsonl", *({"review": text} for text in TEXTS))
    said: list[dict[str, Any]] = []
    predict(folders / "single", texts, said.extend, Silent())
    right = [{"review": text, "stars": each["label"]} for text, each in zip(TEXTS, said, strict=True)]
    before = {path: path.stat().st_mtime_ns for path in folders.rglob("*")}
    found = evaluated(folders / "single", jsonl(tmp_path / "right.jsonl", *right))
    assert {path: path.stat().st_mtime_ns for path in folders.rglob("*")} == before
    assert (found["task"], found["metric"], found["score"], found["examples"]) == ("own", "accuracy", 1.0, 5)
    assert found["metrics"] == {"accuracy": 1.0}
    assert found["file"] == str(tmp_path / "right.jsonl")
    wrong = [{**row, "stars": "bad" if row["stars"] != "bad" else "good"} for row in right[:2]] + right[2:]
    worse = evaluated(folders / "single", jsonl(tmp_path / "wrong.jsonl", *wrong))
    assert worse["score"] == pytest.approx(0.6)
    assert worse["loss"] > found["loss"] > 0


def test_every_kind_of_task(folders: Path, tmp_path: Path) -> None:
    several = jsonl(
        tmp_path / "multi.jsonl", {"text": "the chef", "labels": ["red"]}, {"text": "hello", "labels": ["old", "red"]}
    )
    assert evaluated(folders / "multi", several)["metric"] == "micro_f1"
    scores = jsonl(tmp_path / "n.jsonl", *({"text": text, "score": 1.5 * place} for place, text in enumerate(TEXTS)))
    assert -1 <= evaluated(folders / "number", scores)["score"] <= 1
    notes: list[str] = []
    listener = Silent()
    listener.note = notes.append  # type: ignore[method-assign]
    alone = jsonl(tmp_path / "one.jsonl", {"text": "the chef", "score": 1.5})
    assert evaluate_finetuned(folders / "number", alone, progress=listener)["score"] == 0
    assert "pearson on one.jsonl is undefined and counts as 0: a single example has no correlation" in notes
    tags = jsonl(tmp_path / "t.jsonl", {"words": ["the", "chef"], "tags": ["O", "B-X"]})
    assert set(evaluated(folders / "tags", tags)["metrics"]) == {"f1", "precision", "recall", "accuracy"}
    asked = jsonl(tmp_path / "q.jsonl", {"question": "Who?", "context": "The chef cooked.", "answer": "The chef"})
    assert set(evaluated(folders / "spans", asked)["metrics"]) >= {"exact_match", "f1"}


def test_a_named_task_takes_a_file_or_its_folder(folders: Path, tmp_path: Path) -> None:
    header = "sentence1\tsentence2\tgold_label\n"
    rows = [f"{text}\tthe meal\t{label}\n" for text, label in zip(TEXTS, ["neutral", "entailment"] * 3, strict=False)]
    for name, part in (("dev_matched", rows), ("dev_mismatched", rows[:3])):
        (tmp_path / f"{name}.tsv").write_text(header + "".join(part))
    whole = evaluated(folders / "mnli", tmp_path)
    assert set(whole["metrics"]) == {"accuracy", "mismatched_accuracy"}
    assert (whole["split"], whole["examples"]) == ("dev", 5)
    other = evaluated(folders / "mnli", tmp_path / "dev_mismatched.tsv")
    assert other["score"] == whole["metrics"]["mismatched_accuracy"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no labeled dev or test file of mnli; it contains nothing"):
        evaluated(folders / "mnli", tmp_path / "empty")
    bare = tmp_path / "bare.tsv"
    bare.write_text("sentence1\tsentence2\nthe chef\thello\n")
    with pytest.raises(DataError, match="has no labels to evaluate on") as caught:
        evaluated(folders / "mnli", bare)
    assert "discern predict" in str(caught.value.hint)
    with pytest.raises(DataError, match="has no labels to evaluate on"):
        labeled_examples(open_model(folders / "mnli", warn=pytest.fail), bare)


def test_unknown_labels_and_missing_columns(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"label 'goood' .* does not occur in the training file") as caught:
        evaluated(folders / "single", jsonl(tmp_path / "a.jsonl", {"review": "hello", "stars": "goood"}))
    assert "did you mean 'good'?" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="has no column 'stars'") as caught:
        evaluated(folders / "single", jsonl(tmp_path / "b.jsonl", {"review": "hello", "star": "good"}))
    assert caught.value.hint == "name the columns as in the training file: text = review, label = stars"
    with pytest.raises(ConfigError, match="is evaluated on a labeled file") as caught:
        evaluated(folders / "single", None)
    assert caught.value.hint == "add --data FILE"
    with pytest.raises(ConfigError, match="is a folder"):
        evaluated(folders / "single", tmp_path)


def test_the_verb(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"review": "hello", "stars": "good"}, {"review": "the chef", "stars": "bad"})

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["discern", "evaluate", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    assert call(folders / "several", "--data", data, "--task", "first", "--seed", 0, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    of_baselines = {"baselines", "best_baseline", "beats_baselines"}
    assert set(found) == {"task", "metric", "score", "metrics", "examples", "file", "loss", "split", "seed"} | of_baselines
    assert (found["task"], found["seed"], found["baselines"]) == ("first", 0, {})  # its training file is not there
    assert call(folders / "single", "--data", data) == 0
    assert capsys.readouterr().out.startswith("own: accuracy ")
    assert call(folders / "single", "--data", data, "--sequences", 5) == 2
    assert call(folders / "single", "--data", data, "--batch-size", 4) == 2
    assert "--batch-size are for runs" in capsys.readouterr().err
    assert call(tmp_path, "--seed", 1) == 2
    assert "are for fine-tuned models" in capsys.readouterr().err
