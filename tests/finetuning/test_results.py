"""What several seeds come to, by hand; and how they compare with the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from discern.finetuning.plan import FinetunePlan
from discern.finetuning.results import spread, summarize
from discern.model_files.finetuned import SCORES_FILE, predictions_file, seed_folder
from discern.progress import Silent
from discern.storage.checksums import write_json, write_lines
from discern.tasks.baselines import BaselineScore
from tests.small.run import make_run
from tests.small.task import Finetuning, prepare_finetuning
from tests.tasks.data_folder import write

SCORES: list[dict[str, Any]] = [
    {"tasks": {"rte": {"accuracy": 0.5, "loss": 1.0}, "qnli": {"accuracy": 1.0, "loss": 2.0}}},
    {
        "tasks": {"rte": {"accuracy": 0.7, "loss": 3.0}, "qnli": {"accuracy": 0.6, "loss": 4.0}},
        "failures": {"rte": "all alike"},
    },
    {"tasks": {}, "failure": "diverged: the loss is nan"},
]
LABELS = ["entailment", "not_entailment"] * 30


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> FinetunePlan:
    """Two tasks, one of which has no dev file but a labeled test file, and the scores of three seeds.

    The predictions of every seed are right for QNLI, and one label for RTE.
    """
    folder = tmp_path_factory.mktemp("results")
    make_run(folder / "run")
    for name, texts in (("RTE", "sentence1\tsentence2"), ("QNLI", "question\tsentence")):
        lines = [f"{number}\tthe file\treads\t{label}" for number, label in enumerate(LABELS)]
        for split in ("train", "dev" if name == "RTE" else "test"):
            write(folder / name / f"{split}.tsv", f"index\t{texts}\tlabel", *lines)
    for seed, scores in enumerate(SCORES):
        directory = seed_folder(folder / "out", seed)
        directory.mkdir(parents=True)
        write_lines(predictions_file(directory, "qnli"), [{"label": label} for label in LABELS])
        write_lines(predictions_file(directory, "rte"), [{"label": LABELS[0]}] * len(LABELS))
        numbers = {"seconds": 1.5, "padding_fraction": 0.25, "passes": 2.0 + seed, "kept_step": 10 * seed}
        write_json(directory / SCORES_FILE, numbers | scores)
    tasks = [("rte", folder / "RTE"), ("qnli", folder / "QNLI")]
    best = ("finetune.keep=best", "train.evaluate_every_steps=5")
    return prepare_finetuning(Finetuning(str(folder / "run"), folder / "out", tasks, overrides=best), Silent())


def summary(plan: FinetunePlan, *seeds: int, baselines: Mapping[str, list[BaselineScore]] | None = None) -> dict[str, Any]:
    return summarize(plan, seeds, baselines or {})


def test_several_tasks_and_seeds_of_which_one_diverged(plan: FinetunePlan) -> None:
    results = summary(plan, 0, 1, 2)
    assert (results["task"], results["metric"]) == ("rte+qnli", "mean")
    assert results["scores"] == [pytest.approx(0.75), pytest.approx(0.65), None]
    assert (results["median"], results["best_seed"], results["seconds"]) == (pytest.approx(0.7), 0, 4.5)
    assert (results["passes"], results["kept_step"]) == (2.0, 0)  # of the best seed
    assert results["tasks"]["rte"]["scores"] == [0.5, 0.7, None]
    assert results["metrics"]["qnli_accuracy"] == pytest.approx(0.8)
    assert results["failed_seeds"]["1"] == "rte: all alike"
    assert results["failed_seeds"]["2"] == "rte: diverged: the loss is nan; qnli: diverged: the loss is nan"
    assert [results["tasks"][name]["selected_on"] for name in ("rte", "qnli")] == ["dev", "test"]
    assert results["selected_on"] == "dev, test"


def test_each_task_is_compared_with_its_own_baselines(plan: FinetunePlan) -> None:
    wrong = [{"label": label} for label in reversed(LABELS)]
    one_label = [{"label": LABELS[1]}] * len(LABELS)
    baselines = {
        "rte": [BaselineScore("majority", "the most frequent class", {"accuracy": 0.5}, 60, one_label)],
        "qnli": [
            BaselineScore("tfidf", "TF-IDF", {"accuracy": 0.5}, 60, one_label),
            BaselineScore("majority", "the most frequent class", {"accuracy": 0.0}, 60, wrong),
        ],
    }
    results = summary(plan, 0, 1, baselines=baselines)
    rte, qnli = results["tasks"]["rte"], results["tasks"]["qnli"]
    assert (rte["best_baseline"], rte["comparison"]["verdict"], rte["beats_baselines"]) == ("majority", "undecided", False)
    assert (qnli["best_baseline"], qnli["comparison"]["verdict"], qnli["beats_baselines"]) == ("tfidf", "better", True)
    assert qnli["interval"][0] < 1 == qnli["interval"][1]
    assert qnli["comparison"]["difference"] == pytest.approx(0.5)
    assert (set(results["baselines"]), results["beats_baselines"]) == ({"rte", "qnli"}, False)
    without = summary(plan, 0, 1)
    assert (without["baselines"], without["beats_baselines"]) == ({}, None)
    # A seed that diverged neither beats nor loses.
    assert summary(plan, 2, baselines=baselines)["tasks"]["qnli"]["beats_baselines"] is None


def test_the_spread_of_seeds_by_hand() -> None:
    expected = {"median": 0.4, "mean": 0.4, "standard_deviation": 0.2, "best": 0.6, "worst": 0.2}
    assert spread([0.2, 0.6, 0.4]) == pytest.approx(expected)
    assert spread([0.3])["standard_deviation"] is None
    assert set(spread([]).values()) == {None}
