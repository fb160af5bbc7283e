"""Fine-tuned models: folder, export, and the class of transformers for it predict the same; so do models of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import discern
from discern.data.tokenizer import load_tokenizer, vocab_size
from discern.errors import CheckpointError, ConfigError, DataError
from discern.model_files.export import FILES, Exported, export
from discern.model_files.folder import open_model
from discern.model_files.hub import CONFIG_NAME, HEAD_NAME, WEIGHTS_NAME
from discern.model_files.huggingface import SETTINGS_NAME
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME, write_recorded
from discern.tasks.base import Labels
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.supervised import supervised
from tests.parity.small_networks import make_noisy, sizes
from tests.small.finetuned import DEBERTA, MODERN, MULTI, NUMBER, PAIR, SINGLE, SPANS, TAGS, XLNET, Made, make_finetuned
from tests.small.tokenizers import HARD

# A special token that a text spells out is one to transformers, but not to discern.
SPELLED = "purple elephants ate, and [SEP] guests"
TEXTS = [*(text for text in HARD if "[" not in text), "", "the chef cooked the meal " * 20, SPELLED]
# Where both are too long and the second is the longer, transformers keeps one token more of it; the card says so.
LONG = [("the chef " * 30, "the meal"), ("hello", "guests ate " * 30), ("the chef " * 30, "the meal " * 20)]
PAIRS = [("The chef", "cooked the meal."), ("purple elephants", "hello"), *LONG]
WORDS = [["The", "chef", "cooked", "naive", "elephants"], ["hello"], "hello guests ate the naive meal".split()]
QUESTIONS = [("who ate the meal?", "purple elephants ate the meal"), ("who?", "the chef and the guests " * 12)]


def with_settings(made: Made, **settings: Any) -> Made:
    return replace(made, settings={**(made.settings or {}), **settings})


KINDS: dict[str, tuple[Made, list[Any]]] = {
    "single": (SINGLE, TEXTS),
    "widest": (replace(SINGLE, labels=Labels(tuple("abcdefghijklmnop"))), TEXTS),
    "pair": (PAIR, PAIRS),
    "compared": (with_settings(PAIR, pooling="pair"), PAIRS),
    "multi": (MULTI, TEXTS),
    "number": (NUMBER, TEXTS),
    "dense": (with_settings(SINGLE, head="dense"), TEXTS),
    "tags": (TAGS, WORDS),
    "spans": (SPANS, QUESTIONS),
    "joint": (with_settings(SPANS, head="joint"), QUESTIONS),
    "maybe": (replace(SPANS, family="squad2", labels=replace(SPANS.labels, names=("answerable", "impossible"))), QUESTIONS),
    "xlnet-summary": (with_settings(SINGLE, head="summary"), TEXTS),
    "xlnet-dense": (with_settings(SINGLE, head="dense"), TEXTS),
    "xlnet-pair": (PAIR, PAIRS),
    "xlnet-number": (with_settings(NUMBER, head="summary"), TEXTS),
    "xlnet-tags": (TAGS, WORDS),
    "xlnet-spans": (SPANS, QUESTIONS),
    "xlnet-joint": (with_settings(SPANS, head="joint"), QUESTIONS),
    "modern-mean": (with_settings(SINGLE, head="prediction", pooling="mean"), TEXTS),
    "modern-pair": (with_settings(PAIR, head="prediction"), PAIRS),
    "modern-multi": (with_settings(MULTI, head="prediction"), TEXTS),
    "modern-number": (with_settings(NUMBER, head="prediction"), TEXTS),
    "modern-tags": (with_settings(TAGS, head="prediction"), WORDS),
    "modern-spans": (with_settings(SPANS, head="prediction"), QUESTIONS),
    "modern-joint": (with_settings(SPANS, head="joint"), QUESTIONS),
    "deberta-pair": (with_settings(PAIR, head="dense"), PAIRS),
    "deberta-multi": (with_settings(MULTI, head="dense"), TEXTS),
    "deberta-number": (with_settings(NUMBER, head="dense"), TEXTS),
    "deberta-tags": (TAGS, WORDS),
    "deberta-spans": (SPANS, QUESTIONS),
    "biased-single": (with_settings(SINGLE, head="prediction"), TEXTS),
}
MODELS = {
    "modern": MODERN,
    "biased": MODERN.model_copy(update={"norm_bias": True, "classifier_bias": True, "attention_bias": True}),
    "xlnet": XLNET,
    "deberta": DEBERTA,
}


def exported(model: Path, out: Path, **options: Any) -> Exported:
    return export(model, out=out, progress=Silent(), warn=pytest.fail, **options)


def change(path: Path, **values: Any) -> None:
    write_recorded(path.parent, {path.name: json.dumps(json.loads(path.read_text()) | values)})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuning and its export, `-out`, of each kind."""
    root = tmp_path_factory.mktemp("tasks")
    for name, (made, _) in KINDS.items():
        make_finetuned(root / name, model=MODELS.get(name.partition("-")[0]), own=made)
        if name.startswith("xlnet") and name != "xlnet-dense":
            change(root / name / "finetuned.json", frame="cls-last")
        exported(root / name, root / f"{name}-out")
    make_finetuned(root / "several", seeds=2, first=SINGLE, sst2=Made("classification", Labels(("no", "yes")), ("accuracy",)))
    return root


def load(folder: Path) -> discern.Model:
    return discern.load(folder, device="cpu")


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / CONFIG_NAME).read_text())
    return content


def about(value: Any) -> Any:
    """The same up to rounding: an export computes it by way of other layers."""
    if isinstance(value, dict):
        return {key: about(each) for key, each in value.items()}
    if isinstance(value, list):
        return [about(each) for each in value]
    return pytest.approx(value, abs=2e-4) if isinstance(value, float) else value


def close(ours: Any, theirs: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=atol, rtol=0)


def run_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile((folder / "README.md").read_text().split("```python\n")[1].split("```")[0], folder.name, "exec"), {})


@torch.no_grad()
def compare_with_transformers(folder: Path, inputs: Sequence[Any], said: list[dict[str, Any]]) -> None:
    """Check predictions by the class that a folder names, which must find all of its weights there and no others."""
    kind, tokenizer = getattr(transformers, config_of(folder)["architectures"][0]), AutoTokenizer.from_pretrained(folder)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    padded = {"padding": True, "truncation": True, "return_tensors": "pt"}
    if "nbest" in said[0]:
        for (question, context), each in zip(inputs, said, strict=True):
            assert (each["start"] is None) == (each["answer"] == "")
            assert each["answer"] in ("", context[each["start"] : each["end"]])
            encoded = tokenizer(question, context, return_tensors="pt")
            if encoded["input_ids"].shape[1] > tokenizer.model_max_length:
                continue  # read in windows
            found = model.eval()(**encoded)
            for answer in each["nbest"]:
                start = encoded.char_to_token(0, answer["start"], 1)
                end = encoded.char_to_token(0, answer["start"] + len(answer["text"]) - 1, 1)
                close(answer["score"], found.start_logits[0, start] + found.end_logits[0, end], 1e-4)
    elif "tags" in said[0]:
        encoded = tokenizer(inputs, is_split_into_words=True, **padded)
        values, classes = model.eval()(**encoded).logits.softmax(-1).max(-1)
        for row, each in enumerate(said):
            firsts = [encoded.word_ids(row).index(number) for number in range(len(each["words"]))]
            close(each["probabilities"], values[row, firsts])
            # Which tag begins a span is repaired here.
            theirs = [model.config.id2label[number][1:] for number in classes[row, firsts].tolist()]
            assert [tag[1:] for tag in each["tags"]] == theirs
    else:
        logits = model.eval()(**tokenizer(*(zip(*inputs, strict=True) if inputs is PAIRS else [inputs]), **padded)).logits
        if "score" in said[0]:
            close([each["score"] for each in said], logits[:, 0], 1e-4)
        else:
            theirs = logits.sigmoid() if "labels" in said[0] else logits.softmax(-1)
            close([list(each["probabilities"].values()) for each in said], theirs)
        assert logits.std(0).min() > 0.01, "outputs that hardly differ would prove nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_tuning_its_export_and_transformers_say_the_same(
    kind: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, out = KINDS[kind][1], folders / f"{kind}-out"
    tuned, whole = load(folders / kind), load(out)
    said = tuned.predict(inputs)
    assert whole.predict(inputs) == about(said)
    assert (tuned.predict([]), tuned.labels()) == ([], whole.labels())
    np.testing.assert_allclose(tuned.encode(TEXTS[:3]), whole.encode(TEXTS[:3]), atol=1e-5)
    run_card(out, monkeypatch)
    if "joint" in kind or kind == "compared":
        assert (out / HEAD_NAME).is_file()
    elif inputs is TEXTS:
        compare_with_transformers(out, TEXTS[:-1], said[:-1])
    else:
        compare_with_transformers(out, inputs, said)


@pytest.mark.parametrize("kind", ["compared", "joint", "modern-joint", "xlnet-joint"])
def test_a_head_that_transformers_lacks_is_stored_beside_the_encoder(kind: str, folders: Path, tmp_path: Path) -> None:
    exported(folders / kind, tmp_path / "out")
    done = exported(folders / kind, tmp_path / "out")
    assert not done.whole
    assert "the head is stored in `discern_head.safetensors`" in (done.folder / "README.md").read_text()
    model, info = AutoModel.from_pretrained(done.folder, output_loading_info=True)
    assert type(model).__name__ == done.loads_as
    assert not any(info.values()), info
    (done.folder / HEAD_NAME).unlink()
    with pytest.raises(CheckpointError, match=HEAD_NAME):
        load(done.folder).predict(KINDS[kind][1])


WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
XLNET_WIDTHS = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48}
BIASED = {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}


@pytest.mark.parametrize(
    ("kind", "like", "options"),
    [
        ("Electra", "", WIDTHS),
        ("Bert", "", WIDTHS),
        ("XLNet", "xlnet-", XLNET_WIDTHS),
        ("ModernBert", "modern-", WIDTHS),
        ("ModernBert", "modern-", WIDTHS | BIASED),
        ("DebertaV2", "deberta-", WIDTHS | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2}),
    ],
)
@pytest.mark.parametrize(
    ("ending", "labels", "inputs"),
    [
        ("ForSequenceClassification", ("O", "B-X", "I-X"), TEXTS[:-1]),
        ("ForSequenceClassification", ("LABEL_0",), TEXTS[:-1]),
        ("ForSequenceClassification", ("same", "other"), PAIRS),
        ("ForTokenClassification", ("O", "B-X", "I-X"), WORDS),
        ("ForQuestionAnswering", ("LABEL_0", "LABEL_1"), QUESTIONS),
    ],
)
def test_a_model_that_transformers_wrote(
    kind: str,
    like: str,
    options: dict[str, Any],
    ending: str,
    labels: Sequence[str],
    inputs: list[Any],
    folders: Path,
    tmp_path: Path,
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders / f"{like}spans-out" / name, tmp_path)
    entries = vocab_size(load_tokenizer(tmp_path))
    named = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    config = getattr(transformers, f"{kind}Config")(vocab_size=entries, pad_token_id=0, **options, **named)
    simple = "Simple" if kind == "XLNet" and "Answering" in ending else ""
    model = getattr(transformers, f"{kind}{ending}{simple}")(config)
    make_noisy(model)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    compare_with_transformers(tmp_path, inputs, loaded.predict(inputs))
    assert loaded.labels() == (() if "LABEL_0" in labels else labels)
    (tmp_path / "dev.csv").write_text("text,label\nhello,O\n")
    with pytest.raises(ConfigError, match="does not record which columns"):
        discern.evaluate(tmp_path, data=tmp_path / "dev.csv")


def test_an_export_is_evaluated_as_its_fine_tuning(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text("review,stars\nthe chef,good\nhello,bad\nguests ate,so-so\n")
    ours, theirs = (
        discern.evaluate(folders / name, data=tmp_path / "dev.csv", device="cpu") for name in ("single", "single-out")
    )
    assert theirs == about(ours)


def test_values_of_python(folders: Path) -> None:
    pandas = pytest.importorskip("pandas")
    single, pair, tags, maybe = (load(folders / name) for name in ("single", "pair", "tags", "maybe"))
    column = pandas.Series(TEXTS, index=range(len(TEXTS), 0, -1))
    assert single.predict(np.array(TEXTS)) == single.predict(column) == single.predict(TEXTS)
    assert pair.predict(pandas.DataFrame(PAIRS).to_numpy()) == pair.predict(PAIRS)
    assert tags.predict([" ".join(words) for words in WORDS]) == tags.predict(WORDS)
    named = [{"question": question, "context": context} for question, context in QUESTIONS]
    assert maybe.predict(named) == maybe.predict(QUESTIONS)
    wrong: list[tuple[discern.Model, Any, str]] = [
        (single, "a text", "a single text"),
        (single, [("a", "b")], "expected a text"),
        (single, ["a", 3], "item 1 is 3"),
        (pair, ["a"], "a pair of texts"),
        (tags, [3], "a list of its words"),
        (maybe, ["who?"], "question, context"),
    ]
    for model, values, says in wrong:
        with pytest.raises(ConfigError, match=says):
            model.predict(values)


def test_folders_without_a_task(small_model: Path, tmp_path: Path) -> None:
    for folder in (small_model, exported(small_model, tmp_path / "out").folder):
        with pytest.raises(DataError, match=r"(without a|no) task head") as caught:
            load(folder).predict(TEXTS)
        assert "discern finetune" in str(caught.value.hint)


def test_tasks_and_seeds_are_chosen(folders: Path, tmp_path: Path) -> None:
    model = load(folders / "several")
    said = [model.predict(TEXTS, task="first", seed=seed) for seed in (0, 1, None)]
    assert said[0] != said[1] == said[2]
    for task, seed in (("first", 0), ("sst2", 1)):
        done = exported(folders / "several", tmp_path / "out", task=task, seed=None if seed else 0)
        assert (done.task, done.seed) == (task, seed)
        assert load(done.folder).predict(TEXTS) == about(model.predict(TEXTS, task=task, seed=seed))
    with pytest.raises(ConfigError, match="several tasks"):
        model.predict(TEXTS)
    with pytest.raises(ConfigError, match="a single set of weights"):
        load(done.folder).predict(TEXTS, seed=0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "--task first"),
        ({"task": "frist"}, "did you mean 'first'"),
        ({"task": "first", "seed": 7}, "no seed 7"),
        ({"task": "first", "network": "generator"}, "--network"),
    ]
    for options, says in wrong:
        with pytest.raises(ConfigError) as caught:
            exported(folders / "several", tmp_path / "other", **options)
        assert says in f"{caught.value} {caught.value.hint}"


def test_what_an_export_tells(folders: Path, tmp_path: Path) -> None:
    done = exported(folders / "several", tmp_path / "my-model", task="first", seed=0)
    assert {path.name for path in done.folder.iterdir()} == {*FILES, CHECKSUMS_NAME} - {SETTINGS_NAME}
    assert done.num_bytes == sum(path.stat().st_size for path in done.folder.iterdir())
    config = config_of(done.folder)
    assert config["id2label"] == {"0": "bad", "1": "good", "2": "so-so"}
    assert config["problem_type"] == "single_label_classification"
    assert json.loads((done.folder / "tokenizer_config.json").read_text())["model_max_length"] == 32
    card = (done.folder / "README.md").read_text()
    for line in (
        "# my-model",
        "\nlanguage: de\n",
        "| Labels | `bad`, `good`, `so-so` |",
        "| Loads as | `ElectraForSequenceClassification` |",
        "| Maximum row length | 32 tokens",
        "| `accuracy` | 0.5000 |",
        "measured on dev (321 examples) over 2 seeds (0, 1).",
        "The weights are those of seed 0, which has 0.5000.",
        "fine-tuned on 1,234 examples for 60 steps, which are 26.6 passes over them. The weights are those of step 40.",
        "pre-trained on is in German. Its license is CC0, as stated",
        "| `optimizer.learning_rate` | 0.0003 |",
    ):
        assert line in card, line
    for hidden in ("/home/", str(folders), "epochs"):
        assert hidden not in card
    named = make_finetuned(tmp_path / "answers", squad1=replace(SPANS, layout=None))
    card = (exported(named, tmp_path / "named").folder / "README.md").read_text()
    assert "those of squad1, published at rajpurkar.github.io/SQuAD-explorer under the license CC BY-SA 4.0." in card
    assert "\nlicense: other\nlicense_name: cc0-1.0-and-cc-by-sa-4.0\n" in card
    assert config_of(folders / "modern-mean-out")["classifier_pooling"] == "mean"
    labels = config_of(folders / "tags-out")["id2label"]
    assert list(labels.values()) == ["B-X", "I-X", "I-X", "O", "B-X"], "BIO of BIOES"


def test_a_pipeline_finds_the_spans(folders: Path) -> None:
    """It takes a span that follows another without B for a part of it; what the two cover is the same."""
    tagger: Any = transformers.pipeline("token-classification", model=str(folders / "tags-out"), aggregation_strategy="first")
    for words, said in zip(WORDS, load(folders / "tags-out").predict(WORDS), strict=True):
        text = " ".join(words)
        theirs = {word for each in tagger(text) for word in text[each["start"] : each["end"]].split()}
        assert theirs == {word for start, stop, _ in said["spans"] for word in words[start:stop]}
        assert {each["entity_group"] for each in tagger(text)} <= {"X"}


@pytest.mark.parametrize(("initialization", "dense"), [("released", 0.02), ("local", 128**-0.5)])
def test_a_head_of_modernbert_starts_as_theirs(initialization: str, dense: float) -> None:
    """Normals cut at two deviations, which leaves 0.88 of the nominal one; that of the dense layer is smaller by the depth."""
    wide = {"hidden_size": 128, "embedding_size": 128, "num_layers": 4, "classifier_bias": True, "attention_bias": True}
    config = sizes(encoder="modernbert", initialization=initialization, **wide)
    task = Classification("own", ClassificationConfig(head="prediction"), ("accuracy",), SINGLE.labels)
    objective = supervised(build_encoder(build_embeddings(9, 128, config), config), {"own": task})
    head: Any = objective.heads["own"]
    make_noisy(head)
    torch.nn.init.ones_(head.inner.norm.weight)
    objective.initialize(3)
    for layer, scale, rel in ((head.inner.dense, dense / 8**0.5, 0.05), (head.output, 128**-0.5, 0.15)):
        assert float(layer.weight.detach().std()) == pytest.approx(0.88 * scale, rel=rel)
        assert not layer.bias.any()


@pytest.mark.parametrize("kind", ["tags", "modern-tags", "xlnet-tags"])
def test_an_export_in_bfloat16(kind: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (exported(folders / kind, tmp_path / name / "model", precision="bfloat16").folder for name in ("one", "two"))
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()
    assert {tensor.dtype for tensor in load_file(one / WEIGHTS_NAME).values()} == {torch.bfloat16}
    ours, back = (open_model(folder, warn=pytest.fail).encoder.encoder for folder in (folders / kind, one))
    for name, value in ours.named_parameters():
        assert torch.equal(back.get_parameter(name), value.bfloat16().float()), name
    run_card(one, monkeypatch)


def test_scores_that_bfloat16_would_shift_are_refused(folders: Path, tmp_path: Path) -> None:
    exported(folders / "number", tmp_path / "out", precision="bfloat16")
    years = replace(NUMBER, labels=replace(NUMBER.labels, scale=1.5, shift=2005.3))
    make_finetuned(tmp_path / "years", own=years)
    with pytest.raises(ConfigError, match=r"lie around 2005\.3 and vary by 1\.5"):
        exported(tmp_path / "years", tmp_path / "out", precision="bfloat16")
    said = load(tmp_path / "years").predict(TEXTS)
    assert load(exported(tmp_path / "years", tmp_path / "out").folder).predict(TEXTS) == about(said)


@pytest.mark.parametrize(
    ("model", "made", "says"),
    [
        (None, with_settings(SINGLE, head="prediction"), "task.head=linear"),
        (None, with_settings(SINGLE, head="summary"), "task.head=linear"),
        (None, with_settings(SINGLE, pooling="mean"), "task.pooling=cls"),
        (None, with_settings(TAGS, head="prediction"), "task.head=linear"),
        (None, with_settings(SPANS, head="prediction"), "task.head=span"),
        (None, replace(SINGLE, labels=Labels(tuple("abcdefghijklmnopq"))), "hidden_size is 34 or more"),
        (sizes(normalization="pre"), SPANS, "model.normalization"),
        (XLNET, with_settings(SINGLE, head="prediction"), "task.head=linear"),
        (XLNET, with_settings(SINGLE, pooling="mean"), "task.pooling=cls"),
        (MODERN, SINGLE, "task.head=prediction"),
        (MODERN, TAGS, "task.head=prediction"),
        (MODERN, SPANS, "task.head=prediction"),
    ],
)
def test_a_head_that_the_class_cannot_represent_is_refused(
    model: ModelConfig | None, made: Made, says: str, tmp_path: Path
) -> None:
    make_finetuned(tmp_path / "tuned", model=model, own=made)
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path / "tuned", tmp_path / "out")
    assert says in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"discern.provenance": 7}, "'discern.provenance'"),
        ({"discern.record.frame": "middle"}, "is damaged"),
        ({"discern.record.tasks": None}, "is damaged"),
        ({"discern.record.tasks": {}}, "is damaged"),
        ({"discern.record.tasks.own.labels": 3}, "is damaged"),
        ({"discern.record.tasks.own.config.sequence_length": -1}, "is damaged"),
        ({"discern": {}, "id2label": {"x": "y"}}, "is damaged"),
        ({"discern": {}, "id2label": None, "num_labels": 10**9}, "output"),
    ],
)
def test_a_damaged_record_is_named(changes: dict[str, Any], says: str, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "single-out", tmp_path / "out")
    config = config_of(tmp_path / "out")
    for keys, value in changes.items():
        *parents, last = keys.split(".")
        place = config
        for key in parents:
            place = place[key]
        place[last] = value
    (tmp_path / "out" / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "out").predict(TEXTS)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("kind", ["single", "modern-tags", "xlnet-spans", "joint"])
def test_a_weight_of_the_head_that_is_missing_is_named(kind: str, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / f"{kind}-out", tmp_path / "out")
    path = tmp_path / "out" / (HEAD_NAME if kind == "joint" else WEIGHTS_NAME)
    tensors = load_file(path)
    last = next(
        name for name in reversed(tensors) if name.endswith(".bias") and not name.startswith(("electra", "model", "transformer"))
    )
    del tensors[last]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"no '.*bias' of the head"):
        load(tmp_path / "out").predict(KINDS[kind][1])
