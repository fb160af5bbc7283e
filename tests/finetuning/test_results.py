"""What several seeds come to, by hand; and what the scores were chosen on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discern.finetuning.results import spread, summarize
from discern.finetuning.seed import FinetunePlan
from discern.model_files.finetuned import SCORES_FILE, seed_folder
from discern.progress import Silent
from discern.storage.checksums import write_json
from tests.small.run import make_run
from tests.small.task import Finetuning, prepare_finetuning
from tests.tasks.data_folder import write

SCORES = {
    0: {"tasks": {"rte": {"accuracy": 0.5, "loss": 1.0}, "qnli": {"accuracy": 1.0, "loss": 2.0}}},
    1: {
        "tasks": {"rte": {"accuracy": 0.7, "loss": 3.0}, "qnli": {"accuracy": 0.6, "loss": 4.0}},
        "failures": {"rte": "all alike"},
    },
    2: {"tasks": {}, "failure": "diverged: the loss is nan"},
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> FinetunePlan:
    """Two tasks, one of which has no dev file but a labeled test file, and the scores of three seeds."""
    folder = tmp_path_factory.mktemp("results")
    make_run(folder / "run")
    for name, columns in (("RTE", "sentence1\tsentence2"), ("QNLI", "question\tsentence")):
        lines = ["0\tthe file\treads\tentailment", "1\ta tensor\tof\tnot_entailment"] * 3
        for split in ("train", "dev" if name == "RTE" else "test"):
            write(folder / name / f"{split}.tsv", f"index\t{columns}\tlabel", *lines)
    tasks = [("rte", folder / "RTE"), ("qnli", folder / "QNLI")]
    best = ("finetune.keep=best", "train.evaluate_every_steps=5")
    for seed, scores in SCORES.items():
        seed_folder(folder / "out", seed).mkdir(parents=True)
        write_json(seed_folder(folder / "out", seed) / SCORES_FILE, {"seconds": 1.5, "padding_fraction": 0.25, **scores})
    return prepare_finetuning(Finetuning(str(folder / "run"), folder / "out", tasks, overrides=best), Silent())


def test_several_tasks_and_seeds_of_which_one_diverged(plan: FinetunePlan) -> None:
    found = summarize(plan.out, plan.data, plan.config, "a model", (0, 1, 2))
    assert (found["task"], found["metric"]) == ("rte+qnli", "mean")
    assert found["scores"] == [pytest.approx(0.75), pytest.approx(0.65), None]
    assert (found["median"], found["best_seed"], found["seconds"]) == (pytest.approx(0.7), 0, 4.5)
    assert found["tasks"]["rte"]["scores"] == [0.5, 0.7, None]
    assert found["metrics"]["qnli_accuracy"] == pytest.approx(0.8)
    assert found["failed_seeds"]["1"] == "rte: all alike"
    assert found["failed_seeds"]["2"] == "rte: diverged: the loss is nan; qnli: diverged: the loss is nan"


def test_what_chose_the_weights_is_named(plan: FinetunePlan) -> None:
    found = summarize(plan.out, plan.data, plan.config, "a model", (0, 1))
    assert found["tasks"]["rte"]["selected_on"] == "dev"
    assert found["tasks"]["qnli"]["selected_on"] == "test"
    assert found["selected_on"] == "dev, test"
    last = plan.config.model_copy(update={"finetune": plan.config.finetune.model_copy(update={"keep": "last"})})
    other = replace(plan, config=last)
    found = summarize(other.out, other.data, other.config, "a model", (0, 1))
    assert found["selected_on"] is None
    assert found["tasks"]["rte"]["selected_on"] is None


def test_each_task_is_set_beside_its_own_baselines(plan: FinetunePlan) -> None:
    simple = {"majority": {"title": "the most frequent class", "metrics": {"accuracy": 0.55}, "train_examples": 6}}
    better = simple | {"tfidf": {"title": "TF-IDF", "metrics": {"accuracy": 0.9}, "train_examples": 6}}
    found = summarize(plan.out, plan.data, plan.config, "a model", (0, 1), {"rte": simple, "qnli": better})
    rte, qnli = found["tasks"]["rte"], found["tasks"]["qnli"]
    assert (rte["median"], rte["best_baseline"], rte["beats_baselines"]) == (0.6, "majority", True)
    assert (qnli["median"], qnli["best_baseline"], qnli["beats_baselines"]) == (0.8, "tfidf", False)
    assert (found["baselines"], found["beats_baselines"]) == ({"rte": simple, "qnli": better}, False)
    without = summarize(plan.out, plan.data, plan.config, "a model", (0, 1))
    assert (without["baselines"], without["beats_baselines"]) == ({}, None)
    # A seed that diverged beats nothing, and loses to nothing.
    diverged = summarize(plan.out, plan.data, plan.config, "a model", (2,), {"rte": simple})
    assert diverged["tasks"]["rte"]["beats_baselines"] is None


def test_the_spread_of_seeds_by_hand() -> None:
    assert spread([0.2, 0.6, 0.4]) == {
        "median": 0.4,
        "mean": pytest.approx(0.4),
        "standard_deviation": pytest.approx(0.2),
        "best": 0.6,
        "worst": 0.2,
    }
    assert spread([0.3])["standard_deviation"] is None
    assert set(spread([]).values()) == {None}
