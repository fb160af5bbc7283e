"""The page of a fine-tuning: scores with their spread, published ones with their source, mistakes; and what chose the weights."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from discern.errors import DataError
from discern.progress import Silent
from discern.report.finetuned_page import report_finetuned
from discern.storage.checksums import write_recorded
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


def test_the_page_shows_scores_and_their_spread(done: tuple[Path, dict[str, Any]]) -> None:
    folder, results = done
    page = report_finetuned(folder, None)
    assert page == folder / "report.html"
    html = page.read_text(encoding="utf-8")
    assert f"{results['median']:.4f}" in html
    assert f"+- {results['standard_deviation']:.4f}" in html
    assert f"{results['worst']:.4f} to {results['best']:.4f}" in html
    # A score on the split that chose the weights says so.
    assert "dev, 13 examples, on which the weights were selected" in html
    assert "finetune.keep" in html or "keep = " in html
    assert not re.findall(r"""(?:src|href)=["']?https?:""", html)


def test_baselines_stand_beside_the_scores_and_a_verdict_below(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, results = done
    html = unescape(report_finetuned(folder, None).read_text(encoding="utf-8"))
    assert results["baselines"].keys() == {"majority", "tfidf"}
    for each in results["baselines"].values():
        assert each["title"] in html
        assert f"{each['metrics']['accuracy']:.4f}" in html
    write_recorded(tmp_path, {"config.toml": (folder / "config.toml").read_bytes()})
    for verdict, sentence in (
        ("undecided", "Compared to the most frequent class (accuracy 0.5385): no difference that 13 examples can show."),
        ("worse", "The model does not reach the most frequent class (accuracy 0.5385): the difference is -0.3000, "),
    ):
        comparison = {"metric": "accuracy", "difference": -0.3, "interval": [-0.5, -0.1], "verdict": verdict}
        changed = {"best_baseline": "majority", "comparison": comparison}
        write_recorded(tmp_path, {"results.json": json.dumps(results | changed)})
        assert sentence in report_finetuned(tmp_path, None).read_text(encoding="utf-8")
    without = {"baselines": {}, "best_baseline": None, "comparison": None}  # --no-baselines
    write_recorded(tmp_path, {"results.json": json.dumps(results | without)})
    assert "Baseline" not in report_finetuned(tmp_path, None).read_text(encoding="utf-8")


def test_the_worst_mistakes_are_those_of_the_best_seed_and_no_markup(done: tuple[Path, dict[str, Any]]) -> None:
    folder, results = done
    html = report_finetuned(folder, None).read_text(encoding="utf-8")
    path = folder / f"seed-{results['best_seed']}" / "mistakes-rte.jsonl"
    mistakes = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert mistakes
    assert f"Worst mistakes of seed {results['best_seed']}: rte" in html
    assert mistakes[0]["pair"] in html
    assert "&lt;b&gt;model&lt;/b&gt; &amp; file" in html
    assert "<b>model</b>" not in html


def test_without_a_file_of_mistakes_no_prediction_is_taken_for_correct(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, results = done
    shutil.copytree(folder, tmp_path / "copy")
    assert "predictions are correct" in report_finetuned(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "copy" / f"seed-{results['best_seed']}" / "mistakes-rte.jsonl").unlink()
    html = report_finetuned(tmp_path / "copy", None).read_text(encoding="utf-8")
    assert "predictions are correct" not in html
    assert "calibration error" not in html


def test_the_same_results_give_the_same_bytes_wherever_they_go(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = done
    other = report_finetuned(folder, tmp_path / "page.html")
    assert other.read_bytes() == report_finetuned(folder, None).read_bytes()


def test_seeds_that_failed_are_named(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, results = done
    for name in ("results.json", "config.toml"):
        write_recorded(tmp_path, {name: (folder / name).read_bytes()})
    failed = results | {"failed_seeds": {"1": "diverged: the loss is nan"}, "median": None, "selected_on": None}
    write_recorded(tmp_path, {"results.json": json.dumps(failed)})
    html = report_finetuned(tmp_path, None).read_text(encoding="utf-8")
    assert "rte, seed 1 failed: diverged: the loss is nan." in html
    assert "the weights were chosen" not in html


def test_what_is_not_finished_or_cannot_be_written_is_refused(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = done
    with pytest.raises(DataError, match=r"not finished: it has no results\.json") as caught:
        report_finetuned(tmp_path, None)
    assert "same `discern finetune` command" in str(caught.value.hint)
    with pytest.raises(DataError, match="cannot write") as caught:
        report_finetuned(folder, tmp_path / "nowhere" / "page.html")
    assert "--out FILE.html" in str(caught.value.hint)
