"""Fine-tuning end to end on small files: learning, files and results, going on, refusing, several tasks, seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.config.schema import flatten
from discern.errors import ConfigError, DataError
from discern.finetuning import seed as finetune_seed
from discern.finetuning import sweep as sweeping
from discern.finetuning.seed import FinetunePlan
from discern.finetuning.settings import Recipe, given_settings, load_finetune_config
from discern.finetuning.task_files import find_files
from discern.model_files.finetuned import FinetunedFolder
from discern.models.config import ModelConfig
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.progress import Silent
from discern.tasks import tasks
from discern.tasks.tags import spans_of
from discern.training.distributed import Ranks
from discern.training.metrics_log import read_metrics
from tests.small.task import FAST, ROWS, Finetuning, prepare_finetuning, run, sweep, write_csv


def test_three_sentences_are_learned_and_everything_is_written(request_: Finetuning) -> None:
    results = run(request_)
    assert (results["task"], results["metric"], results["median"]) == ("own", "accuracy", 1.0)
    assert results["failed_seeds"] == {}
    assert results == json.loads((request_.out / "results.json").read_text())
    assert {"python", "torch"} <= results["versions"].keys()
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
    said = [json.loads(line) for line in (seed / "predictions-own.jsonl").read_text().splitlines()]
    assert [record["label"] for record in said] == [label for _, label in ROWS * 4]
    loaded = FinetunedFolder(request_.out).task_model()
    assert loaded.objective.tasks["own"].labels.names == ("bad", "good", "so-so")


def test_the_same_seed_gives_the_same_weights(request_: Finetuning) -> None:
    few = (*request_.overrides, "train.max_steps=8", "finetune.dropout=0.1")
    first, second = (replace(request_, out=request_.out / name, overrides=few) for name in ("a", "b"))
    run(first)
    run(second)
    weights = [(each.out / "seed-0" / "model.safetensors").read_bytes() for each in (first, second)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("more", [(), ("optimizer.name=muon", "optimizer.layer_decay=0.8", "train.weight_average=0.7")])
def test_an_interrupted_seed_ends_with_the_same_weights(
    request_: Finetuning, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    few = (*request_.overrides, *more, "train.max_steps=12", "train.checkpoint_every_steps=5", "finetune.dropout=0.1")
    undisturbed, broken = (replace(request_, out=request_.out / name, overrides=few) for name in ("a", "b"))
    run(undisturbed)

    class CutError(Exception):
        pass

    from discern.training import loop

    update = loop.update

    def cut(optimizer: Any, *arguments: Any) -> None:
        if optimizer.updates == 8:
            raise CutError
        update(optimizer, *arguments)

    monkeypatch.setattr(loop, "update", cut)
    with pytest.raises(CutError):
        run(broken)
    monkeypatch.setattr(loop, "update", update)
    # And once more between the end of the training and the scores.
    write = finetune_seed.write_json
    monkeypatch.setattr(finetune_seed, "write_json", lambda *args: (_ for _ in ()).throw(CutError))
    with pytest.raises(CutError):
        run(broken)
    monkeypatch.setattr(finetune_seed, "write_json", write)
    run(broken)
    timing = {"seconds", "tokens_per_second", "data_share", "device_share", "peak_memory_bytes"}
    lines = [
        [{key: line[key] for key in line.keys() - timing} for line in read_metrics(each.out / "seed-0")]
        for each in (undisturbed, broken)
    ]
    assert lines[0] == lines[1]
    weights = [(each.out / "seed-0" / "model.safetensors").read_bytes() for each in (undisturbed, broken)]
    assert weights[0] == weights[1]


def test_the_average_of_the_weights_is_what_is_kept(request_: Finetuning) -> None:
    few = (*request_.overrides, "train.max_steps=3", "finetune.keep=last", "train.log_every_steps=1")
    found = {}
    for decay in (0.0, 0.5):
        each = replace(request_, out=request_.out / str(decay), overrides=(*few, f"train.weight_average={decay}"))
        run(each)
        losses = [line["loss"] for line in read_metrics(each.out / "seed-0") if "loss" in line]
        found[decay] = losses, load_file(each.out / "seed-0" / "model.safetensors")
    assert found[0.0][0] == found[0.5][0]
    assert not all(torch.equal(found[0.0][1][name], found[0.5][1][name]) for name in found[0.0][1])


def test_a_part_is_held_out_where_there_is_no_dev_file(request_: Finetuning, tmp_path: Path) -> None:
    train = write_csv(tmp_path / "many.csv", [(f"{text} {n}", label) for n in range(60) for text, label in ROWS])
    overrides = [f"files.train='{train}'" if text.startswith("files.train") else text for text in request_.overrides]
    without = replace(request_, overrides=tuple(text for text in overrides if not text.startswith("files.dev")))
    plan = prepare_finetuning(without, Silent())
    data = plan.data["own"]
    assert data.dev_name == "held out of train"
    (counted,) = (note for note in data.notes if "3 labels" in note)
    assert counted.startswith("train: "), "the labels of the whole file are not those of the held-out part"
    assert 5 <= len(data.evaluated[data.dev_name].examples) <= 35
    trained, held = ({example.text for example in part.examples} for part in (data.train, data.evaluated[data.dev_name]))
    assert not trained & held
    assert len(trained) + len(held) == 180


def test_a_network_that_overflows_in_its_last_update_is_a_seed_that_diverged(request_: Finetuning, tmp_path: Path) -> None:
    scores = write_csv(tmp_path / "scores.csv", [(text, f"{n}.5") for n, (text, _) in enumerate(ROWS * 4)], ("text", "score"))
    overflow = ("train.max_steps=1", "optimizer.learning_rate=1e25", "optimizer.warmup_steps=0")
    files = (f"files.train='{scores}'", f"files.dev='{scores}'")
    for more in ((), ("train.evaluate_every_steps=1",)):
        request = replace(request_, out=tmp_path / f"out{len(more)}", overrides=(*files, *overflow, *more))
        results = run(request)
        assert results["median"] is None
        assert results["failed_seeds"]["0"].startswith("diverged: own: the outputs of the network are not finite")
        assert sorted(path.name for path in (request.out / "seed-0").iterdir()) == [
            "checksums.json",
            "metrics.jsonl",
            "scores.json",
        ]


def test_a_file_to_predict_is_read_without_its_labels_and_never_evaluated(request_: Finetuning, tmp_path: Path) -> None:
    labeled = write_csv(tmp_path / "test.csv", [("a tensor", "unheard of"), *ROWS])
    bare = write_csv(tmp_path / "bare.csv", [(text,) for text, _ in ROWS], ("review",))
    few = (*request_.overrides, "train.max_steps=1")
    run(replace(request_, overrides=(*few, f"files.test='{labeled}'")))
    said = (request_.out / "seed-0" / "predictions-own-test.jsonl").read_text().splitlines()
    assert len(said) == 4
    train = write_csv(tmp_path / "many.csv", [(f"{text} {n}", label) for n in range(20) for text, label in ROWS])
    for path in (labeled, bare):
        overrides = (f"files.train='{train}'", *few[2:], f"files.test='{path}'")
        plan = prepare_finetuning(replace(request_, overrides=overrides), Silent())
        assert plan.data["own"].dev_name == "held out of train"
        assert list(plan.data["own"].unlabeled) == ["test"]


def test_the_folder_of_all_tasks_is_refused_with_that_of_the_task(tmp_path: Path) -> None:
    for name in ("CoLA", "SST-2"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="has no training file of sst2; it contains CoLA, SST-2") as caught:
        find_files(tasks.load("sst2"), tmp_path)
    assert caught.value.hint == f"--data {tmp_path / 'SST-2'}"


@pytest.mark.parametrize(
    ("tags", "warned"),
    [
        ("b-PER i-PER O", True),
        ("B-PER I-PER 0", True),
        ("B_PER I_PER o", True),
        ("PER PER O O O", True),
        ("B-PER I-PER O", False),
        ("PER-x NOUN VERB", False),
        ("DT NN -LRB- O", False),
    ],
)
def test_tags_that_nearly_mark_spans_are_told(request_: Finetuning, tmp_path: Path, tags: str, warned: bool) -> None:
    train = tmp_path / "train.conll"
    train.write_text("".join(f"word {tag}\n" for tag in tags.split()) + "\n")
    heard: list[str] = []
    listener = Silent()
    listener.note = heard.append  # type: ignore[method-assign]
    prepare_finetuning(replace(request_, overrides=(f"files.train='{train}'", f"files.dev='{train}'")), listener)
    found = [line for line in heard if line.startswith("warning: own: tags such as")]
    assert len(found) == warned
    assert all(tag in line for tag in tags.split() for line in found)


def test_further_splits_are_predicted_too(request_: Finetuning, tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        lines = ["the DT B-NP", "model NN I-NP", "reads VB O", ""]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines * (3 if name == "test" else 6)))
    results = run(replace(request_, tasks=[("chunk", tmp_path)], overrides=("train.max_steps=1",)))
    assert "test_f1" in results["metrics"]
    lines = (request_.out / "seed-0" / "predictions-chunk-test.jsonl").read_text().splitlines()
    assert len(lines) == 3
    said = json.loads(lines[0])
    # Three words; O and the four marks of one type.
    assert (len(said["logits"]), len(said["logits"][0])) == (3, 5)
    chosen = [max(range(5), key=row.__getitem__) for row in said["logits"]]
    names = FinetunedFolder(request_.out).task_model().objective.tasks["chunk"].labels.names
    assert spans_of([names[number] for number in chosen]) == [tuple(span) for span in said["spans"]]


def test_files_of_ones_own_beside_a_named_task_are_refused(request_: Finetuning, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("the DT B-NP\nreads VB O\n")
    settings = tmp_path / "own.toml"
    settings.write_text("[files]\ntrain = 'train.csv'\n")
    with pytest.raises(ConfigError, match=r"has its own files and columns, but the settings contain files\.train"):
        prepare_finetuning(replace(request_, tasks=[("chunk", tmp_path)], config=settings, overrides=()), Silent())


def test_two_tasks_train_one_encoder(request_: Finetuning, tmp_path: Path) -> None:
    for name, header in (("RTE", "index\tsentence1\tsentence2\tlabel"), ("QNLI", "index\tquestion\tsentence\tlabel")):
        (tmp_path / name).mkdir()
        lines = [header, *(f"{n}\tthe file\treads\tentailment\n{n}\ta tensor\tof\tnot_entailment" for n in range(20))]
        for split in ("train", "dev"):
            (tmp_path / name / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    tasks = [("rte", tmp_path / "RTE"), ("qnli", tmp_path / "QNLI")]
    results = run(replace(request_, tasks=tasks, overrides=(*FAST, "tasks.rte.sequence_length=16")))
    assert set(results["tasks"]) == {"rte", "qnli"}
    assert results["metric"] == "mean"
    assert results["median"] == pytest.approx(1.0)
    assert results["metrics"]["rte_accuracy"] == results["tasks"]["rte"]["metrics"]["accuracy"]
    with pytest.raises(ConfigError, match="there are 2 tasks"):
        run(replace(request_, tasks=tasks, out=tmp_path / "x", overrides=("task.sequence_length=16",)))


def test_the_best_evaluation_may_be_kept_and_patience_ends_a_seed(request_: Finetuning) -> None:
    # A rate that destroys what was learned: later evaluations are not better.
    more = ("train.evaluate_every_steps=2", "finetune.keep=best", "finetune.patience=2", "optimizer.learning_rate=0.5")
    results = run(replace(request_, overrides=(*request_.overrides, *more)))
    records = [json.loads(line) for line in (request_.out / "seed-0" / "metrics.jsonl").read_text().splitlines()]
    judged = [record for record in records if "accuracy" in record]
    assert judged[-1]["step"] < 60
    assert results["median"] == max(record["accuracy"] for record in judged)
    scores = json.loads((request_.out / "seed-0" / "scores.json").read_text())
    assert scores["kept_step"] < scores["steps"] == judged[-1]["step"]
    assert {record["step"]: record["accuracy"] for record in judged}[scores["kept_step"]] == results["median"]


def test_a_seed_that_says_the_same_of_everything_is_named(request_: Finetuning, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write_csv(tmp_path / f"{name}.csv", [ROWS[0]] * 46 + ROWS[1:])
    results = run(replace(request_, overrides=(*request_.overrides, "train.max_steps=4")))
    assert results["failed_seeds"] == {"0": "every prediction is good"}
    assert results["median"] == pytest.approx(46 / 48)


def test_a_sweep_finds_the_better_value(request_: Finetuning) -> None:
    found = sweep(
        replace(request_, overrides=tuple(o for o in request_.overrides if "learning_rate" not in o)),
        ["learning_rate=1e-9,3e-3"],
        Silent(),
    )
    assert found["best_folder"] == "learning_rate=3e-3"
    assert found["chosen_on"] == "dev"
    assert [row["settings"] for row in found["sweep"]] == [{"optimizer.learning_rate": value} for value in ("1e-9", "3e-3")]
    assert (request_.out / "learning_rate=3e-3" / "results.json").is_file()
    with pytest.raises(ConfigError, match="learnin_rate") as caught:
        sweep(request_, ["learnin_rate=1,2"], Silent())
    assert "learning_rate" in str(caught.value.hint)


def test_the_best_of_a_sweep_is_the_highest_median_and_zero_is_one(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    medians = {"1e-5": None, "1e-4": 0.0, "1e-3": -0.2}
    joined: list[str] = []

    @contextmanager
    def join(device: str) -> Iterator[Ranks]:
        joined.append(device)
        yield Ranks(1, 1, torch.device("cpu"))

    def trained(plan: FinetunePlan, *_: object, **options: object) -> dict[str, Any]:
        median = medians[plan.out.name.partition("=")[2]]
        return {
            "metric": "matthews",
            "median": median,
            "standard_deviation": 0,
            "scores": [median],
            "failed_seeds": {},
            "split": "dev",
        }

    monkeypatch.setattr(sweeping, "join_ranks", join)
    monkeypatch.setattr(sweeping, "train_seeds", trained)
    found = sweep(request_, [f"learning_rate={','.join(medians)}"], Silent())
    assert found["best_folder"] == "learning_rate=1e-4"
    # Ranks meet once, and one that does not write has written nothing.
    assert joined == ["auto"]
    assert not request_.out.exists()


def test_every_value_of_a_sweep_is_checked_before_any_is_trained(request_: Finetuning) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        sweep(request_, ["learning_rate=1e-3,1e-x"], Silent())
    with pytest.raises(ConfigError, match=r"finetune\.layers is 99, but the encoder has"):
        sweep(request_, ["layers=1,99"], Silent())
    assert not request_.out.exists()


def test_recipes_go_by_size_and_the_google_recipe_repeats_the_released_code(request_: Finetuning) -> None:
    files = tuple(text for text in request_.overrides if text.startswith("files."))
    narrow = prepare_finetuning(replace(request_, overrides=files, recipe="paper"), Silent()).config
    assert (narrow.optimizer.learning_rate, narrow.optimizer.layer_decay, narrow.finetune.dropout) == (1e-3, 1.0, 0.0)
    for width, rate, decay in ((256, 3e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)):
        paper = load_finetune_config([tasks.load("sst2")], ModelConfig(hidden_size=width), given_settings(None, ())).config
        assert (paper.optimizer.learning_rate, paper.optimizer.layer_decay, paper.finetune.dropout) == (rate, decay, 0.1)
        assert (paper.optimizer.weight_decay, paper.finetune.min_steps) == (0.0, 300)
    shallow = load_finetune_config([tasks.load("sst2")], ModelConfig(num_layers=11), given_settings(None, ())).config
    assert (shallow.optimizer.learning_rate, shallow.optimizer.layer_decay, shallow.finetune.min_steps) == (1e-3, 1.0, 1000)
    # 60 rows, three epochs, 32 a step.
    assert (narrow.train.max_steps, narrow.optimizer.warmup_steps) == (round(3 * 60 / 32), 0)
    google = prepare_finetuning(replace(request_, overrides=files, recipe="google"), Silent()).config
    assert (google.optimizer.learning_rate, google.optimizer.weight_decay) == (1e-4, 0.01)
    assert (google.finetune.reduction, google.optimizer.schedule, google.optimizer.bias_correction) == ("sum", "released", False)
    # The last batch of an epoch is filled up: 60 rows become 64.
    assert google.train.max_steps == 6
    named = prepare_finetuning(replace(request_, overrides=(*files, "finetune.recipe=google")), Silent()).config
    assert flatten(named) == flatten(google)
    with pytest.raises(ConfigError, match=r"--recipe google, but finetune\.recipe is paper \(--set\)"):
        prepare_finetuning(replace(request_, overrides=(*files, "finetune.recipe=paper"), recipe="google"), Silent())
    with pytest.raises(ConfigError, match=r"finetune\.recipe"):
        prepare_finetuning(replace(request_, overrides=(*files, "finetune.recipe=gogle")), Silent())


def test_a_part_of_the_dev_file_is_not_evaluated_on(request_: Finetuning) -> None:
    with pytest.raises(ConfigError, match=r"train\.evaluate_sequences is 64, but fine-tuning evaluates on the whole dev file"):
        prepare_finetuning(replace(request_, overrides=(*request_.overrides, "train.evaluate_sequences=64")), Silent())
    growing = "train.batch_schedule=[[0, 64], [640, 128]]"
    with pytest.raises(ConfigError, match=r"train\.batch_schedule is for pre-training"):
        prepare_finetuning(replace(request_, overrides=(*request_.overrides, growing)), Silent())


def test_lengths_beyond_the_model_are_lowered_or_refused(request_: Finetuning) -> None:
    plan = prepare_finetuning(request_, Silent())
    assert plan.config.task_config("own").sequence_length == plan.loaded.max_length
    with pytest.raises(ConfigError, match="positions"):
        prepare_finetuning(replace(request_, overrides=(*request_.overrides, "task.sequence_length=4096")), Silent())


def test_the_untrained_network_is_another(request_: Finetuning) -> None:
    plain = prepare_finetuning(request_, Silent()).loaded
    fresh = prepare_finetuning(replace(request_, untrained=True), Silent()).loaded
    assert fresh.source_fingerprint != plain.source_fingerprint
    assert fresh.encoder.config == plain.encoder.config


def test_every_seed_draws_an_untrained_network_of_its_own(request_: Finetuning) -> None:
    run(replace(request_, untrained=True, seeds=2, overrides=(*request_.overrides, "train.max_steps=1")))
    drawn = [load_file(request_.out / f"seed-{seed}" / "model.safetensors") for seed in (0, 1)]
    (name,) = [name for name in drawn[0] if name.endswith("embeddings.word.weight")]
    # One step of Adam moves a weight by the learning rate at most: two draws are further apart than that.
    assert (drawn[0][name] - drawn[1][name]).abs().mean() > 2 * 3e-3


def test_debug_keeps_a_hundred_examples(request_: Finetuning, tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", ROWS * 100)
    assert train.is_file()
    plan = prepare_finetuning(replace(request_, debug=True), Silent())
    assert len(plan.data["own"].train.examples) == 100


def test_rows_may_be_drawn(request_: Finetuning) -> None:
    plan = prepare_finetuning(replace(request_, overrides=(*request_.overrides, "finetune.train_rows=7")), Silent())
    assert len(plan.data["own"].train.examples) == 7


def test_answers_have_a_head_that_transformers_has_unless_a_recipe_is_asked_for() -> None:
    squad, own = tasks.load("squad1"), tasks.load("sst2")

    def head(recipe: Recipe, *overrides: str) -> str:
        config = load_finetune_config([squad], ModelConfig(), given_settings(None, overrides), recipe=recipe).config.task_config(
            "squad1"
        )
        found: str = config.model_dump()["head"]
        return found

    assert head("auto") == "span"
    assert head("paper") == head("google") == head("auto", "finetune.recipe=paper") == "joint"
    assert head("google", "task.head=span") == "span"
    both = load_finetune_config([squad, own], ModelConfig(), given_settings(None, ()), recipe="google").config
    assert both.task_config("squad1").model_dump()["head"] == "joint"
    assert both.task_config("sst2").model_dump()["head"] == "linear"


def test_an_encoder_decides_the_heads_unless_a_recipe_or_the_user_does() -> None:
    def heads(recipe: Recipe, *overrides: str) -> list[str]:
        named = [tasks.load(name) for name in ("squad2", "newsqa", "sst2", "ner")]
        given = given_settings(None, overrides)
        config = load_finetune_config(named, ModelConfig(), given, recipe=recipe, encoder=ModernBertEncoder).config
        return [config.task_config(each.name).model_dump()["head"] for each in named]

    assert heads("auto") == ["prediction"] * 4
    assert heads("paper") == ["joint", "joint", "prediction", "prediction"]
    assert heads("auto", "tasks.squad2.head=span", "tasks.ner.head=linear") == ["span", "prediction", "prediction", "linear"]
