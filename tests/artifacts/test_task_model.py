"""Fine-tunings, their exports and foreign task models say the same, to `discern predict` and to `discern.load`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import discern
from discern.artifacts.opening import open_model
from discern.convert.export_finetuned import export_task
from discern.data.tokenizer import load_tokenizer
from discern.errors import CheckpointError, ConfigError, DataError
from discern.inference.predict import predict
from discern.interop.names import HEAD_NAME
from discern.progress import Silent
from tests.small.finetuned import MODERN, MULTI, NUMBER, PAIR, SINGLE, SPANS, TAGS, XLNET, make_finetuned
from tests.small.run import make_run

TEXTS = ["The chef cooked the meal.", "purple elephants ate, and [SEP] guests", "x", ""]
PAIRS = [("The chef", "cooked the meal."), ("purple elephants", "hello")]
WORDS = [["The", "chef", "cooked", "naive", "elephants"], ["hello"]]
QUESTIONS = [("who ate the meal?", "purple elephants ate the meal"), ("who?", "the chef and the guests " * 12)]
KINDS = {
    "single": (SINGLE, TEXTS),
    "pair": (PAIR, PAIRS),
    "compared": (replace(PAIR, settings={"pooling": "pair"}), PAIRS),
    "multi": (MULTI, TEXTS),
    "number": (NUMBER, TEXTS),
    "dense": (replace(SINGLE, settings={"head": "dense"}), TEXTS),
    "xlnet-summary": (replace(SINGLE, settings={"head": "summary"}), TEXTS),
    "xlnet-dense": (replace(SINGLE, settings={"head": "dense"}), TEXTS),
    "tags": (TAGS, WORDS),
    "spans": (SPANS, QUESTIONS),
    "joint": (replace(SPANS, settings={"sequence_length": 48, "head": "joint"}), QUESTIONS),
    "modern-mean": (replace(SINGLE, settings={"head": "prediction", "pooling": "mean"}), TEXTS),
    "modern-multi": (replace(MULTI, settings={"head": "prediction"}), TEXTS),
    "modern-number": (replace(NUMBER, settings={"head": "prediction"}), TEXTS),
    "modern-tags": (replace(TAGS, settings={"head": "prediction"}), WORDS),
    "modern-spans": (replace(SPANS, settings={"sequence_length": 48, "head": "prediction"}), QUESTIONS),
    "modern-joint": (replace(SPANS, settings={"sequence_length": 48, "head": "joint"}), QUESTIONS),
    "maybe": (replace(SPANS, family="squad2", labels=replace(SPANS.labels, names=("answerable", "impossible"))), QUESTIONS),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuning and its export, `-out`, of each kind."""
    root = tmp_path_factory.mktemp("tasks")
    for name, (made, _) in KINDS.items():
        make_finetuned(root / name, model={"modern": MODERN, "xlnet": XLNET}.get(name.partition("-")[0]), own=made)
        export_task(root / name, out=root / f"{name}-out", progress=Silent())
    make_finetuned(root / "several", seeds=2, first=SINGLE, second=NUMBER)
    return root


def leaves(value: Any) -> list[Any]:
    """Keys and values of a prediction, in a row."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in (key, *leaves(value[key]))]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def about(value: Any) -> Any:
    """A number up to rounding: an export computes the same by way of other layers."""
    return pytest.approx(value, abs=2e-4) if isinstance(value, float) else value


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_says_what_the_fine_tuning_says(folders: Path, kind: str) -> None:
    texts = KINDS[kind][1]
    tuned, exported = discern.load(folders / kind, device="cpu"), discern.load(folders / f"{kind}-out", device="cpu")
    ours, theirs = tuned.predict(texts), exported.predict(texts)
    assert len(ours) == len(texts)
    assert leaves(theirs) == [about(leaf) for leaf in leaves(ours)]
    assert tuned.predict([]) == []
    assert tuned.labels() == exported.labels()


def test_python_says_what_the_command_says(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"review": text}) + "\n" for text in TEXTS[:3]))
    lines: list[dict[str, Any]] = []
    for folder in ("single", "single-out"):
        predict(folders / folder, tmp_path / "a.jsonl", lines.extend, Silent())
    ours = discern.load(folders / "single").predict(TEXTS[:3])
    assert [each["probabilities"] for each in lines[:3]] == [each["probabilities"] for each in ours]
    for mine, first, second in zip(ours, lines[:3], lines[3:], strict=True):
        assert first["label"] == second["label"] == mine["label"]
        assert mine["probability"] == first["probabilities"][mine["label"]] == max(first["probabilities"].values())
        assert second["probabilities"] == pytest.approx(first["probabilities"], abs=2e-5)


def test_an_export_reads_files_by_the_columns_of_the_training_file(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("b,a\nfirst,second\n")
    found: list[list[dict[str, Any]]] = [[], []]
    for folder, said in zip(("pair", "pair-out"), found, strict=True):
        predict(folders / folder, tmp_path / "pairs.csv", said.extend, Silent())
    assert found[0][0]["probabilities"] == pytest.approx(found[1][0]["probabilities"], abs=2e-5)
    assert discern.load(folders / "pair").predict([("second", "first")])[0]["label"] == found[0][0]["label"]


def test_an_export_is_evaluated_as_its_fine_tuning(folders: Path, tmp_path: Path) -> None:
    rows = "".join(f"{text},{label}\n" for text, label in (("the chef", "good"), ("hello", "bad"), ("guests ate", "so-so")))
    (tmp_path / "dev.csv").write_text(f"review,stars\n{rows}")
    ours, theirs = (
        discern.evaluate(folders / name, data=tmp_path / "dev.csv", device="cpu") for name in ("single", "single-out")
    )
    assert theirs == ours | {"loss": pytest.approx(ours["loss"], abs=1e-4)}


def test_what_the_answers_hold(folders: Path) -> None:
    (tags, _) = discern.load(folders / "tags-out").predict(WORDS)
    assert tags["words"] == WORDS[0]
    assert len(tags["tags"]) == len(tags["probabilities"]) == 5
    for start, stop, kind in tags["spans"]:
        assert tags["tags"][start] == f"B-{kind}"
        assert all(tag == f"I-{kind}" for tag in tags["tags"][start + 1 : stop])
    assert discern.load(folders / "tags").predict([" ".join(WORDS[0])]) == [tags], "white space separates the words of a text"
    for (_, context), said in zip(QUESTIONS, discern.load(folders / "joint-out").predict(QUESTIONS), strict=True):
        assert context[said["start"] : said["end"]] == said["answer"] != ""
        assert said["probability"] == said["nbest"][0]["probability"]
    named = [{"question": question, "context": context} for question, context in QUESTIONS]
    model = discern.load(folders / "maybe")
    assert model.predict(named) == model.predict(QUESTIONS)
    assert all((said["start"] is None) == (said["answer"] == "") for said in model.predict(QUESTIONS))
    assert set(discern.load(folders / "number").predict(TEXTS)[0]) == {"score"}


def test_arrays_and_data_frames(folders: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model = discern.load(folders / "single")
    expected = model.predict(TEXTS)
    assert model.predict(np.array(TEXTS)) == model.predict(pandas.Series(TEXTS, index=[5, 4, 3, 2])) == expected
    pair = discern.load(folders / "pair")
    frame = pandas.DataFrame(PAIRS, columns=["a", "b"])
    assert pair.predict(frame.to_numpy()) == pair.predict(PAIRS)


def test_several_tasks_and_seeds(folders: Path) -> None:
    model = discern.load(folders / "several")
    with pytest.raises(ConfigError, match="fine-tuned on several tasks: first, second"):
        model.predict(TEXTS)
    assert "label" in model.predict(TEXTS, task="first")[0]
    zero, best = model.predict(TEXTS, task="second", seed=0), model.predict(TEXTS, task="second")
    assert zero != best
    assert best == model.predict(TEXTS, task="second", seed=1)
    with pytest.raises(ConfigError, match="a single set of weights") as caught:
        discern.load(folders / "single-out").predict(TEXTS, seed=0)
    assert "seed" in str(caught.value.hint)


def test_the_encoder_of_a_fine_tuning_encodes(folders: Path) -> None:
    tuned, exported = discern.load(folders / "single", device="cpu"), discern.load(folders / "single-out", device="cpu")
    np.testing.assert_allclose(tuned.encode(TEXTS[:3]), exported.encode(TEXTS[:3]), atol=1e-5)
    assert tuned.max_length == exported.max_length == 32


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        ("single", "a text", "found a single text"),
        ("single", [("a", "b")], "expected a text"),
        ("single", ["a", 3], "item 1 is 3"),
        ("pair", ["a"], "expected a pair of texts"),
        ("tags", [3], "a list of its words"),
        ("spans", ["who?"], "a pair .question, context."),
    ],
)
def test_what_is_not_a_text_is_refused(folders: Path, kind: str, wrong: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        discern.load(folders / kind).predict(wrong)


def test_folders_without_a_task(folders: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(DataError, match="is a run without a task head") as caught:
        discern.load(tmp_path / "run").predict(TEXTS)
    assert "discern finetune" in str(caught.value.hint)
    assert not open_model(tmp_path / "run", warn=pytest.fail).has_task_head
    assert open_model(folders / "joint-out", warn=pytest.fail).has_task_head
    with pytest.raises(CheckpointError, match="a bare encoder or a fine-tuned model"):
        open_model(folders / "joint-out", warn=pytest.fail).networks()


def test_a_head_beside_the_encoder(folders: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    assert export_task(folders / "modern-joint", out=tmp_path / "modern", progress=Silent()).architecture == "ModernBertModel"
    done = export_task(folders / "joint", out=tmp_path / "out", progress=Silent())
    assert done.architecture == "ElectraModel"
    for folder in (tmp_path / "modern", tmp_path / "out"):
        assert (folder / HEAD_NAME).is_file()
        _, info = AutoModel.from_pretrained(folder, output_loading_info=True)
        assert {key: list(value) for key, value in info.items() if value} == {}
    (tmp_path / "out" / HEAD_NAME).unlink()
    with pytest.raises(CheckpointError, match=HEAD_NAME):
        open_model(tmp_path / "out", warn=pytest.fail).task_model()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda config: config["discern"]["record"].pop("tasks"), "its task settings"),
        (lambda config: config["discern"]["record"].update(tasks=[]), "its task settings"),
        (lambda config: config["discern"]["record"]["tasks"]["own"].update(labels=3), "its task settings"),
        (
            lambda config: config["discern"]["record"]["tasks"]["own"]["config"].update(sequence_length=-1),
            "its task settings",
        ),
        (
            lambda config: (config.pop("discern"), config.pop("id2label"), config.update(num_labels=10**9)),
            "num_labels is 1000000000",
        ),
        (lambda config: (config.pop("discern"), config.update(id2label={"x": "y"})), "id2label must have a label"),
    ],
)
def test_a_damaged_record_is_named(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[dict[str, Any]], object], says: str
) -> None:
    monkeypatch.setenv("DISCERN_VERIFY", "0")
    shutil.copytree(folders / "single-out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    damage(config)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        open_model(tmp_path / "out", warn=pytest.fail).task_model()


# Transformers' own models, from here on.


def small(kind: str, **options: Any) -> Any:
    """The configuration of a tiny Electra, BERT or ModernBERT."""
    import transformers

    if kind == "ModernBert":
        options |= {"pad_token_id": 0, "classifier_pooling": "mean"}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vocabulary = load_tokenizer(Path(options.pop("tokenizer"))).get_vocab_size()
    return getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, initializer_range=1.0, **sizes, **options)


@pytest.mark.parametrize("kind", ["Electra", "Bert", "ModernBert"])
@pytest.mark.parametrize("ending", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"])
@torch.no_grad()
def test_a_model_of_transformers(folders: Path, tmp_path: Path, kind: str, ending: str) -> None:
    import transformers

    labels = {0: "O", 1: "B-X", 2: "I-X"}
    (tmp_path / "dev.csv").write_text("text,label\nhello,O\n")
    config = small(kind, tokenizer=folders / "single" / "tokenizer.json", id2label=labels)
    if ending == "ForQuestionAnswering":
        config.num_labels = 2
    theirs = getattr(transformers, f"{kind}{ending}")(config).eval()
    theirs.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(folders / "single" / "tokenizer.json")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="does not record which columns"):
        discern.evaluate(tmp_path, data=tmp_path / "dev.csv")
    model = discern.load(tmp_path, device="cpu")
    if ending == "ForQuestionAnswering":
        encoded = tokenizer.encode(*QUESTIONS[0])
        segments = {} if kind == "ModernBert" else {"token_type_ids": torch.tensor([encoded.type_ids])}
        out = theirs(torch.tensor([encoded.ids]), **segments)
        (said,) = model.predict(QUESTIONS[:1])
        first = encoded.char_to_token(said["start"], 1)
        last = encoded.char_to_token(said["end"] - 1, 1)
        assert float(out.start_logits[0, first] + out.end_logits[0, last]) == pytest.approx(said["nbest"][0]["score"], abs=1e-3)
        return
    logits = theirs(torch.tensor([tokenizer.encode("the chef ate").ids])).logits[0]
    if ending == "ForSequenceClassification":
        (said,) = model.predict(["the chef ate"])
        assert list(said["probabilities"].values()) == pytest.approx(logits.softmax(-1).tolist(), abs=1e-4)
    else:
        (said,) = model.predict(["the chef ate"])
        assert said["probabilities"] == pytest.approx(logits[1:-1].softmax(-1).max(-1).values.tolist(), abs=1e-4)
        assert model.labels() == ("O", "B-X", "I-X")


def test_a_pipeline_finds_the_spans(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeline("token-classification")` groups words by the labels of BIO as our own reader of BIOES does."""
    from transformers import pipeline

    config = json.loads((folders / "tags-out" / "config.json").read_text())
    assert set(config["id2label"].values()) == {"O", "B-X", "I-X"}
    card = (folders / "tags-out" / "README.md").read_text()
    assert 'aggregation_strategy="first"' in card
    tagger = pipeline("token-classification", model=str(folders / "tags-out"), aggregation_strategy="first")
    model = discern.load(folders / "tags-out")
    found = 0
    for text in ("the purple elephants ate hello", "hello guests ate the naive meal", "the chef cooked purple meal and guests"):
        (said,) = model.predict([text])
        words = text.split()
        starts = [sum(len(word) + 1 for word in words[:number]) for number in range(len(words))]
        spans = [(starts[start], starts[stop - 1] + len(words[stop - 1])) for start, stop, _ in said["spans"]]
        # A span that follows another without B is one with it to the pipeline; what the two cover is the same.
        covered = {place for start, end in spans for place in range(start, end) if text[place] != " "}
        theirs = {place for each in tagger(text) for place in range(each["start"], each["end"]) if text[place] != " "}
        assert theirs == covered, text
        assert {each["entity_group"] for each in tagger(text)} <= {"X"}
        found += len(spans)
    assert found > 2
