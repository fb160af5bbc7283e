"""`--task pairs` from file to sentence-transformers: training, evaluation, refusals, and the same vectors and losses there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import discern
from discern.errors import ConfigError
from discern.finetuning.evaluate import evaluate_finetuned, labeled_examples
from discern.finetuning.results import check_ranks_agree
from discern.finetuning.settings import requested_tasks
from discern.inference.prediction import predict
from discern.model_files.export import Exported, export
from discern.model_files.serving import Serving
from discern.progress import Silent
from discern.training.distributed import Ranks
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune, prepare_finetuning, write_csv
from tests.tasks.data_folder import write

WORDS = "the model reads a file of tensors and returns none at all from its shape".split()
PAIRS = [(" ".join(WORDS[n % 9 : n % 9 + 3]) + f" {n}", " ".join(WORDS[n % 9 + 1 : n % 9 + 5]) + f" {n}") for n in range(40)]
FAST = ("train.max_steps=12", "optimizer.learning_rate=1e-3", "train.sequences_per_step=16", "finetune.dropout=0.1")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_run(folder / "run")
    write_csv(folder / "train.csv", PAIRS, ("anchor", "positive"))
    write_csv(folder / "judged.csv", [(a, b, str(n % 6)) for n, (a, b) in enumerate(PAIRS)], ("sentence1", "sentence2", "score"))
    write(folder / "raw.txt", *(" ".join(WORDS[n % 9 :] + WORDS) for n in range(40)))
    for column, name in enumerate(("queries", "corpus")):
        records = ({"_id": str(n), "text": pair[column]} for n, pair in enumerate(PAIRS))
        write(folder / "search" / f"{name}.jsonl", *map(json.dumps, records))
    lines = ["query-id\tcorpus-id\tscore", *(f"{n}\t{n}\t1" for n in range(len(PAIRS)))]
    write(folder / "search" / "qrels" / "test.tsv", *lines)
    write(folder / "search" / "qrels" / "dev.tsv", *lines[:2])
    return folder


def write_export(model: Path, out: Path, serving: Serving = Serving()) -> Exported:
    return export(model, out=out, serving=serving, progress=Silent(), warn=pytest.fail)


def request(work: Path, out: Path, train: str = "train.csv", dev: str | None = None, *more: str) -> Finetuning:
    files = [f"files.train='{work / train}'", *([f"files.dev='{work / dev}'"] if dev else [])]
    return Finetuning(str(work / "run"), out, overrides=("files.task=pairs", *files, *FAST, *more))


@pytest.fixture(scope="module")
def trained(work: Path) -> tuple[Path, dict[str, Any]]:
    settings = ("task.matryoshka=[16]", "task.texts_per_pass=20")
    return work / "out", finetune(request(work, work / "out", "train.csv", "judged.csv", *settings), Silent())


@pytest.fixture(scope="module")
def exported(work: Path, trained: tuple[Path, dict[str, Any]]) -> Path:
    write_export(trained[0], work / "st")
    return work / "st"


def test_results_are_those_of_any_task(trained: tuple[Path, dict[str, Any]]) -> None:
    out, results = trained
    assert (results["task"], results["metric"]) == ("pairs", "spearman")
    assert set(results["metrics"]) == {"spearman", "pearson", "loss"}
    assert set(results["baselines"]) == {"tfidf"}
    line = json.loads((out / "seed-0" / "predictions-pairs.jsonl").read_text().splitlines()[0])
    assert set(line) == {"id", "similarity"}


@pytest.mark.parametrize(
    ("data", "metric", "examples"),
    [
        ("judged.csv", "spearman", 40),
        ("train.csv", "ndcg_at_10", 40),
        ("search", "ndcg_at_10", 41),
        ("search/qrels/test.tsv", "ndcg_at_10", 80),
    ],
)
def test_every_kind_of_file_is_evaluated(
    work: Path, trained: tuple[Path, dict[str, Any]], exported: Path, data: str, metric: str, examples: int
) -> None:
    scores = [evaluate_finetuned(model, work / data, progress=Silent(), baselines=False) for model in (trained[0], exported)]
    assert scores[0] == scores[1]
    assert (scores[0]["metric"], scores[0]["examples"]) == (metric, examples)


@pytest.mark.parametrize(
    ("train", "dev", "metric"),
    [
        ("train.csv", None, "ndcg_at_10"),
        ("judged.csv", None, "spearman"),
        ("train.csv", "search", "ndcg_at_10"),
    ],
)
def test_the_file_to_evaluate_on_decides_the_metric(work: Path, train: str, dev: str | None, metric: str) -> None:
    settings = ("task.unjudged=leave-out",)
    (data,) = prepare_finetuning(request(work, work / "unused", train, dev, *settings), Silent()).data.values()
    assert data.task.metrics[0] == metric
    assert data.dev_name == ("dev" if dev else "held out of train")


def test_the_vectors_are_those_of_sentence_transformers(trained: tuple[Path, dict[str, Any]], exported: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    texts = [*PAIRS[0], PAIRS[1][0], "x", " ".join(WORDS * 12)]  # the last one is truncated
    theirs = library.SentenceTransformer(str(exported), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(np.linalg.norm(theirs, axis=1), 1, atol=1e-5)
    models = [discern.load(folder, device="cpu") for folder in (trained[0], exported)]
    assert models[0].fingerprint == models[1].fingerprint
    smaller = theirs[:2, :16] / np.linalg.norm(theirs[:2, :16], axis=1, keepdims=True)
    for model in models:
        with pytest.warns(UserWarning, match="the rest is not read"):
            np.testing.assert_allclose(model.encode(texts), theirs, atol=1e-5)
        np.testing.assert_allclose(model.encode(texts[:2], size=16), smaller, atol=1e-5)


def test_eight_bits_are_compared_on_the_texts_that_are_named(
    work: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    serving = Serving(onnx=True, int8=True, texts=work / "train.csv", labeled=labeled_examples)
    done = write_export(trained[0], tmp_path / "out", serving)
    assert done.parity is not None
    assert (done.parity["compared_on"], done.parity["scores"]) == ("train.csv", {})


def test_another_pooling_than_the_trained_one_is_refused(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    serving = Serving(sentence_transformers=True, pooling="cls")
    with pytest.raises(ConfigError, match="--pooling is 'cls', but the model was trained with 'mean-all'"):
        write_export(trained[0], tmp_path / "out", serving)


def test_a_card_says_what_it_is(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert "SentenceTransformer" in card


def test_texts_alone_are_learned_from_by_dropout(work: Path, tmp_path: Path) -> None:
    raw = request(work, tmp_path / "out", "raw.txt", "judged.csv", "train.max_steps=2")
    assert finetune(raw, Silent())["metric"] == "spearman"
    with pytest.raises(ConfigError, match="dropout is 0, but training on single texts") as error:
        prepare_finetuning(replace(raw, overrides=(*raw.overrides, "finetune.dropout=0")), Silent())
    assert "task.positives=crop" in (error.value.hint or "")
    with pytest.raises(ConfigError, match="has single texts rather than pairs, so none of it can be held out"):
        prepare_finetuning(request(work, tmp_path / "out", "raw.txt"), Silent())


def test_crops_of_texts_and_judged_pairs_are_learned_from_with_fewer_layers(work: Path, tmp_path: Path) -> None:
    settings = ("train.max_steps=2", "finetune.layers=1", "finetune.dropout=0", "task.positives=crop")
    finetune(request(work, tmp_path / "crops", "raw.txt", "judged.csv", *settings), Silent())
    write_export(tmp_path / "crops", tmp_path / "cropped")
    assert json.loads((tmp_path / "cropped" / "config.json").read_text())["num_hidden_layers"] == 1
    judged = request(work, tmp_path / "judged", "judged.csv", "judged.csv", "train.max_steps=40")
    results = finetune(replace(judged, model=str(tmp_path / "cropped")), Silent())
    before = evaluate_finetuned(tmp_path / "crops", work / "judged.csv", progress=Silent())
    assert before["baselines"], "of the texts that it was trained on"
    assert results["median"] > before["score"] + 0.1, "trained on the pairs that it is evaluated on"


@pytest.mark.parametrize(
    ("train", "setting", "message"),
    [
        ("train.csv", "task.matryoshka=[64]", "the vectors of this model have 32"),
        ("train.csv", "train.micro_batch_size=4", "compares all rows of a step"),
        ("train.csv", "files.words=anchor", "--words is not a column of pairs"),
        ("train.csv", "files.test=train.csv", "pairs have no labels"),
        ("train.csv", "files.pair=positive", "the first is not named"),
        ("train.csv", "task.positives=crop", "is for single texts"),
        ("train.csv", "finetune.layers=5", "the encoder has 2"),
        ("search", "train.max_steps=1", "which can only be evaluated on"),
        ("judged.csv", "files.text=sentense1", "judged.csv has no column 'sentense1'"),
    ],
)
def test_wrong_settings_are_refused_before_training(work: Path, tmp_path: Path, train: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_finetuning(request(work, tmp_path / "out", train, "judged.csv", setting), Silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "data", "train"), [(["pairs", "sst2"], [], "a"), (["pairs"], [Path()], "a"), (["pairs"], [], None)]
)
def test_pairs_are_the_only_task_and_have_a_file(names: list[str], data: list[Path], train: str | None) -> None:
    with pytest.raises(ConfigError, match="task 'pairs' is trained alone, on a file of your own"):
        requested_tasks(names, data, {"train": train})


def test_passes_need_whole_weights(work: Path, tmp_path: Path) -> None:
    settings = ("task.texts_per_pass=4", "train.parallel=fsdp")
    plan = prepare_finetuning(request(work, tmp_path / "out", "train.csv", "judged.csv", *settings), Silent())
    with pytest.raises(ConfigError, match=r"task\.texts_per_pass is 4, .* train\.parallel is 'fsdp'"):
        check_ranks_agree(plan, Ranks(0, 2, torch.device("cpu")))


def test_predictions_are_refused_with_the_verb_that_embeds(work: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="predicts no labels") as error:
        predict(trained[0], work / "train.csv", lambda _: None, Silent())
    assert "discern embed" in (error.value.hint or "")
    with pytest.raises(ConfigError, match="predicts no labels"):
        discern.load(trained[0]).predict(["a"])
