"""Fine-tuning end to end on small files: learning, seeds, interruptions, failures, several tasks, sweeps."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.errors import ConfigError
from discern.finetuning import run as finetuning
from discern.finetuning.evaluate import evaluate_finetuned
from discern.model_files.export import export
from discern.model_files.finetuned import FinetunedFolder
from discern.progress import Silent
from discern.tasks.classification import Classification
from discern.tasks.tags import spans_of
from discern.training import loop
from discern.training.metrics import read_metrics
from tests.small.task import FAST, ROWS, Finetuning, run, with_settings, write_csv
from tests.tasks.data_folder import write

PAIRS = [line for n in range(20) for line in (f"{n}\tthe file\treads\tentailment", f"{n}\ta tensor\tof\tnot_entailment")]
OVERFLOW = ("train.max_steps=1", "optimizer.learning_rate=1e25", "optimizer.warmup_steps=0")


class CutError(Exception):
    """Interrupts a training."""


def cut(*_: object, **__: object) -> Any:
    raise CutError


def weights(request: Finetuning, seed: int = 0) -> bytes:
    return (request.out / f"seed-{seed}" / "model.safetensors").read_bytes()


def predictions(request: Finetuning, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (request.out / "seed-0" / f"predictions-{name}.jsonl").read_text().splitlines()]


def test_three_sentences_are_learned_and_everything_is_written(request_: Finetuning) -> None:
    results = run(request_)
    assert (results["task"], results["metric"], results["median"]) == ("own", "accuracy", 1.0)
    assert results == json.loads((request_.out / "results.json").read_text())
    assert {"python", "torch"} <= results["versions"].keys()
    assert (results["failed_seeds"], results["selected_on"]) == ({}, None)
    assert (results["passes"], results["kept_step"]) == (12.0, 60)  # 60 steps of 12 rows, 60 rows
    # Wilson's interval of 12 right answers in 12, and the same answers as the baseline of words.
    assert results["interval"] == pytest.approx([12 / (12 + 1.959964**2), 1])
    accuracies = {name: baseline["metrics"]["accuracy"] for name, baseline in results["baselines"].items()}
    assert accuracies == {"majority": pytest.approx(1 / 3), "tfidf": 1.0}
    assert (results["best_baseline"], results["beats_baselines"]) == ("tfidf", False)
    assert (results["comparison"]["difference"], results["comparison"]["verdict"]) == (0, "undecided")
    seed = request_.out / "seed-0"
    assert sorted(path.name for path in seed.iterdir()) == [
        "checksums.json",
        "metrics.jsonl",
        "mistakes-own.jsonl",
        "model.safetensors",
        "predictions-own.jsonl",
        "scores.json",
    ]
    (padding,) = [record["padding_fraction"] for record in read_metrics(seed) if "padding_fraction" in record]
    assert 0 <= results["padding_fraction"] == padding < 1
    assert [record["label"] for record in predictions(request_, "own")] == [label for _, label in ROWS * 4]
    assert FinetunedFolder(request_.out).task_model().objective.tasks["own"].labels.names == ("bad", "good", "so-so")


@pytest.mark.parametrize(
    "settings",
    [
        ("train.max_steps=12",),
        ("train.max_steps=12", "optimizer.name=muon", "optimizer.layer_decay=0.8", "train.weight_average=0.7"),
        ("train.max_steps=30", "train.evaluate_every_steps=2", "finetune.keep=best", "finetune.patience=5"),
    ],
    ids=["adam", "muon, averaged", "best weights"],
)
def test_an_interrupted_seed_ends_with_the_same_weights(
    request_: Finetuning, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    few = with_settings(request_, *settings, "train.checkpoint_every_steps=5", "finetune.dropout=0.1")
    undisturbed, broken = (replace(few, out=request_.out / name, baselines=False) for name in ("a", "b"))
    run(undisturbed)
    update = loop.update

    def cut_at_step_8(optimizer: Any, *arguments: Any) -> None:
        if optimizer.updates == 8:
            raise CutError
        update(optimizer, *arguments)

    # In the training, and again between its end and the scores.
    for module, name, replacement in ((loop, "update", cut_at_step_8), (finetuning, "write_json", cut)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, replacement)
            with pytest.raises(CutError):
                run(broken)
    run(broken)
    timing = {"seconds", "tokens_per_second", "data_share", "device_share", "energy_joules", "peak_memory_bytes"}
    logs = [
        [{key: line[key] for key in line.keys() - timing} for line in read_metrics(request.out / "seed-0")]
        for request in (undisturbed, broken)
    ]
    assert logs[0] == logs[1]
    assert weights(undisturbed) == weights(broken)


def test_the_average_of_the_weights_is_evaluated(request_: Finetuning) -> None:
    tensors = {}
    for decay in (0.0, 0.5):
        few = with_settings(request_, "train.max_steps=3", f"train.weight_average={decay}")
        few = replace(few, out=request_.out / str(decay), baselines=False)
        run(few)
        tensors[decay] = load_file(few.out / "seed-0" / "model.safetensors")
    assert any(not torch.equal(tensor, tensors[0.5][name]) for name, tensor in tensors[0.0].items())


def test_the_best_weights_are_kept_and_patience_ends_a_seed(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rate that destroys what was learned: later evaluations are not better.
    settings = ("train.evaluate_every_steps=2", "finetune.keep=best", "finetune.patience=2", "optimizer.learning_rate=0.5")
    patient = with_settings(request_, *settings)
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "evaluate", cut)
        with pytest.raises(CutError):
            run(patient)
    monkeypatch.setattr(loop, "update", cut)  # the training is over: there are no further updates
    results = run(patient)
    accuracies = {line["step"]: line["accuracy"] for line in read_metrics(patient.out / "seed-0") if "accuracy" in line}
    assert max(accuracies) < 60
    assert results["kept_step"] < max(accuracies)
    assert accuracies[results["kept_step"]] == results["median"] == max(accuracies.values())
    assert results["selected_on"] == "dev"


def test_probabilities_are_calibrated_on_the_evaluated_split(request_: Finetuning, tmp_path: Path) -> None:
    # The texts are learned, but say nothing about the labels of the dev file: the uniform prediction is best.
    dev = write_csv(tmp_path / "dev.csv", [(text, label) for text, _ in ROWS for _, label in ROWS] * 20)
    results = run(replace(request_, baselines=False))
    assert results["metrics"]["loss"] < math.log(3) + 0.02
    # The temperature is in the weights, and changes no prediction.
    losses, scores = {}, {}
    for path in (dev, tmp_path / "train.csv"):
        evaluated = evaluate_finetuned(request_.out, path, baselines=False, progress=Silent())
        losses[path], scores[path] = evaluated["loss"], evaluated["score"]
    assert losses[dev] == pytest.approx(results["metrics"]["loss"])
    assert scores[tmp_path / "train.csv"] == 1.0


def test_ngrams_beside_the_network_decide_what_it_did_not_learn(request_: Finetuning, tmp_path: Path) -> None:
    # The same words in all six classes: only their order differs.
    orders = [" ".join(words) for words in itertools.permutations(("model", "reads", "file"))]
    rows = [(f"the {order} {n}", order) for n in range(8) for order in orders]
    for name in ("train", "dev"):
        write_csv(tmp_path / f"{name}.csv", rows)
    one_step = replace(with_settings(request_, "train.max_steps=1"), baselines=False)
    assert run(one_step)["median"] < 1.0
    words = replace(with_settings(one_step, "task.words=true"), out=tmp_path / "words")
    assert run(words)["median"] == 1.0
    export(words.out, out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    for folder in (words.out, tmp_path / "export"):
        assert evaluate_finetuned(folder, tmp_path / "dev.csv", baselines=False, progress=Silent())["score"] == 1.0


@pytest.mark.parametrize("evaluations", [0, 1])
def test_a_network_that_overflows_in_its_last_update_is_a_seed_that_diverged(
    request_: Finetuning, tmp_path: Path, evaluations: int
) -> None:
    scores = write_csv(tmp_path / "scores.csv", [(text, f"{n}.5") for n, (text, _) in enumerate(ROWS * 4)], ("text", "score"))
    files = (f"files.train='{scores}'", f"files.dev='{scores}'", f"train.evaluate_every_steps={evaluations}")
    results = run(replace(request_, overrides=(*files, *OVERFLOW)))
    assert (results["median"], results["interval"], results["beats_baselines"]) == (None, None, None)
    assert results["failed_seeds"]["0"].startswith("diverged: own: the outputs of the network are not finite")
    files_of_seed = sorted(path.name for path in (request_.out / "seed-0").iterdir())
    assert files_of_seed == ["checksums.json", "metrics.jsonl", "scores.json"]


def test_a_failed_seed_is_trained_again_even_if_that_is_interrupted(
    request_: Finetuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(with_settings(request_, "train.max_steps=2", "finetune.retries=2"), baselines=False)
    trained: list[int] = []
    draws = [0, finetuning.attempt_seed(0, 1)]
    monkeypatch.setattr(Classification, "failure", lambda *_: None if trained[-1] else "all alike")
    train_network, write_weights = finetuning.train_network, finetuning.write_weights

    def noted(plan: Any, draw: int, *arguments: Any) -> Any:
        trained.append(draw)
        return train_network(plan, draw, *arguments)

    def cut_in_the_second_attempt(*arguments: Any) -> None:
        if len(trained) == 2:
            raise CutError
        write_weights(*arguments)

    monkeypatch.setattr(finetuning, "train_network", noted)
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "write_weights", cut_in_the_second_attempt)
        with pytest.raises(CutError):
            run(few)
    results = run(few)
    assert trained == draws * 2
    assert (results["failed_seeds"], results["retried_seeds"]) == ({}, {"0": ["all alike"]})


def test_a_seed_of_which_every_attempt_fails_is_a_failed_seed(request_: Finetuning, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write_csv(tmp_path / f"{name}.csv", [ROWS[0]] * 46 + ROWS[1:])
    results = run(with_settings(request_, "train.max_steps=8", "finetune.retries=1"))
    assert results["failed_seeds"] == {"0": "every prediction is good"}
    assert results["retried_seeds"] == {"0": ["every prediction is good"]}
    assert results["median"] == pytest.approx(46 / 48)


def test_the_learning_rate_is_searched_once_for_all_seeds(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    few = with_settings(request_, "finetune.rate_search=true", "optimizer.learning_rate=3.04e-6", "train.max_steps=30")
    monkeypatch.setattr(finetuning, "_MIN_TRIAL_STEPS", 15)
    monkeypatch.setattr(finetuning, "_RATE_FACTORS", (1.0, 0.1, 1000.0))
    results = run(few)
    search = results["rate_search"]
    assert search["learning_rate"] == results["settings"]["optimizer.learning_rate"] == 3e-3
    assert [trial["learning_rate"] for trial in search["trials"]] == [3.04e-6, 3e-7, 3e-3], "the given rate as it is"
    assert [trial["steps"] for trial in search["trials"]] == [15] * 3
    assert results["selected_on"] == "dev"
    monkeypatch.setattr(finetuning, "_RATE_FACTORS", (1.0,))  # a second search would have a single trial
    assert run(replace(few, seeds=2))["rate_search"] == search


def test_a_file_to_predict_is_read_without_its_labels(request_: Finetuning, tmp_path: Path) -> None:
    labeled = write_csv(tmp_path / "test.csv", [("a tensor", "unheard of"), *ROWS])
    results = run(with_settings(request_, "train.max_steps=1", f"files.test='{labeled}'"))
    assert len(predictions(request_, "own-test")) == 4
    assert results["split"] == "dev"


def test_further_splits_of_a_named_task_are_evaluated(request_: Finetuning, tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        lines = ["the DT B-NP", "model NN I-NP", "reads VB O", ""]
        write(tmp_path / f"{name}.txt", *lines * (3 if name == "test" else 6))
    results = run(replace(request_, tasks=[("chunk", tmp_path)], overrides=("train.max_steps=1",)))
    assert "test_f1" in results["metrics"]
    sentences = predictions(request_, "chunk-test")
    assert len(sentences) == 3
    logits = torch.tensor(sentences[0]["logits"])
    assert logits.shape == (3, 5)  # three words; O and the four marks of one type
    names = FinetunedFolder(request_.out).task_model().objective.tasks["chunk"].labels.names
    assert spans_of([names[index] for index in logits.argmax(1)]) == [tuple(span) for span in sentences[0]["spans"]]


def test_two_tasks_train_one_encoder(request_: Finetuning, tmp_path: Path) -> None:
    for name, texts in (("RTE", "sentence1\tsentence2"), ("QNLI", "question\tsentence")):
        for split in ("train", "dev"):
            write(tmp_path / name / f"{split}.tsv", f"index\t{texts}\tlabel", *PAIRS)
    tasks = [("rte", tmp_path / "RTE"), ("qnli", tmp_path / "QNLI")]
    results = run(replace(request_, tasks=tasks, overrides=(*FAST, "tasks.rte.sequence_length=16")))
    assert (set(results["tasks"]), results["metric"]) == ({"rte", "qnli"}, "mean")
    assert results["median"] == pytest.approx(1.0)
    assert results["metrics"]["rte_accuracy"] == results["tasks"]["rte"]["metrics"]["accuracy"]
    assert set(results["intervals"]) == {"rte", "qnli"}


def test_every_seed_draws_an_untrained_network_of_its_own(request_: Finetuning) -> None:
    run(replace(with_settings(request_, "train.max_steps=1"), untrained=True, seeds=2))
    drawn = [load_file(request_.out / f"seed-{seed}" / "model.safetensors") for seed in (0, 1)]
    (name,) = [name for name in drawn[0] if name.endswith("embeddings.word.weight")]
    # One step of Adam moves a weight by the learning rate at most: two draws are further apart than that.
    assert (drawn[0][name] - drawn[1][name]).abs().mean() > 2 * 3e-3


def test_a_sweep_gives_the_best_median(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    medians = {"1e25": None, "3e-3": 0.0, "1e-9": -0.2}
    train_seeds = finetuning.train_seeds

    def trained(plan: Any, *arguments: Any) -> dict[str, Any]:
        return train_seeds(plan, *arguments) | {"median": medians[plan.out.name.partition("=")[2]]}

    monkeypatch.setattr(finetuning, "train_seeds", trained)
    few = replace(with_settings(request_, "train.max_steps=1"), sweep=[f"learning_rate={','.join(medians)}"])
    results = run(few)
    assert (results["best_folder"], results["chosen_on"]) == ("learning_rate=3e-3", "dev")
    assert [row["median"] for row in results["sweep"]] == [*medians.values()]
    assert results == json.loads((few.out / "sweep.json").read_text())
    assert (few.out / "learning_rate=3e-3" / "results.json").is_file()


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("learnin_rate=1,2", r"learnin_rate is not a setting\n.*did you mean 'learning_rate'"),
        ("learning_rate=1e-3,1e-x", r"optimizer\.learning_rate"),
        ("layers=1,99", r"finetune\.layers is 99, but the encoder has"),
        ("learning_rate", "expected key=value,value"),
    ],
)
def test_every_value_of_a_sweep_is_checked_before_any_is_trained(request_: Finetuning, sweep: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(replace(request_, sweep=[sweep]))
    assert not request_.out.exists()
