"""An export for others to serve: as BERT, as ONNX, in eight bits; the same numbers everywhere, and clear refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import discern
from discern.cli.main import main
from discern.convert import serving
from discern.convert.export import export
from discern.convert.export_finetuned import export_task
from discern.convert.onnx import Session, check_onnx, run_graph
from discern.convert.onnx_graph import graph_of
from discern.convert.serving import Labeled, Serving
from discern.errors import ConfigError, NumericsError
from discern.finetuning.evaluate import evaluate_finetuned, labeled_examples
from discern.models.config import build_config
from discern.progress import Silent
from discern.tasks.base import Labels
from discern.tasks.readers.text_groups import GroupColumns
from tests.interop.small_tokenizers import HARD
from tests.small.finetuned import MODERN, MULTI, NUMBER, PAIR, SINGLE, SPANS, TAGS, Made, make_finetuned
from tests.small.run import make_run

ONNX = Serving(onnx=True)
SAME_WIDTH = "model.embedding_size=32"
SAME_WIDTHS = build_config(encoder="bert", num_layers=2, hidden_size=32, embedding_size=32, num_heads=2, feedforward_size=48)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    make_run(folder, overrides=[SAME_WIDTH])
    return folder


@pytest.fixture(scope="module")
def discriminator(run: Path) -> Path:
    """An export with ONNX."""
    exported(run, run.parent / "discriminator", ONNX)
    return run.parent / "discriminator"


@pytest.fixture
def traced(discriminator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of the same network take the graph that is there, as tracing takes seconds."""
    monkeypatch.setattr(serving, "write_onnx", lambda graph, path: shutil.copy(discriminator / "model.onnx", path))


def exported(source: Path, out: Path, forms: Serving, **options: Any) -> Any:
    return export(source, out=out, serving=forms, progress=Silent(), warn=pytest.fail, **options)


def verb(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run `discern export`; gives its exit code."""
    monkeypatch.setattr(sys, "argv", ["discern", "export", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def batches(folder: Path) -> Iterator[dict[str, np.ndarray]]:
    """Batches of several sizes and lengths, with padding and segments."""
    served, random = graph_of(folder), np.random.default_rng(0)
    for rows, length in ((1, 1), (1, 9), (3, 32), (5, 17)):
        mask = (np.arange(length) < random.integers(1, length + 1, (rows, 1))).astype(np.int64)
        mask[0] = 1
        segments = np.broadcast_to((np.arange(length) > length // 2).astype(np.int64), mask.shape) * mask
        ids = random.integers(5, served.tokenizer.get_vocab_size(), mask.shape)
        feed = {"input_ids": np.where(mask, ids, served.special.pad), "attention_mask": mask, "token_type_ids": segments}
        yield {name: feed[name] for name in served.graph.inputs}


def check_parity(folder: Path) -> None:
    """The ONNX file gives what the model in the folder gives."""
    served, session = graph_of(folder), Session(folder / "model.onnx")
    for feed in batches(folder):
        ours, theirs, real = run_graph(served.graph, feed), session(feed), feed["attention_mask"].astype(bool)
        assert ours.keys() == theirs.keys() == set(served.graph.outputs)
        for name in ours:
            counted = real if name in served.graph.per_token else slice(None)
            assert ours[name].shape == theirs[name].shape
            assert ours[name][counted].std() > 1e-3 or ours[name][counted].size == 1
            np.testing.assert_allclose(theirs[name][counted], ours[name][counted], atol=1e-5, rtol=1e-5)


def test_onnx_gives_the_logits_of_transformers(discriminator: Path) -> None:
    from transformers import AutoModel, ElectraForPreTraining

    model = ElectraForPreTraining.from_pretrained(discriminator).eval()
    body = AutoModel.from_pretrained(discriminator).eval()
    session = Session(discriminator / "model.onnx")
    for feed in batches(discriminator):
        real, given = feed["attention_mask"].astype(bool), {name: torch.from_numpy(each) for name, each in feed.items()}
        with torch.no_grad():
            logits, states = model(**given).logits.numpy(), body(**given).last_hidden_state.numpy()
        found = session(feed)
        np.testing.assert_allclose(found["logits"][real], logits[real], atol=1e-5)
        np.testing.assert_allclose(found["last_hidden_state"][real], states[real], atol=1e-5)
    content = (discriminator / "model.onnx").read_bytes()
    assert b"discern" not in content, "the exporter's notes about the source code"
    card = (discriminator / "README.md").read_text()
    assert "`model.onnx` is the model for onnxruntime, in float32" in card
    assert "milliseconds" not in card


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


def test_it_is_served_without_torch(discriminator: Path) -> None:
    from transformers import AutoTokenizer, ElectraForPreTraining

    code = (discriminator / "README.md").read_text().split("## ONNX")[1].split("```python\n")[1].split("```")[0]
    code += "print(session.run(['logits'], feed)[0].tolist())\nassert not {'torch', 'discern'} & sys.modules.keys()\n"
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH + code], capture_output=True, text=True, cwd=discriminator)
    assert done.returncode == 0, done.stderr
    shapes, logits = map(json.loads, done.stdout.replace("(", "[").replace(")", "]").splitlines())
    texts = ["The chef ate the meal.", "A quiet street."]
    inputs = AutoTokenizer.from_pretrained(discriminator)(texts, padding=True, return_tensors="pt")
    assert shapes[0] == list(inputs["input_ids"].shape)
    with torch.no_grad():
        expected = ElectraForPreTraining.from_pretrained(discriminator).eval()(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(torch.tensor(logits)[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("traced")
def test_eight_bits_are_compared_in_the_card(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(text for text in HARD if "\n" not in text and text.strip()))
    out = tmp_path / "out"
    assert verb(monkeypatch, run, "--out", out, "--onnx", "--int8", "--compare-on", tmp_path / "texts.txt") == 0
    card = (out / "README.md").read_text()
    for words in ("in int8", "Largest difference of a logit", "texts.txt", "Time of 32 rows", "Score on a task | not measured"):
        assert words in card, words
    served, session = graph_of(out), Session(out / "model.onnx")
    same = []
    for feed in batches(out):
        real = feed["attention_mask"].astype(bool)
        same.append(((run_graph(served.graph, feed)["logits"] > 0) == (session(feed)["logits"] > 0))[real])
    assert np.concatenate(same).mean() >= 0.9
    assert sorted(path.name for path in out.iterdir() if "onnx" in path.name) == ["model.onnx"]
    assert (out / "model.onnx").stat().st_size < 0.5 * (run.parent / "discriminator" / "model.onnx").stat().st_size


@pytest.mark.usefixtures("traced")
def test_too_great_a_loss_publishes_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(run, tmp_path / "out", Serving())
    before = (tmp_path / "out" / "README.md").read_bytes()
    monkeypatch.setattr(serving, "quantize", _opposite)
    assert verb(monkeypatch, run, "--out", tmp_path / "out", "--onnx", "--int8", "--max-loss", "0.001") == 1
    assert (tmp_path / "out" / "README.md").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(NumericsError, match=r"eight bits lose 1\.0+ of the agreement with float32 on English") as caught:
        exported(run, tmp_path / "other", Serving(onnx=True, int8=True, max_loss=0.001))
    assert "--compare-on FILE" in (caught.value.hint or "")
    assert not (tmp_path / "other").exists()


def _opposite(source: Path, out: Path, *, per_channel: bool) -> None:
    """A copy that says the opposite of every token."""
    import onnx

    model = onnx.load(source)
    (last,) = (node for node in model.graph.node if "logits" in node.output)
    last.output[list(last.output).index("logits")] = "right_logits"
    model.graph.node.append(onnx.helper.make_node("Neg", ["right_logits"], ["logits"]))
    onnx.save(model, out)


def test_a_head_that_compares_pairs_and_its_score(tmp_path: Path) -> None:
    model = make_finetuned(tmp_path / "model", own=replace(PAIR, settings={"pooling": "pair"}))
    texts = [text for text in HARD if text.strip() and not set(text) & set('",\n\r')]
    rows = "".join(f'"{a}","{b}",{label}\n' for a, b, label in zip(texts, texts[1:], ["no", "yes"] * len(texts), strict=False))
    (tmp_path / "dev.csv").write_text(f"a,b,same\n{rows}")
    found = labeled_examples(model, tmp_path / "dev.csv", progress=Silent())
    assert found is not None
    forms = Serving(onnx=True, int8=True, labeled=Labeled(*found))
    done = export_task(model, out=tmp_path / "out", serving=forms, progress=Silent())
    expected = evaluate_finetuned(model, tmp_path / "dev.csv", progress=Silent(), baselines=False)["metrics"]["accuracy"]
    assert done.parity is not None
    assert done.parity.scores["torch"] == pytest.approx(expected)
    assert done.parity.metric == "accuracy"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| `accuracy` | {done.parity.scores['onnx']:.4f}; of the model, {expected:.4f} |" in card
    assert "dev.csv" in card
    assert set(done.parity.milliseconds) == {"torch", "onnx", "int8"}
    assert labeled_examples(model, None, progress=Silent()) is None, "the file of the training is gone"


def test_vectors_of_texts_without_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["model.encoder=modernbert"])
    exported(tmp_path / "run", tmp_path / "out", Serving(onnx=True, sentence_transformers=True, pooling="mean"))
    served = graph_of(tmp_path / "out", pooling="mean")
    texts = ["a quiet street.", "the old town has a bridge of stone."]
    tokenizer = served.tokenizer
    tokenizer.enable_padding(pad_id=served.special.pad)
    found = tokenizer.encode_batch(texts)
    feed = {
        "input_ids": np.array([each.ids for each in found]),
        "attention_mask": np.array([each.attention_mask for each in found]),
    }
    vectors = Session(tmp_path / "out" / "model.onnx")(feed)["sentence_embedding"]
    np.testing.assert_allclose(vectors, discern.load(tmp_path / "run").encode(texts), atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "SentenceTransformer" in card
    assert "`last_hidden_state`, `sentence_embedding`" in card


_HEADS: dict[str, tuple[Made, Any]] = {
    "single": (SINGLE, None),
    "multi": (MULTI, None),
    "number": (NUMBER, None),
    "tags": (TAGS, None),
    "modern single": (replace(SINGLE, settings={"head": "prediction", "pooling": "mean"}), MODERN),
    "modern pair": (replace(PAIR, settings={"pooling": "pair"}), MODERN),
    "modern tags": (replace(TAGS, settings={"head": "prediction"}), MODERN),
}


def test_the_command_names_each_way_to_load_a_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_finetuned(tmp_path / "model", own=SINGLE)
    assert verb(monkeypatch, model, "--out", tmp_path / "out", "--sentence-transformers") == 0
    said = capsys.readouterr().out
    assert said.count("SentenceTransformer(") == 1
    assert ").predict(texts)" in said


@pytest.mark.slow
def test_answers(tmp_path: Path) -> None:
    """Start and end, as in transformers."""
    from transformers import ElectraForQuestionAnswering

    model = make_finetuned(tmp_path / "model", own=SPANS)
    export_task(model, out=tmp_path / "out", serving=ONNX, progress=Silent())
    theirs = ElectraForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    session = Session(tmp_path / "out" / "model.onnx")
    for feed in batches(tmp_path / "out"):
        with torch.no_grad():
            expected = theirs(**{name: torch.from_numpy(each) for name, each in feed.items()})
        found, real = session(feed), feed["attention_mask"].astype(bool)
        for name in ("start_logits", "end_logits"):
            np.testing.assert_allclose(found[name][real], expected[name].numpy()[real], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _HEADS)
def test_every_head(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, encoder = _HEADS[kind]
    model = make_finetuned(tmp_path / "model", model=encoder, own=made)
    export_task(model, out=tmp_path / "out", serving=ONNX, progress=Silent())
    check_parity(tmp_path / "out")
    monkeypatch.setattr(serving, "write_onnx", lambda graph, path: shutil.copy(tmp_path / "out" / "model.onnx", path))
    done = export_task(model, out=tmp_path / "int8", serving=Serving(onnx=True, int8=True), progress=Silent())
    assert done.parity is not None
    assert done.parity.difference.agreement > 0.7, "noisy weights of a tiny network"
    assert "in int8" in (tmp_path / "int8" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["bert", "modernbert"])
@pytest.mark.parametrize("name", ["discriminator", "generator"])
@pytest.mark.parametrize("setting", ["objective.discriminator_head=bilinear", "objective.name=electric"])
def test_every_network(encoder: str, name: str, setting: str, tmp_path: Path) -> None:
    if setting == "objective.name=electric" and name == "generator":
        pytest.skip("two towers have no class in transformers")
    make_run(tmp_path / "run", overrides=[f"model.encoder={encoder}", setting])
    exported(tmp_path / "run", tmp_path / "out", ONNX, network=name)
    check_parity(tmp_path / "out")


def test_a_model_of_vectors_as_bert(tmp_path: Path) -> None:
    own = Made("pairs", Labels(kind="vectors", pairs=True), ("recall_at_1",), GroupColumns("a", "b"))
    export_task(
        make_finetuned(tmp_path / "vectors", model=SAME_WIDTHS, own=own),
        out=tmp_path / "bert",
        serving=Serving(form="bert"),
        progress=Silent(),
    )
    found, expected = (discern.load(tmp_path / name).encode(["a quiet street."], "mean-all") for name in ("bert", "vectors"))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    joint = replace(SPANS, settings={**(SPANS.settings or {}), "head": "joint"})
    made = make_finetuned(tmp_path / "joint", model=SAME_WIDTHS, own=joint)
    with pytest.raises(ConfigError, match="BERT has no class with this task's head"):
        export_task(made, out=tmp_path / "no", serving=Serving(form="bert"), progress=Silent())
    assert not (tmp_path / "no").exists()


def test_an_electra_as_bert(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, BertModel

    electra = exported(run, tmp_path / "electra", Serving(form="electra"))
    assert electra.architecture == "ElectraForPreTraining"
    done = exported(run, tmp_path / "bert", Serving(form="bert"))
    assert done.architecture == "BertModel"
    theirs, info = AutoModel.from_pretrained(tmp_path / "bert", add_pooling_layer=False, output_loading_info=True)
    assert isinstance(theirs, BertModel)
    assert not any(info.values()), info
    ours = AutoModel.from_pretrained(tmp_path / "electra").eval()
    for feed in batches(tmp_path / "electra"):
        given, real = (
            {name: torch.from_numpy(each) for name, each in feed.items()},
            torch.from_numpy(feed["attention_mask"]).bool(),
        )
        with torch.no_grad():
            expected, found = ours(**given).last_hidden_state, theirs.eval()(**given).last_hidden_state
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
    texts = ["a quiet street."]
    np.testing.assert_allclose(discern.load(tmp_path / "bert").encode(texts), discern.load(run).encode(texts), atol=1e-5)
    card = (tmp_path / "bert" / "README.md").read_text()
    assert "as a BERT, without a pooler" in card
    assert "discern detect" not in card
    assert not (tmp_path / "bert" / "discern.toml").exists()
    exported(run, tmp_path / "bert", Serving(form="bert"))  # an earlier export, which is replaced


def test_a_masked_language_model_as_bert(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, ElectraForMaskedLM

    make_run(tmp_path / "run", overrides=["objective.name=mlm", SAME_WIDTH])
    exported(tmp_path / "run", tmp_path / "electra", Serving())
    assert exported(tmp_path / "run", tmp_path / "bert", Serving(form="bert")).architecture == "BertForMaskedLM"
    theirs, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert not any(info.values()), info
    feed = {name: torch.from_numpy(each) for name, each in next(iter(batches(tmp_path / "electra"))).items()}
    with torch.no_grad():
        expected = ElectraForMaskedLM.from_pretrained(tmp_path / "electra").eval()(**feed).logits
        torch.testing.assert_close(theirs.eval()(**feed).logits, expected, atol=1e-5, rtol=1e-5)
    assert discern.load(tmp_path / "bert").fill("the [MASK] sat.")


def test_fine_tuned_models_as_bert(tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification, BertForTokenClassification

    narrow = make_finetuned(tmp_path / "narrow", own=TAGS)
    with pytest.raises(ConfigError, match=r"embeddings are \d+ wide and its hidden states \d+.*LayerNorm"):
        export_task(narrow, out=tmp_path / "out", serving=Serving(form="bert"), progress=Silent())
    tagger = make_finetuned(tmp_path / "tagger", model=SAME_WIDTHS, own=TAGS)
    export_task(tagger, out=tmp_path / "bert", serving=Serving(form="bert"), progress=Silent())
    theirs, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert isinstance(theirs, BertForTokenClassification)
    assert not any(info.values()), info
    served = graph_of(tmp_path / "bert")
    for feed in batches(tmp_path / "bert"):
        real = feed["attention_mask"].astype(bool)
        with torch.no_grad():
            expected = theirs.eval()(**{name: torch.from_numpy(each) for name, each in feed.items()}).logits.numpy()
        np.testing.assert_allclose(run_graph(served.graph, feed)["logits"][real], expected[real], atol=1e-5)
    words = [["the", "old", "town"]]
    ours, again = (discern.load(tmp_path / name).predict(words)[0] for name in ("tagger", "bert"))
    assert ours["words"] == again["words"]
    np.testing.assert_allclose(ours["probabilities"], again["probabilities"], atol=1e-5)
    classifier = make_finetuned(tmp_path / "classifier", model=SAME_WIDTHS, own=SINGLE)
    with pytest.raises(ConfigError, match="a tanh where that of ELECTRA has a GELU"):
        export_task(classifier, out=tmp_path / "out", serving=Serving(form="bert"), progress=Silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (["--int8"], "--onnx is not given", "add --onnx"),
        (["--max-loss", "0.1"], "--int8 is not given", "--onnx --int8"),
        (["--onnx", "--int8", "--max-loss", "7"], "expected a fraction from 0 to 1", "--max-loss 0.01"),
        (["--pooling", "cls"], "text embeddings", "--sentence-transformers"),
        (["--compare-on", "x.txt"], "--int8 is not given", "--onnx --int8"),
        (["--as", "modernbert"], "type 'electra'", "--as electra"),
        (["--as", "xlnet"], "electra", ""),
        (["--as", "bert", "--all-networks"], "--as one for other software", "leave out one"),
    ],
)
def test_what_contradicts_itself_is_refused_before_any_work(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
    hint: str,
) -> None:
    assert verb(monkeypatch, run, "--out", tmp_path / "out", *options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert hint in said
    assert not (tmp_path / "out").exists()


def test_networks_without_a_graph_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "xlnet", overrides=["objective.name=permutation-lm", "model.encoder=xlnet", SAME_WIDTH])
    with pytest.raises(ConfigError, match="an XLNet cannot be exported to ONNX") as caught:
        exported(tmp_path / "xlnet", tmp_path / "out", ONNX)
    assert "leave out --onnx" in (caught.value.hint or "")
    joint = make_finetuned(tmp_path / "joint", own=replace(SPANS, settings={"head": "joint"}))
    with pytest.raises(ConfigError, match="JointHead cannot be exported to ONNX: the end of an answer depends") as caught:
        export_task(joint, out=tmp_path / "out", serving=ONNX, progress=Silent())
    assert "task.head=span" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_onnx()
    monkeypatch.setattr("discern.convert.onnx.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ConfigError, match="ONNX needs onnxscript") as caught:
        Serving(onnx=True).check()
    assert "discern-nlp[onnx]" in (caught.value.hint or "")
