"""The baselines of a fine-tuning: measured once, kept with it, and measured again for other examples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discern.finetuning import results as module
from discern.finetuning import run as finetuning
from discern.finetuning.evaluate import evaluate_finetuned
from discern.finetuning.results import BASELINES_FILE, compared
from discern.progress import Silent
from discern.report.finetuned_page import baselines_verdict
from discern.training.distributed import Ranks
from tests.small.task import ROWS, Finetuning, prepare_finetuning, run, sweep, write_csv


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks whose baselines were measured."""
    found: list[str] = []
    measure = module.measure_baselines

    def counted(task: Any, *arguments: Any) -> Any:
        found.append(task.name)
        return measure(task, *arguments)

    monkeypatch.setattr(module, "measure_baselines", counted)
    return found


def short(request: Finetuning, *overrides: str) -> Finetuning:
    return replace(request, overrides=(*request.overrides, "train.max_steps=1", *overrides))


def test_they_are_measured_once_and_kept(request_: Finetuning, measured: list[str]) -> None:
    results = run(short(request_))
    assert {name: each["metrics"]["accuracy"] for name, each in results["baselines"].items()} == {
        "majority": pytest.approx(1 / 3),
        "tfidf": 1.0,
    }
    assert results["best_baseline"] == "tfidf"
    assert results["baselines"]["tfidf"]["train_examples"] == results["train_examples"]
    again = run(replace(short(request_), seeds=2))
    assert again["baselines"] == results["baselines"]
    assert measured == ["own"]
    # A damaged file is no reason to stop.
    (request_.out / BASELINES_FILE).write_text("{")
    assert run(replace(short(request_), seeds=2))["baselines"] == results["baselines"]
    assert measured == ["own", "own"]


def test_without_them_nothing_is_measured(request_: Finetuning, measured: list[str]) -> None:
    results = run(replace(short(request_), baselines=False))
    assert (results["baselines"], results["best_baseline"], results["beats_baselines"]) == ({}, None, None)
    assert measured == []


def test_the_other_ranks_wait_for_them_as_for_long_work(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchanges of a training give a rank up after minutes."""
    done: list[str] = []

    def measured(*_: Any) -> dict[str, Any]:
        done.append("baselines")
        return {}

    def trained(*_: Any) -> None:
        done.append("training")
        raise KeyError

    monkeypatch.setattr(finetuning, "measured_baselines", measured)
    monkeypatch.setattr(finetuning, "run_seed", trained)
    monkeypatch.setattr(Ranks, "barrier", lambda self: done.append("barrier"))
    with pytest.raises(KeyError):
        run(short(request_))
    assert done == ["baselines", "barrier", "training"]


def test_those_of_one_task_are_kept_when_the_next_is_cut_off(
    request_: Finetuning, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (data,) = prepare_finetuning(short(request_), Silent()).data.values()
    real = module._task_baselines

    def cut(each: Any, *arguments: Any) -> dict[str, Any]:
        if each is None:
            raise KeyboardInterrupt
        return real(each, *arguments)

    monkeypatch.setattr(module, "_task_baselines", cut)
    with pytest.raises(KeyboardInterrupt):
        module.measured_baselines({"first": data, "second": None}, tmp_path, Silent())  # type: ignore[dict-item]
    found = module.measured_baselines({"first": data, "third": data}, tmp_path, Silent())
    assert found["first"] == found["third"]
    assert measured == ["own", "own"]


def test_a_sweep_measures_them_once_and_again_for_other_rows(request_: Finetuning, measured: list[str]) -> None:
    found = sweep(short(request_), ["learning_rate=1e-3,2e-3"], Silent())
    assert found["baselines"].keys() == {"majority", "tfidf"}
    assert measured == ["own"]
    sweep(replace(short(request_), out=request_.out.with_name("rows")), ["train_rows=20,40"], Silent())
    assert measured == ["own", "own", "own"]


@pytest.mark.parametrize(
    ("baseline", "model", "verdict"),
    [
        ({"f1": 0.5}, {"f1": 0.5}, "0.5000"),
        ({"f1": 0.5}, {"f1": 0.6}, None),
        ({"f1": 0.5, "precision": 0.6, "accuracy": 0.9}, {"f1": 0.6, "precision": 0.5, "accuracy": 0.8}, None),
        ({"matthews": 0.1, "accuracy": 0.7}, {"matthews": 0.2, "accuracy": 0.6}, None),
        # Of two metrics that are published together, neither may be lower; for answers, F1 decides.
        ({"exact_match": 0.0, "f1": 0.164}, {"exact_match": 0.034, "f1": 0.079}, "f1 0.1640"),
        ({"exact_match": 0.2, "f1": 0.2}, {"exact_match": 0.1, "f1": 0.3}, "0.2000"),
        ({"f1": 0.2, "exact_match": 0.2}, {"f1": 0.3, "exact_match": 0.1}, "exact_match 0.2000"),
        ({"exact_match": 0.2, "f1": 0.2}, {"exact_match": 0.2, "f1": 0.3}, None),
        ({"accuracy": 0.684, "f1": 0.812}, {"accuracy": 0.691, "f1": 0.807}, "f1 0.8120"),
        ({"spearman": 0.7, "pearson": 0.7}, {"spearman": 0.8, "pearson": 0.6}, "pearson 0.7000"),
    ],
)
def test_whether_a_model_beats_its_baselines(baseline: dict[str, float], model: dict[str, float], verdict: str | None) -> None:
    simple = {
        "nothing": {"title": "nothing", "metrics": dict.fromkeys(baseline, 0.0), "train_examples": 2},
        "list": {"title": "a word list", "metrics": baseline, "train_examples": 2},
    }
    metric = next(iter(baseline))
    entry = {"metric": metric, "metrics": model, **compared(simple, metric, model)}
    assert (entry["best_baseline"], entry["beats_baselines"]) == ("list", verdict is None)
    assert baselines_verdict(entry) == (verdict and f"The model does not beat a word list ({verdict}).")
    assert compared({}, metric, model)["beats_baselines"] is None


def test_too_many_examples_give_no_baselines(request_: Finetuning, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("discern.tasks.baselines.base.EVALUATED_EXAMPLES", 1)
    assert run(short(request_))["baselines"] == {}
    assert json.loads((request_.out / BASELINES_FILE).read_text())["own"]["baselines"] == {}


def test_an_evaluation_trains_them_on_what_the_model_was_trained_on(request_: Finetuning, tmp_path: Path) -> None:
    rows = [(f"{text} {n}", label) for n in range(80) for text, label in ROWS]
    train, other = write_csv(tmp_path / "many.csv", rows), write_csv(tmp_path / "other.csv", rows[::7])
    files = (f"files.train='{train}'", "files.text=review", "files.label=stars")
    for name, overrides in (
        ("given", ("train.max_steps=1",)),
        ("fitted", ("finetune.min_steps=0", "train.sequences_per_step=120")),
    ):
        results = run(replace(request_, out=tmp_path / name, overrides=(*files, *overrides)))
        assert (results["selected_on"] is None) == (name == "given")
        found = evaluate_finetuned(tmp_path / name, other, progress=Silent())
        assert found["baselines"]["tfidf"]["train_examples"] == results["train_examples"] < 240
        assert found["baselines"]["tfidf"]["metrics"]["accuracy"] == 1.0
        assert (found["best_baseline"], found["beats_baselines"]) == ("tfidf", found["score"] > 1.0)
    assert evaluate_finetuned(tmp_path / "given", other, baselines=False, progress=Silent())["baselines"] == {}
    write_csv(train, rows[:-1])
    heard: list[str] = []
    listener = Silent()
    listener.note = heard.append  # type: ignore[method-assign]
    assert evaluate_finetuned(tmp_path / "given", other, progress=listener)["baselines"] == {}
    assert f"no baselines: {train} has changed since the model was trained on it" in heard
    train.unlink()
    assert evaluate_finetuned(tmp_path / "given", other, progress=Silent())["beats_baselines"] is None
