"""An export for others to serve: sentence-transformers, onnxruntime, eight bits; the same numbers everywhere, or an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

import discern
from discern.data.tokenizer import load_tokenizer
from discern.errors import ConfigError, DiscernError, NumericsError
from discern.finetuning.evaluate import evaluate_finetuned, labeled_examples
from discern.model_files import onnx
from discern.model_files.export import Exported, check_target, export
from discern.model_files.huggingface import HuggingFaceFolder
from discern.model_files.serving import Serving, StoredPooling, read_pooling, write_sentence_transformers
from discern.models.config import ModelConfig, build_config
from discern.progress import Silent
from discern.tasks.answer_heads import SpanHead
from discern.tasks.base import Labels
from tests.small.finetuned import MODERN, MULTI, NUMBER, PAIR, SINGLE, SPANS, TAGS, XLNET, Made, columns, make_finetuned
from tests.small.run import make_run
from tests.small.tokenizers import HARD
from tests.support import run_python

TEXTS = ["a quiet street.", "the old town has a bridge of stone.", "", "x"]
WIDE = build_config(encoder="bert", num_layers=2, hidden_size=32, embedding_size=32, num_heads=2, feedforward_size=48)
AS_BERT: dict[str, Any] = {"form": "bert"}
PAIRS = replace(PAIR, settings={"pooling": "pair"})
JOINT = replace(SPANS, settings={"head": "joint"})
BILINEAR = ("objective.discriminator_head=bilinear",)
MODERN_RUN = ("model.encoder=modernbert", "model.local_window=8")
XLNET_RUN = ("objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32")


def exported(source: Path, out: Path, network: str | None = None, **forms: Any) -> Exported:
    return export(source, out=out, network=network, serving=Serving(**forms), progress=Silent(), warn=pytest.fail)


def ask(folder: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A padded batch of pairs, and what onnxruntime makes of it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = dict(tokenizer(TEXTS, TEXTS[::-1], padding=True, return_tensors="pt", **options))
    found = onnx.session(folder / "model.onnx")({name: each.numpy() for name, each in inputs.items()})
    return inputs, {name: torch.from_numpy(each) for name, each in found.items()}


def same(found: Tensor, expected: Tensor, real: Tensor) -> None:
    counted = real.bool() if found.shape[:2] == real.shape else ...
    assert expected[counted].std() > 1e-3
    torch.testing.assert_close(found[counted], expected[counted], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    make_run(folder)
    return folder


@pytest.fixture(scope="module")
def served(run: Path) -> Path:
    return exported(run, run.parent / "out", onnx=True).folder


@pytest.fixture
def traced(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports take the graph that is there, as tracing takes seconds."""
    monkeypatch.setattr(onnx, "write_onnx", lambda graph, path: shutil.copy(served / "model.onnx", path))


def test_the_same_run_gives_the_same_graph_without_names_of_code(run: Path, served: Path, tmp_path: Path) -> None:
    content = (exported(run, tmp_path / "out", onnx=True).folder / "model.onnx").read_bytes()
    assert content == (served / "model.onnx").read_bytes()
    assert b"discern" not in content


# Starts Python where torch cannot be imported, and runs the code of the model card.
_WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "discern"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
try:
    import torch
except ModuleNotFoundError:
    pass
"""


@torch.no_grad()
def test_the_code_in_the_card_runs_without_torch(served: Path) -> None:
    card = (served / "README.md").read_text()
    code = _WITHOUT_TORCH + card.split("## ONNX")[1].split("```python\n")[1].split("```")[0]
    code += "print(session.run(['logits'], feed)[0].tolist())\nassert not {'torch', 'discern'} & sys.modules.keys()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=served)
    assert done.returncode == 0, done.stderr
    inputs = AutoTokenizer.from_pretrained(served)(
        ["The chef ate the meal.", "A quiet street."], padding=True, return_tensors="pt"
    )
    model: Any = transformers.ElectraForPreTraining.from_pretrained(served)
    same(torch.tensor(json.loads(done.stdout.splitlines()[1])), model.eval()(**inputs).logits, inputs["attention_mask"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (BILINEAR, "discriminator"),
        (("objective.name=electric",), "discriminator"),
        (("objective.name=all-tokens-mlm",), None),
        ((*MODERN_RUN, *BILINEAR, "model.embedding_size=32"), "discriminator"),
        (MODERN_RUN, "generator"),
        ((*MODERN_RUN, "objective.name=electric"), "discriminator"),
    ],
)
@torch.no_grad()
def test_a_network_gives_its_logits_and_states(overrides: tuple[str, ...], name: str | None, tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=overrides)
    done = exported(tmp_path / "run", tmp_path / "out", name, onnx=True)
    network, (inputs, found) = objective.networks()[done.networks[0]], ask(done.folder)
    real = inputs["attention_mask"]
    given = inputs["input_ids"], real.bool(), inputs.get("token_type_ids")
    same(found["last_hidden_state"], network.encoder(*given), real)
    same(found["logits"], network.token_logits(*given), real)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "encoder", "forms"),
    [
        (SINGLE, None, {}),
        (MULTI, None, {}),
        (NUMBER, None, {}),
        (SPANS, None, {}),
        (TAGS, WIDE, AS_BERT),
        (PAIRS, None, {}),
        (replace(SINGLE, settings={"head": "prediction", "pooling": "mean"}), MODERN, {}),
        (replace(TAGS, settings={"head": "prediction"}), MODERN, {}),
        (PAIRS, MODERN, {}),
    ],
)
@torch.no_grad()
def test_a_fine_tuned_model_gives_what_transformers_does(
    made: Made, encoder: ModelConfig | None, forms: dict[str, Any], tmp_path: Path
) -> None:
    done = exported(make_finetuned(tmp_path / "model", model=encoder, own=made), tmp_path / "out", onnx=True, **forms)
    inputs, found = ask(done.folder, return_token_type_ids=None if done.whole else True)
    if done.whole:
        expected = getattr(transformers, done.loads_as).from_pretrained(done.folder).eval()(**inputs)
    else:
        rows = discern.load(tmp_path / "model").predict(list(zip(TEXTS, TEXTS[::-1], strict=True)))
        expected = {"logits": torch.tensor([list(row["probabilities"].values()) for row in rows])}
        found["logits"] = found["logits"].softmax(-1)
    for name, each in found.items():
        same(each, expected[name], inputs["attention_mask"])
    assert done.parity is not None
    assert done.parity["agreement"] == pytest.approx(1)
    assert done.parity["largest_difference"] < 1e-5


@pytest.mark.usefixtures("traced")
def test_eight_bits_are_compared_on_texts(run: Path, served: Path, tmp_path: Path) -> None:
    texts = [text for text in HARD if text.strip() and "\n" not in text]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    done = exported(run, tmp_path / "out", onnx=True, int8=True, texts=tmp_path / "texts.txt")
    (inputs, found), (_, expected) = ask(done.folder), ask(served)
    agree = ((found["logits"] > 0) == (expected["logits"] > 0))[inputs["attention_mask"].bool()]
    assert agree.float().mean() >= 0.9
    assert done.parity is not None
    sizes = done.parity["file_bytes"]
    assert sizes == {"float32": (served / "model.onnx").stat().st_size, "int8": (done.folder / "model.onnx").stat().st_size}
    assert sizes["int8"] < 0.5 * sizes["float32"]
    assert len(list(done.folder.glob("*onnx*"))) == 1
    report = done.parity["compared_on"], done.parity["rows"], done.parity["loss"]
    assert report == ("texts.txt", len(texts), 1 - done.parity["agreement"])
    card = (done.folder / "README.md").read_text()
    for words in ("in int8", f"on {len(texts)} rows of texts.txt; no score on a task"):
        assert words in card, words
    (tmp_path / "texts.txt").write_text("\u200b\n\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has text"):
        exported(run, tmp_path / "out", onnx=True, int8=True, texts=tmp_path / "texts.txt")


def test_an_answer_agrees_if_its_start_and_its_end_do() -> None:
    settings: Any = {"head": SpanHead.__new__(SpanHead), "corrupts": None, "decision": "largest"}
    graph: Any = SimpleNamespace(decisive=("start", "end"), per_token=("start", "end"), **settings)
    rows = [(np.arange(4), np.array([0, 0, 1, 1]))] * 4
    kept, moved = np.array([0.0, 9.0, 1.0, 2.0]), np.array([0.0, 9.0, 2.0, 1.0])  # the question's own tokens do not count
    model = [{"start": kept, "end": kept}] * 4
    copy = [
        {"start": kept, "end": kept},
        {"start": moved, "end": kept},
        {"start": kept, "end": moved},
        {"start": kept, "end": kept},
    ]
    assert onnx.compare(graph, rows, model, copy)["agreement"] == 0.5


def opposite(source: Path, out: Path, **_: Any) -> None:
    """A copy that says the opposite of every token."""
    from onnx import helper, load, save

    model = load(source)
    (last,) = (node for node in model.graph.node if "logits" in node.output)
    last.output[list(last.output).index("logits")] = "right_logits"
    model.graph.node.append(helper.make_node("Neg", ["right_logits"], ["logits"]))
    save(model, out)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("step", "said"), [("quantize", "loses 1.0"), ("write_onnx", "differ")])
def test_a_copy_that_decides_otherwise_is_not_published(
    step: str, said: str, run: Path, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, step, lambda source, out, **_: opposite(served / "model.onnx", out))
    before = (exported(run, tmp_path / "out").folder / "README.md").read_bytes()
    with pytest.raises(NumericsError, match=said):
        exported(run, tmp_path / "out", onnx=True, int8=True, max_loss=0.001)
    assert (tmp_path / "out" / "README.md").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_eight_bits_are_scored_on_labeled_examples(tmp_path: Path) -> None:
    model, data = make_finetuned(tmp_path / "model", own=PAIRS), tmp_path / "dev.csv"
    texts = [text for text in HARD if text.strip() and not set(text) & set('",\n\r')]
    rows = [f"{first},{second},{'yes' if number % 3 else 'no'}" for number, (first, second) in enumerate(pairwise(texts))]
    data.write_text("\n".join(["a,b,same", *rows]))
    done = exported(model, tmp_path / "out", onnx=True, int8=True, texts=data, labeled=labeled_examples)
    expected = evaluate_finetuned(model, data, progress=Silent(), baselines=False)["metrics"]["accuracy"]
    assert done.parity is not None
    scores = done.parity["scores"]
    assert scores["torch"] == pytest.approx(expected)
    report = done.parity["metric"], done.parity["compared_on"], done.parity["loss"]
    assert report == ("accuracy", "dev.csv", max(0, scores["torch"] - scores["onnx"]))
    card = (done.folder / "README.md").read_text()
    assert f"| `accuracy` of the file | {scores['onnx']:.4f} |\n| `accuracy` of the model | {expected:.4f} |" in card


@pytest.mark.usefixtures("traced")
def test_the_command_compares_eight_bits(run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = "--onnx", "--int8", "--compare-on", tmp_path / "texts.txt", "--json", "--max-loss", 1
    done = run_python("-m", "discern", "export", run, *options, "--out", tmp_path / "out")
    assert json.loads(done.stdout)["onnx"]["compared_on"] == "texts.txt"


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        ({"int8": True}, "add --onnx"),
        ({"max_loss": 0.1}, "add --onnx --int8"),
        ({"texts": Path("x.txt")}, "add --onnx --int8"),
        ({"pooling": "cls"}, "add --sentence-transformers"),
    ],
)
def test_options_that_contradict_each_other_are_refused(forms: dict[str, Any], said: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        exported(run, tmp_path / "out", **forms)
    assert said in f"{caught.value} {caught.value.hint}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("encoder", "made", "forms", "said"),
    [
        (XLNET, TAGS, {"onnx": True}, "relative to the positions"),
        (None, JOINT, {"onnx": True}, "depends on its start"),
        (WIDE, JOINT, AS_BERT, "no class"),
        (WIDE, SINGLE, AS_BERT, "GELU"),
    ],
)
def test_a_model_without_such_a_form_is_refused(
    encoder: ModelConfig | None, made: Made, forms: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = make_finetuned(tmp_path / "model", model=encoder, own=made)
    with pytest.raises(ConfigError, match=said):
        exported(model, tmp_path / "out", **forms)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ConfigError, match="needs onnxscript") as caught:
        exported(run, tmp_path / "out", onnx=True)
    assert "discern-nlp[onnx]" in str(caught.value.hint)


@pytest.mark.parametrize("overrides", [(), MODERN_RUN, XLNET_RUN])
@pytest.mark.parametrize("forms", [{}, {"normalize": True}, {"pooling": "cls"}, {"pooling": "mean-all", "max_length": 30}])
def test_sentence_transformers_gives_the_vectors_of_encode(
    overrides: tuple[str, ...], forms: dict[str, Any], tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    make_run(tmp_path / "run", overrides=overrides)
    folder = exported(tmp_path / "run", tmp_path / "out", sentence_transformers=True, **forms).folder
    settings = {"pooling": forms.get("pooling", "mean"), "normalize": "normalize" in forms}
    expected = discern.load(tmp_path / "run").encode(TEXTS, **settings)
    assert np.abs(expected[0]).mean() > 0.05
    theirs, ours = SentenceTransformer(str(folder), device="cpu", local_files_only=True), discern.load(folder)
    assert theirs.max_seq_length == ours.max_length == forms.get("max_length", 32)
    np.testing.assert_allclose(theirs.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(ours.encode(TEXTS), expected, atol=1e-5)
    assert "SentenceTransformer" in (folder / "README.md").read_text()
    check_target(folder)  # an export with these files may be replaced


def test_a_model_of_vectors_as_bert(tmp_path: Path) -> None:
    own = Made("pairs", Labels(kind="vectors", pairs=True), ("recall_at_1",), columns("pairs", text="a", pair="b"))
    exported(make_finetuned(tmp_path / "model", model=WIDE, own=own), tmp_path / "out", **AS_BERT)
    ours, theirs = (discern.load(tmp_path / name).encode(TEXTS) for name in ("model", "out"))
    np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "mean-all", "cls"])
def test_onnxruntime_gives_the_vectors_of_encode(pooling: str, run: Path, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", onnx=True, sentence_transformers=True, normalize=True, pooling=pooling)
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")(TEXTS, padding=True, return_tensors="np")
    found = onnx.session(tmp_path / "out" / "model.onnx")(dict(inputs))
    assert list(found) == ["last_hidden_state", "sentence_embedding"]
    np.testing.assert_allclose(found["sentence_embedding"], discern.load(tmp_path / "out").encode(TEXTS), atol=1e-5)


def test_the_list_of_words_reaches_the_largest_id(run: Path, tmp_path: Path) -> None:
    """A vocabulary with a line that occurs twice has fewer entries than ids."""
    opened = HuggingFaceFolder(exported(run, tmp_path / "out").folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "a", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    opened.tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    write_sentence_transformers(opened)
    listed = json.loads((opened.folder / "1_WordWeights" / "config.json").read_text())["vocab"]
    assert (len(listed), listed[8]) == (9, "c")


LAST, MEAN = {"pooling_mode_lasttoken": True}, {"pooling_mode": "mean"}


@pytest.mark.parametrize(
    ("module", "pooling", "length", "frame", "read"),
    [
        ("Normalize", MEAN, 64, "cls-first", StoredPooling("mean-all", True, 64)),
        ("Transformer", LAST, 64, "cls-last", StoredPooling("cls", False, 64)),
        ("Transformer", LAST, 64, "cls-first", "lasttoken"),
        ("Transformer", MEAN | LAST | {"pooling_mode_max_tokens": True}, 64, "cls-last", "max_tokens"),
        ("Dense", MEAN, 64, "cls-first", "Dense"),
        ("Normalize", [], 64, "cls-first", "damaged"),
        *(("Normalize", MEAN, length, "cls-first", "max_seq_length") for length in (2, True, "64")),
    ],
)
def test_the_pooling_of_somebody_elses_model(
    module: str, pooling: Any, length: object, frame: str, read: StoredPooling | str, tmp_path: Path
) -> None:
    assert read_pooling(tmp_path, frame) is None
    (tmp_path / "1_Pooling").mkdir()
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in ("Pooling", module)]
    files = {"modules": modules, "1_Pooling/config": pooling, "sentence_bert_config": {"max_seq_length": length}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    if isinstance(read, StoredPooling):
        assert read_pooling(tmp_path, frame) == read
    else:
        with pytest.raises(DiscernError, match=read):
            read_pooling(tmp_path, frame)
