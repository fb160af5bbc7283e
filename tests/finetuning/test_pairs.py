"""`--task pairs` from file to sentence-transformers: training, evaluation, refusals, and the same vectors and losses there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import discern
from discern.errors import ConfigError, DataError
from discern.finetuning.evaluate import evaluate_finetuned, labeled_examples
from discern.finetuning.own_tasks import requested_tasks
from discern.finetuning.run import check_plan
from discern.inference.predict import predict
from discern.model_files.export import Exported, export
from discern.model_files.folder import open_model
from discern.model_files.serving import Serving
from discern.progress import Silent
from discern.tasks.contrastive_loss import Vectors, cosent, info_nce
from discern.training.distributed import Ranks
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune, prepare_finetuning, write_csv

WORDS = "the model reads a file of tensors and returns none at all from its shape".split()
PAIRS = [(" ".join(WORDS[n % 9 : n % 9 + 3]) + f" {n}", " ".join(WORDS[n % 9 + 1 : n % 9 + 5]) + f" {n}") for n in range(40)]
FAST = ("train.max_steps=12", "optimizer.learning_rate=1e-3", "train.sequences_per_step=16", "finetune.dropout=0.1")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_run(folder / "run")
    write_csv(folder / "train.csv", PAIRS, ("anchor", "positive"))
    write_csv(folder / "judged.csv", [(a, b, str(n % 6)) for n, (a, b) in enumerate(PAIRS)], ("sentence1", "sentence2", "score"))
    (folder / "search" / "qrels").mkdir(parents=True)
    texts = {"queries": [{"_id": str(n), "text": a} for n, (a, _) in enumerate(PAIRS)]}
    texts["corpus"] = [{"_id": str(n), "text": b} for n, (_, b) in enumerate(PAIRS)]
    for name, records in texts.items():
        (folder / "search" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = ["query-id\tcorpus-id\tscore", *(f"{n}\t{n}\t1" for n in range(len(PAIRS)))]
    (folder / "search" / "qrels" / "test.tsv").write_text("\n".join(lines))
    return folder


def write_export(model: Path, out: Path, serving: Serving = Serving()) -> Exported:
    return export(model, out=out, serving=serving, progress=Silent(), warn=pytest.fail)


def request(work: Path, out: Path, train: str = "train.csv", dev: str | None = None, *more: str) -> Finetuning:
    files = [f"files.train='{work / train}'", *([f"files.dev='{work / dev}'"] if dev else [])]
    return Finetuning(str(work / "run"), out, overrides=("files.task=pairs", *files, *FAST, *more))


@pytest.mark.parametrize(
    ("column", "option", "nearest"),
    [("label", "Score", "score"), ("text", "sentense1", "sentence1"), ("pair", "sentense2", "sentence2")],
)
def test_a_misspelled_column_of_the_training_file_is_refused(work: Path, column: str, option: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"judged.csv has no column '{option}'") as caught:
        prepare_finetuning(request(work, work / "unused", "judged.csv", None, f"files.{column}={option}"), Silent())
    assert f"did you mean '{nearest}'" in str(caught.value.hint)


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
    assert results["baselines"]["tfidf"]["metrics"]["spearman"] <= 1
    assert json.loads((out / "results.json").read_text())["median"] == results["median"]
    line = json.loads((out / "seed-0" / "predictions-pairs.jsonl").read_text().splitlines()[0])
    assert set(line) == {"id", "similarity"}


def test_every_kind_of_file_is_evaluated(
    work: Path, trained: tuple[Path, dict[str, Any]], exported: Path, tmp_path: Path
) -> None:
    for data, metric in (("judged.csv", "spearman"), ("train.csv", "ndcg_at_10"), ("search", "ndcg_at_10")):
        found = evaluate_finetuned(trained[0], work / data, progress=Silent())
        assert found["metric"] == metric
        assert found == {**evaluate_finetuned(exported, work / data, progress=Silent()), "baselines": found["baselines"]} | {
            key: found[key] for key in ("best_baseline", "beats_baselines")
        }
    assert found["score"] > 0
    shutil.copytree(work / "search", tmp_path / "search")
    with (tmp_path / "search" / "queries.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"_id": "of another split", "text": "who?"}) + "\n")
    assert evaluate_finetuned(trained[0], tmp_path / "search", progress=Silent())["score"] == found["score"]
    # One of several splits is named by its file.
    qrels = tmp_path / "search" / "qrels"
    (qrels / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n0\t0\t1\n")
    for data, queries in ((tmp_path / "search", 1), (qrels / "dev.tsv", 1), (qrels / "test.tsv", len(PAIRS))):
        assert evaluate_finetuned(trained[0], data, progress=Silent())["examples"] == queries + len(PAIRS)
    assert evaluate_finetuned(trained[0], qrels / "test.tsv", progress=Silent())["score"] == found["score"]
    held_out = prepare_finetuning(request(work, work / "unused"), Silent())
    assert held_out.data["pairs"].dev_name == "held out of train"
    assert held_out.data["pairs"].task.metrics[0] == "ndcg_at_10"
    for dev in ("search", "search/qrels/test.tsv"):
        searched = prepare_finetuning(request(work, work / "unused", "train.csv", dev), Silent())
        assert len(searched.data["pairs"].evaluated["dev"].examples) == 80
    with pytest.raises(ConfigError, match=r"test\.tsv says which documents are relevant to queries, which can only be evaluated"):
        prepare_finetuning(request(work, work / "unused", "search/qrels/test.tsv"), Silent())


def test_the_vectors_are_those_of_sentence_transformers(trained: tuple[Path, dict[str, Any]], exported: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    texts = [*PAIRS[0], PAIRS[1][0], "x", " ".join(WORDS * 12)]  # the last one is truncated
    theirs = library.SentenceTransformer(str(exported), device="cpu", local_files_only=True).encode(texts)
    for folder in (trained[0], exported):
        model = discern.load(folder, device="cpu")
        with pytest.warns(UserWarning, match="the rest is not read"):
            np.testing.assert_allclose(model.encode(texts), theirs, atol=1e-5)
        assert model.fingerprint == discern.load(exported, device="cpu").fingerprint
    np.testing.assert_allclose(np.linalg.norm(theirs, axis=1), 1, atol=1e-5)
    smaller = model.encode(texts[:2], size=16)
    np.testing.assert_allclose(smaller, theirs[:2, :16] / np.linalg.norm(theirs[:2, :16], axis=1, keepdims=True), atol=1e-5)


def vectors_of(exported: Path) -> torch.Tensor:
    """Our vectors of both sides of the pairs."""
    ours = discern.load(exported, device="cpu")
    return torch.tensor(np.stack([ours.encode([pair[place] for pair in PAIRS], normalize=False) for place in (0, 1)], 1))


def test_the_losses_are_those_of_sentence_transformers(exported: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses

    model = library.SentenceTransformer(str(exported), device="cpu", local_files_only=True).eval()
    features = [model.tokenize([pair[place] for pair in PAIRS]) for place in (0, 1)]
    vectors = vectors_of(exported)
    mine = Vectors(vectors, torch.arange(1, 81).view(40, 2))
    plain = losses.MultipleNegativesRankingLoss(model)
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=16)
    for loss, sizes in ((plain, ()), (cached, ()), (losses.MatryoshkaLoss(model, plain, [32, 16]), (32, 16))):
        with torch.no_grad():
            theirs = loss([dict(each) for each in features], torch.zeros(40))
        assert float(info_nce(mine, mine, 0, temperature=0.05, sizes=sizes)) / 40 == pytest.approx(float(theirs), abs=1e-4)


def test_the_loss_of_judged_pairs_is_that_of_sentence_transformers(exported: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses

    model = library.SentenceTransformer(str(exported), device="cpu", local_files_only=True).eval()
    features = [model.tokenize([pair[place] for pair in PAIRS]) for place in (0, 1)]
    vectors = vectors_of(exported)
    scores = torch.tensor([float(n % 6) for n in range(40)])
    with torch.no_grad():
        theirs = losses.CoSENTLoss(model)(features, scores)
    assert float(cosent(vectors, scores, temperature=0.05)) == pytest.approx(float(theirs), abs=1e-4)


def test_eight_bits_are_compared_on_the_texts_that_are_named(
    work: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    for texts, named in ((None, "English sentences of discern"), (work / "train.csv", "train.csv")):
        serving = Serving(onnx=True, int8=True, texts=texts, labeled=labeled_examples)
        done = write_export(trained[0], tmp_path / "out", serving)
        assert done.parity is not None
        assert (done.parity["compared_on"], done.parity["scores"]) == (named, {})


def test_another_pooling_than_the_trained_one_is_refused(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    serving = Serving(sentence_transformers=True, pooling="cls")
    with pytest.raises(ConfigError, match="--pooling is 'cls', but the model was trained with 'mean-all'"):
        write_export(trained[0], tmp_path / "out", serving)


def test_a_card_says_what_it_is(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert "SentenceTransformer" in card


def test_texts_alone_are_learned_from_by_dropout(work: Path, tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_text("\n".join(first for first, _ in PAIRS))
    raw = replace(request(work, tmp_path / "out", "train.csv", "judged.csv"), seeds=1)
    raw = replace(raw, overrides=(*raw.overrides, f"files.train='{tmp_path / 'raw.txt'}'", "train.max_steps=2"))
    assert finetune(raw, Silent())["metric"] == "spearman"
    with pytest.raises(ConfigError, match="dropout is 0, but training on single texts") as caught:
        prepare_finetuning(replace(raw, overrides=(*raw.overrides, "finetune.dropout=0")), Silent())
    assert "task.positives=crop" in (caught.value.hint or "")
    alone = replace(raw, overrides=("files.task=pairs", f"files.train='{tmp_path / 'raw.txt'}'"))
    with pytest.raises(ConfigError, match="has single texts rather than pairs, so none of it can be held out"):
        prepare_finetuning(alone, Silent())


def test_crops_of_texts_and_judged_pairs_are_learned_from_with_fewer_layers(work: Path, tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_text("\n".join(" ".join(WORDS[n % 9 :] + WORDS) for n in range(40)))
    crops = request(work, tmp_path / "crops", "train.csv", "judged.csv", "train.max_steps=2", "finetune.layers=1")
    crops = replace(crops, overrides=(*crops.overrides, f"files.train='{tmp_path / 'raw.txt'}'", "task.positives=crop"))
    assert finetune(replace(crops, overrides=(*crops.overrides, "finetune.dropout=0")), Silent())["metric"] == "spearman"
    write_export(tmp_path / "crops", tmp_path / "cropped")
    assert json.loads((tmp_path / "cropped" / "config.json").read_text())["num_hidden_layers"] == 1
    texts = [first for first, _ in PAIRS]
    np.testing.assert_allclose(*(discern.load(tmp_path / each).encode(texts) for each in ("crops", "cropped")), atol=1e-5)
    judged = replace(request(work, tmp_path / "judged", "judged.csv", "judged.csv", "train.max_steps=40"))
    results = finetune(replace(judged, model=str(tmp_path / "cropped")), Silent())
    before = evaluate_finetuned(tmp_path / "crops", work / "judged.csv", progress=Silent())
    assert before["baselines"], "of the texts that it was trained on"
    assert results["median"] > before["score"] + 0.1, "trained on the pairs that it is evaluated on"
    held_out = prepare_finetuning(request(work, work / "unused", "judged.csv"), Silent())
    assert held_out.data["pairs"].task.metrics[0] == "spearman"


def test_an_xlnet_learns_vectors_in_its_own_framing_alone(work: Path, tmp_path: Path) -> None:
    settings = ("objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32")
    make_run(tmp_path / "run", overrides=settings)
    short = replace(request(work, tmp_path / "out", "train.csv", "judged.csv", "train.max_steps=2"), seeds=1)
    short = replace(short, model=str(tmp_path / "run"))
    with pytest.raises(
        ConfigError, match="frame is 'cls-first', but vectors of this encoder are read in its own framing, 'cls-last'"
    ):
        prepare_finetuning(replace(short, overrides=(*short.overrides, "finetune.frame=cls-first")), Silent())
    finetune(short, Silent())
    write_export(tmp_path / "out", tmp_path / "exported")
    assert "to a vector of 32 components" in (tmp_path / "exported" / "README.md").read_text()
    texts = [first for first, _ in PAIRS[:3]]
    np.testing.assert_allclose(*(discern.load(tmp_path / each).encode(texts) for each in ("out", "exported")), atol=1e-5)


def test_wrong_settings_are_refused_before_training(work: Path, tmp_path: Path) -> None:
    cases = {
        "task.temperature=0": "temperature",
        "task.matryoshka=[64]": "the vectors of this model have 32",
        "train.micro_batch_size=4": "compares all rows of a step",
        "files.words=anchor": "--words is not a column of pairs",
        "task.positives=crop": "is for single texts",
        "finetune.layers=5": "the encoder has 2",
        "finetune.frame=cls-last": "read in its own framing, 'cls-first'",
    }
    for setting, said in cases.items():
        with pytest.raises(ConfigError, match=said):
            prepare_finetuning(request(work, tmp_path / "out", "train.csv", "judged.csv", setting), Silent())
    write_csv(work / "one.csv", PAIRS[:1], ("anchor", "positive"))
    with pytest.raises(DataError, match="single pair"):
        prepare_finetuning(request(work, tmp_path / "out", "one.csv", "judged.csv"), Silent())
    assert not (tmp_path / "out").exists()
    for names, data, train in ((["pairs", "sst2"], [], "a"), (["pairs"], [work], "a"), (["pairs"], [], None)):
        with pytest.raises(ConfigError):
            requested_tasks(names, data, {"train": train})


def test_passes_need_whole_weights(work: Path, tmp_path: Path) -> None:
    settings = ("task.texts_per_pass=4", "train.parallel=fsdp")
    plan = prepare_finetuning(request(work, tmp_path / "out", "train.csv", "judged.csv", *settings), Silent())
    with pytest.raises(ConfigError, match=r"task\.texts_per_pass is 4, .* train\.parallel is 'fsdp'"):
        check_plan(plan, 1, Ranks(0, 2, torch.device("cpu")))


def test_predictions_are_refused_with_the_verb_that_embeds(work: Path, trained: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="predicts no labels") as caught:
        predict(trained[0], work / "train.csv", lambda _: None, Silent())
    assert "discern embed" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="predicts no labels"):
        discern.load(trained[0]).predict(["a"])


def test_the_weights_of_a_folder_open_again(trained: tuple[Path, dict[str, Any]]) -> None:
    model = open_model(trained[0], warn=pytest.fail).task_model()
    assert model.task().labels.kind == "vectors"
