"""The page of a fine-tuning: scores with their spread, baselines, learning curves, calibration and mistakes."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from discern.errors import DataError
from discern.progress import Silent
from discern.report.finetuned_page import confusion, finetuned_page, read_judged
from discern.report.page import render_page
from discern.report.run_page import report
from discern.report.verdict import task_title, task_verdict
from discern.storage.checksums import write_recorded
from tests.report.test_page import assert_stands_alone, structure
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune
from tests.tasks.data_folder import write

BEST = ("finetune.keep=best", "train.evaluate_every_steps=2")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two seeds of an RTE of made-up sentences, one of which markup must not break, and their results."""
    folder = tmp_path_factory.mktemp("report")
    make_run(folder / "run")
    rows = [f"{n}\tthe <b>model</b> & file\treads {n}\t{'not_' * (n % 2)}entailment" for n in range(13)]
    for split in ("train", "dev"):
        write(folder / "RTE" / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
    tasks = [("rte", folder / "RTE")]
    request = Finetuning(str(folder / "run"), folder / "out", tasks, overrides=("train.max_steps=4", *BEST), seeds=2)
    return folder / "out", finetune(request, Silent())


def test_the_page_shows_scores_baselines_curves_and_mistakes(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, results = done
    page = report(folder, None)
    assert page == folder / "report.html"
    assert report(folder, tmp_path / "page.html").read_bytes() == page.read_bytes()
    html = page.read_text(encoding="utf-8")
    assert_stands_alone(html)
    structure(html)
    assert "<b>model</b>" not in html
    mistakes = (folder / f"seed-{results['best_seed']}" / "mistakes-rte.jsonl").read_text(encoding="utf-8").splitlines()
    for shown in (
        f"{results['median']:.4f}",
        f"{results['worst']:.4f} to {results['best']:.4f}",
        # A score on the split that chose the weights says so.
        "dev, 13 examples, on which the weights were selected",
        "keep = ",
        "Loss: training",
        "Accuracy, held out",
        "Calibration on rte",
        "predictions are correct",
        f"Worst mistakes of seed {results['best_seed']}: rte",
        json.loads(mistakes[0])["pair"],
        *(f"baseline: {each['title']}" for each in results["baselines"].values()),
    ):
        assert shown in unescape(html), shown


def test_without_baselines_or_mistakes_or_with_failed_seeds(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, results = done
    failed = {"failed_seeds": {"1": "diverged: the loss is nan"}, "median": None, "selected_on": None, "baselines": {}}
    config = (folder / "config.toml").read_bytes()
    write_recorded(tmp_path, {"config.toml": config, "results.json": json.dumps(results | failed)})
    html = render_page(finetuned_page(tmp_path))
    assert "rte, seed 1 failed: diverged: the loss is nan." in html
    assert "baseline: " not in html
    assert "the weights were selected" not in html
    assert "predictions are correct" not in html


def test_what_is_not_finished_or_cannot_be_written_is_refused(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not finished: it has no results\.json"):
        finetuned_page(tmp_path)
    with pytest.raises(DataError, match="cannot write") as caught:
        report(done[0], tmp_path / "nowhere" / "page.html")
    assert "--out FILE.html" in str(caught.value.hint)


def prediction(identity: str, label: str, p: float) -> dict[str, Any]:
    return {"id": identity, "label": label, "probabilities": {label: p, "other": 1 - p}}


def test_what_is_no_mistake_is_correct(tmp_path: Path) -> None:
    path, odd = tmp_path / "predictions-own.jsonl", "so\u2028so\x85"  # which breaks no line
    assert read_judged(tmp_path, "own", []) == []
    records = [prediction("0", odd, 0.9), prediction("1", odd, 0.6), prediction("2", "bad", 0.7)]
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8")
    judged = read_judged(tmp_path, "own", [{"id": "1", "gold": "bad"}])
    assert judged == [(odd, odd, 0.9), ("bad", odd, 0.6), ("bad", "bad", 0.7)]
    (matrix,) = confusion("t", judged)
    assert (matrix.labels, matrix.rows) == (["bad", odd], [[1, 1], [0, 1]])
    assert matrix.note.startswith("2 of 3 predictions are correct")
    assert confusion("t", [(str(n), str(n), 0.5) for n in range(21)]) == [], "more labels than can be read"


def test_a_verdict_on_a_task() -> None:
    entry: dict[str, Any] = {
        "task": "own",
        "files": {"train": "data/kinds.csv"},
        "metric": "accuracy",
        "median": 0.8125,
        "examples": 320,
        "split": "dev",
        "metrics": {"accuracy": 0.8125},
        "baselines": {"majority": {"title": "the most frequent class", "metrics": {"accuracy": 0.5}}},
        "best_baseline": "majority",
        "comparison": {"metric": "accuracy", "difference": 0.3125, "interval": [0.25, 0.37], "verdict": "better"},
        "interval": [0.766, 0.851],
    }
    assert task_title(entry) == "kinds.csv"
    assert task_title(entry | {"task": "sst2"}) == "sst2"
    assert task_verdict("kinds.csv", entry) == [
        "kinds.csv: accuracy 0.812 on 320 examples (dev, 95 % interval 0.766 to 0.851). The model beats the most frequent class "
        "(accuracy 0.5000): the difference is +0.3125, 95 % interval +0.2500 to +0.3700.",
    ]
    spans = entry | {"metrics": {"f1": 0.4, "precision": 0.6, "recall": 0.3}, "comparison": None, "interval": None}
    assert task_verdict("x", spans) == [
        "x: accuracy 0.812 on 320 examples (dev).",
        "It finds 30% of the spans, and 60% of the spans it marks are correct.",
    ]
    assert "no seed has a score" in task_verdict("x", entry | {"median": None})[0]
