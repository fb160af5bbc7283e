"""Fine-tuning fitted to the data: how long, which weights, which draw, which rate; and what a given length leaves as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discern.compare.settings import FinetuneSpec
from discern.errors import ConfigError, DataError
from discern.finetuning import rates
from discern.finetuning import seed as finetune_seed
from discern.finetuning.seed import attempt_seed
from discern.finetuning.task_files import HELD_OUT, SEPARATE_PART, has_labels
from discern.progress import Silent
from discern.tasks.examples import Reading
from discern.training import loop
from tests.small.task import ROWS, Finetuning, prepare_finetuning, run, write_csv
from tests.tasks.data_folder import write

MANY = [(f"{text} {n}", label) for n in range(80) for text, label in ROWS]
QUICK = ("optimizer.learning_rate=3e-3", "train.sequences_per_step=12")


@pytest.fixture
def fitted(request_: Finetuning, tmp_path: Path) -> Finetuning:
    """240 examples, no dev file, and nobody says how long."""
    train = write_csv(tmp_path / "many.csv", MANY)
    files = (f"files.train='{train}'", "files.text=review", "files.label=stars")
    return replace(request_, overrides=(*files, *QUICK))


def with_dev(request: Finetuning, folder: Path, rows: int) -> Finetuning:
    dev = write_csv(folder / "dev.csv", MANY[:rows])
    return replace(request, overrides=(*request.overrides, f"files.dev='{dev}'"))


def with_settings(request: Finetuning, *overrides: str) -> Finetuning:
    return replace(request, overrides=(*request.overrides, *overrides))


def texts(split: Any) -> set[str]:
    return {example.text for example in split.examples}


def test_small_data_gets_a_least_number_of_steps_and_is_not_repeated_without_end(fitted: Finetuning, tmp_path: Path) -> None:
    def steps(request: Finetuning) -> int:
        return prepare_finetuning(request, Silent()).config.train.max_steps

    dev = with_dev(fitted, tmp_path, 30)
    assert steps(dev) == 1000
    assert steps(with_settings(dev, "finetune.min_steps=70")) == 70
    assert steps(with_settings(dev, "finetune.min_steps=0")) == 60  # three epochs of 240 rows, 12 a step
    assert steps(with_settings(dev, "finetune.train_rows=24")) == 100  # fifty epochs
    assert steps(replace(dev, debug=True)) == 25  # three epochs of a hundred rows


def test_the_warm_up_is_a_fraction_of_the_length_and_has_to_leave_room_for_the_decay(fitted: Finetuning) -> None:
    def optimizer(*overrides: str) -> Any:
        chosen = with_settings(fitted, "optimizer.schedule=wsd", "train.max_steps=90", *overrides)
        return prepare_finetuning(chosen, Silent()).config.optimizer

    assert optimizer().warmup_steps == 9
    for warmup, decay, overrides in (
        (9, 86, ("optimizer.decay_fraction=0.95",)),
        (80, 18, ("optimizer.warmup_steps=80",)),
        (85, 10, ("optimizer.warmup_steps=85", "optimizer.decay_steps=10")),
        (81, 18, ("finetune.warmup_fraction=0.9",)),
    ):
        with pytest.raises(ConfigError, match=f"a warm-up of {warmup} steps and a decay of {decay} "):
            optimizer(*overrides)


def test_whoever_says_how_long_gets_that_and_the_last_weights(fitted: Finetuning, tmp_path: Path) -> None:
    dev = with_dev(fitted, tmp_path, 30)
    for asked, steps in (
        (replace(dev, recipe="paper"), 60),
        (replace(dev, recipe="google"), 60),
        (with_settings(dev, "finetune.recipe=paper"), 60),
        (with_settings(dev, "finetune.epochs=2"), 40),
        (with_settings(dev, "train.max_steps=7"), 7),
    ):
        plan = prepare_finetuning(asked, Silent())
        finetune, train = plan.config.finetune, plan.config.train
        assert (train.max_steps, train.evaluate_every_steps) == (steps, 0)
        assert (finetune.keep, finetune.patience, finetune.retries, finetune.min_steps) == ("last", 0, 0, 0)
        assert plan.data["own"].selection is None
        assert len(plan.data["own"].train.examples) == 240


def test_a_comparison_keeps_the_recipe_that_it_had() -> None:
    assert FinetuneSpec().recipe == "paper"


def test_without_a_dev_file_another_part_of_train_chooses_the_weights(fitted: Finetuning) -> None:
    plan = prepare_finetuning(fitted, Silent())
    data = plan.data["own"]
    assert data.selection is not None
    assert (data.dev_name, data.selection.name) == (HELD_OUT, SEPARATE_PART)
    parts = [texts(data.train), texts(data.selection.split), texts(data.evaluated[HELD_OUT])]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 240
    # What is evaluated is what was evaluated before there was a selection.
    before = prepare_finetuning(replace(fitted, recipe="paper"), Silent()).data["own"]
    assert texts(before.evaluated[HELD_OUT]) == parts[2]
    steps, every = plan.config.train.max_steps, plan.config.train.evaluate_every_steps
    assert (steps, every, plan.config.finetune.patience) == (858, 43, 8)  # fifty passes over 206 rows
    assert plan.config.finetune.keep == "best"


def test_a_dev_file_chooses_and_a_test_file_never_does(request_: Finetuning, fitted: Finetuning, tmp_path: Path) -> None:
    data = prepare_finetuning(with_dev(fitted, tmp_path, 30), Silent()).data["own"]
    assert data.selection is not None
    assert (data.selection.name, data.selection.split) == ("dev", data.evaluated["dev"])
    lines = [f"{n}\tthe file\treads {n}\t{'not_' * (n % 2)}entailment" for n in range(300)]
    write(tmp_path / "RTE" / "train.tsv", "index\tsentence1\tsentence2\tlabel", *lines)
    write(tmp_path / "RTE" / "test.tsv", "index\tsentence1\tsentence2\tlabel", *lines[:40])
    data = prepare_finetuning(replace(request_, tasks=[("rte", tmp_path / "RTE")], overrides=()), Silent()).data["rte"]
    assert data.selection is not None
    assert (data.dev_name, data.selection.name) == ("test", SEPARATE_PART)
    assert len(data.train.examples) + len(data.selection.split.examples) == 300
    write(tmp_path / "RTE" / "train.tsv", "index\tsentence1\tsentence2\tlabel", *lines[:80])  # too few to set some aside
    few = replace(request_, tasks=[("rte", tmp_path / "RTE")], overrides=("train.evaluate_every_steps=2",))
    plan = prepare_finetuning(few, Silent())
    assert plan.data["rte"].selection is None
    assert (plan.config.finetune.keep, plan.config.finetune.patience) == ("last", 0)


def test_too_few_examples_choose_nothing(fitted: Finetuning, tmp_path: Path) -> None:
    plan = prepare_finetuning(with_dev(fitted, tmp_path, 19), Silent())
    assert plan.data["own"].selection is None
    assert (plan.config.finetune.keep, plan.config.finetune.patience) == ("last", 0)
    assert plan.config.train.evaluate_every_steps == 0
    with pytest.raises(DataError, match="an empty file has no examples"):
        has_labels(Reading((), "an empty file"))
    # Three texts, each 80 times: a part of them could be all that there is of a class.
    alike = write_csv(tmp_path / "alike.csv", ROWS * 80)
    three = replace(fitted, overrides=(*fitted.overrides, f"files.train='{alike}'", f"files.dev='{tmp_path / 'dev.csv'}'"))
    assert len(prepare_finetuning(three, Silent()).data["own"].train.examples) == 240


def test_the_score_is_not_the_one_that_chose(fitted: Finetuning, tmp_path: Path) -> None:
    results = run(with_settings(fitted, "finetune.min_steps=0"))
    assert (results["split"], results["selected_on"]) == (HELD_OUT, SEPARATE_PART)
    records = [json.loads(line) for line in (fitted.out / "seed-0" / "metrics.jsonl").read_text().splitlines()]
    assert len([each for each in records if "accuracy" in each]) >= 3
    other = replace(with_dev(with_settings(fitted, "finetune.min_steps=0"), tmp_path, 30), out=tmp_path / "other")
    results = run(other)
    assert (results["split"], results["selected_on"]) == ("dev", "dev")


def test_an_interrupted_fitted_seed_ends_with_the_same_weights(fitted: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    few = with_settings(fitted, "finetune.min_steps=0", "train.checkpoint_every_steps=7")
    whole = run(replace(few, out=fitted.out.with_name("whole")))
    update, calls = loop.update, 0

    def stopping(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 17:
            raise KeyError("cut")
        update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", stopping)
        with pytest.raises(KeyError, match="cut"):
            run(few)
    assert run(few)["scores"] == whole["scores"]
    ours, theirs = (folder / "seed-0" / "model.safetensors" for folder in (few.out, fitted.out.with_name("whole")))
    assert ours.read_bytes() == theirs.read_bytes()


def failing(monkeypatch: pytest.MonkeyPatch, draws: set[int]) -> list[int]:
    """Make the networks of these draws, and no others, say the same of everything; gives the list of the draws that were trained.

    The others are trained for a few steps only, so that what they say depends on rounding.
    """
    trained: list[int] = []
    train_network, figures = finetune_seed.train_network, finetune_seed._measure

    def noted(plan: Any, draw: int, *arguments: Any) -> Any:
        trained.append(draw)
        return train_network(plan, draw, *arguments)

    def judged(*arguments: Any) -> dict[str, Any]:
        found = {name: value for name, value in figures(*arguments).items() if name != "failures"}
        return found | ({"failures": {"own": "every prediction is good"}} if trained[-1] in draws else {})

    monkeypatch.setattr(finetune_seed, "train_network", noted)
    monkeypatch.setattr(finetune_seed, "_measure", judged)
    return trained


def test_a_seed_that_failed_is_drawn_again_and_counted(fitted: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    few = with_settings(fitted, "finetune.min_steps=0", "train.sequences_per_step=120")
    trained = failing(monkeypatch, {0, attempt_seed(0, 1)})
    results = run(few)
    assert trained == [0, attempt_seed(0, 1), attempt_seed(0, 2)]
    assert len(set(trained)) == 3
    assert (results["failed_seeds"], results["retried_seeds"]) == ({}, {"0": ["every prediction is good"] * 2})
    folder = fitted.out / "seed-0"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["retry-1", "retry-2"]
    assert {path.name for path in (folder / "retry-2").iterdir()} == {"metrics.jsonl", "checksums.json"}
    assert run(few)["retried_seeds"] == results["retried_seeds"]
    assert len(trained) == 3


def test_a_seed_of_which_every_draw_fails_is_a_failed_seed(fitted: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    few = with_settings(fitted, "finetune.min_steps=0", "train.sequences_per_step=120", "finetune.retries=1")
    trained = failing(monkeypatch, {0, attempt_seed(0, 1)})
    results = run(few)
    assert len(trained) == 2
    assert results["failed_seeds"] == {"0": "every prediction is good"}
    assert results["retried_seeds"] == {"0": ["every prediction is good"]}
    assert results["median"] is not None


def test_an_interrupted_second_draw_goes_on(fitted: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    few = with_settings(fitted, "finetune.min_steps=0", "train.sequences_per_step=120")
    trained = failing(monkeypatch, {0})
    write_weights = finetune_seed.write_weights

    def cut(*arguments: Any) -> None:
        if len(trained) == 2:
            raise KeyError("cut")
        write_weights(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_seed, "write_weights", cut)
        with pytest.raises(KeyError, match="cut"):
            run(few)
    results = run(few)
    assert trained == [0, attempt_seed(0, 1), attempt_seed(0, 1)]
    assert results["retried_seeds"] == {"0": ["every prediction is good"]}


def test_the_rate_is_searched_where_asked_for(fitted: Finetuning, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = with_settings(fitted, "finetune.min_steps=0", "finetune.rate_search=true", "optimizer.learning_rate=3.04e-6")
    monkeypatch.setattr(rates, "_MIN_TRIAL_STEPS", 10)
    monkeypatch.setattr(rates, "_RATE_FACTORS", (1.0, 0.1, 1000.0))
    results = run(few)
    assert results["rate_search"]["learning_rate"] == results["settings"]["optimizer.learning_rate"] == 3e-3
    trials = results["rate_search"]["trials"]
    assert [each["learning_rate"] for each in trials] == [3.04e-6, 3e-7, 3e-3], "the given rate as it is"
    assert all(each["steps"] < results["settings"]["train.max_steps"] for each in trials)
    assert results["selected_on"] == SEPARATE_PART
    # Another seed takes the rate that was found.
    monkeypatch.setattr(rates, "_trial", None)
    assert run(replace(few, seeds=2))["rate_search"] == results["rate_search"]
    with pytest.raises(ConfigError, match="too few held-out examples to choose a learning rate"):
        run(with_dev(replace(few, out=tmp_path / "few"), tmp_path, 5))
    assert not (tmp_path / "few").exists()
