"""An XLNet run: exported, loaded by transformers, fine-tuned, and what is fine-tuned used."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from discern.artifacts.finetuned import FinetunedFolder
from discern.artifacts.opening import open_model
from discern.convert.export import export
from discern.convert.export_finetuned import export_task
from discern.doctor.checks import examine
from discern.errors import ConfigError
from discern.inference.predict import predict
from discern.pretraining.estimate import estimate
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.progress import Silent
from discern.report.run_page import report
from discern.training.pretrain_config import load_pretrain_config
from tests.interop.small_tokenizers import HARD, KINDS, reading_special
from tests.pretraining.test_evaluate import prepared
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune, prepare_finetuning

XLNET = ("objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32")
ROWS = [("the model reads the file", "good"), ("a tensor of shape", "bad"), ("returns none", "so-so")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xlnet") / "run"
    make_run(folder, overrides=XLNET, tokenizer="unigram")
    return folder


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    return export(run, out=tmp_path / "out", progress=Silent(), warn=pytest.fail).folder


class Notes(Silent):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def request(model: Path, folder: Path, *overrides: str, rows: list[tuple[str, ...]] = ROWS) -> Finetuning:
    for name, count in (("train", 20), ("dev", 4)):
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("review", "stars"), *rows * count])
    files = (
        f"files.train='{folder / 'train.csv'}'",
        f"files.dev='{folder / 'dev.csv'}'",
        "files.text=review",
        "files.label=stars",
    )
    fast = ("train.max_steps=60", "optimizer.learning_rate=3e-3", "finetune.dropout=0", "train.sequences_per_step=12")
    return Finetuning(str(model), folder / "tuned", overrides=(*files, *fast, *overrides))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_export_whole_with_the_same_ids(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, XLNetLMHeadModel

    network = make_run(tmp_path / "run", overrides=XLNET, tokenizer=kind).networks()["encoder"]
    done = export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
    assert (done.networks, done.architecture) == (("encoder",), "XLNetLMHeadModel")
    model, info = XLNetLMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    source = reading_special(Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json")))
    for text in HARD:
        plain = [number for number in theirs(text)["input_ids"] if number not in theirs.all_special_ids]
        expected = [
            number for number in source.encode(text, add_special_tokens=False).ids if number not in theirs.all_special_ids
        ]
        assert plain == expected, text
    both = theirs([HARD[0], HARD[13]], [HARD[2], HARD[13]], padding=True, return_tensors="pt")
    cls, sep, pad = (theirs.convert_tokens_to_ids(f"[{name}]") for name in ("CLS", "SEP", "PAD"))
    assert both["input_ids"][:, -2:].tolist() == [[sep, cls], [sep, cls]], "[CLS] comes last"
    assert both["input_ids"][1, 0] == pad, "padding stands on the left"
    assert both["token_type_ids"][:, -1].tolist() == [2, 2]
    with torch.no_grad():
        ours = network.head(network.encoder(both["input_ids"], both["attention_mask"].bool(), both["token_type_ids"]))
        logits = model.eval()(**both).logits
    real = both["attention_mask"].bool()
    torch.testing.assert_close(logits[real], ours[real], atol=1e-5, rtol=1e-5)


def test_the_card_runs(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    card = (exported / "README.md").read_text()
    for line in ("permutation language modeling (XLNet)", "relative; trained on rows of 32", "- xlnet\n", "| Layers | 2 |"):
        assert line in card, line
    monkeypatch.chdir(exported)
    exec(card.split("```python\n")[1].split("```")[0], {})
    assert len(capsys.readouterr().out.strip().splitlines()) == 1


def test_a_masked_language_model_on_the_same_encoder_is_exported_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm", *XLNET[1:]])
    done = export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
    assert done.architecture == "XLNetLMHeadModel"
    assert "model(**inputs).logits[where]" in (tmp_path / "out" / "README.md").read_text()


def test_an_export_is_exported_again(exported: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, XLNetLMHeadModel

    export(exported, out=tmp_path / "same", progress=Silent(), warn=pytest.fail)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "discern.toml"):
        assert (tmp_path / "same" / name).read_bytes() == (exported / name).read_bytes()
    half = export(tmp_path / "same", out=tmp_path / "half", precision="bfloat16", progress=Silent(), warn=pytest.fail)
    assert (half.architecture, half.networks) == ("XLNetLMHeadModel", ("encoder",))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    _, info = XLNetLMHeadModel.from_pretrained(tmp_path / "half", output_loading_info=True)
    assert not info["missing_keys"]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "half")("the model")
    assert tokens["token_type_ids"][-1] == 2, "[CLS] stays at the end"
    assert open_model(tmp_path / "half", warn=pytest.fail).max_length == open_model(exported, warn=pytest.fail).max_length


def test_a_run_and_its_export_are_the_same_encoder(run: Path, exported: Path) -> None:
    ours, theirs = (open_model(folder, warn=pytest.fail).encoder for folder in (run, exported))
    assert ours.max_length == theirs.max_length == 32
    assert ours.source_fingerprint == theirs.source_fingerprint
    loaded = open_model(exported, warn=pytest.fail)
    assert list(loaded.networks()) == ["encoder"]


@pytest.mark.parametrize("kind", ["run", "export"])
def test_fine_tuning_learns_and_is_used(kind: str, run: Path, exported: Path, tmp_path: Path) -> None:
    results: dict[str, Any] = finetune(request(run if kind == "run" else exported, tmp_path), Silent())
    assert results["median"] == 1.0
    loaded = FinetunedFolder(tmp_path / "tuned").task_model()
    record = json.loads((tmp_path / "tuned" / "finetuned.json").read_text())
    assert record["frame"] == "cls-last"
    assert type(loaded.objective.encoder).__name__ == "XLNetEncoder"


def test_settings_are_those_that_xlnet_was_made_for_and_can_be_changed(run: Path, tmp_path: Path) -> None:
    plan = prepare_finetuning(request(run, tmp_path), Silent())
    assert plan.config.finetune.frame == "cls-last"
    assert plan.config.task_config("own").model_dump()["head"] == "summary"
    plan = prepare_finetuning(request(run, tmp_path, "finetune.frame=cls-first", "task.head=linear"), Silent())
    assert plan.config.finetune.frame == "cls-first"
    assert plan.config.task_config("own").model_dump()["head"] == "linear"


def test_what_electra_cannot_hold_of_a_fine_tuning_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "electra")
    finetune(request(tmp_path / "electra", tmp_path, "train.max_steps=1", "task.head=summary"), Silent())
    with pytest.raises(ConfigError, match="summary"):
        export_task(tmp_path / "tuned", out=tmp_path / "hf", progress=Silent())


@pytest.mark.parametrize("settings", [(), ("finetune.frame=cls-first", "task.head=linear")], ids=["usual", "as ELECTRA's"])
@torch.no_grad()
def test_a_fine_tuned_export_gives_our_probabilities(settings: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with torch.enable_grad():
        finetune(request(run, tmp_path, "train.max_steps=20", *settings), Silent())
    done = export_task(tmp_path / "tuned", out=tmp_path / "hf", progress=Silent())
    assert done.architecture == "XLNetForSequenceClassification"
    # Readers take off spaces at the ends, which a Unigram model would see.
    texts = [text.strip() for text in [*HARD, "returns none of the files " * 20] if "[" not in text]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"review": text}) + "\n" for text in texts))
    said: list[dict[str, Any]] = []
    predict(tmp_path / "tuned", tmp_path / "texts.jsonl", said.extend, Silent())
    ours = torch.tensor([list(record["probabilities"].values()) for record in said])
    assert ours.std(0).min() > 1e-3, "predictions that hardly differ would prove nothing"
    model, info = AutoModelForSequenceClassification.from_pretrained(done.folder, output_loading_info=True)
    assert not any(info.values()), info
    inputs = AutoTokenizer.from_pretrained(done.folder)(texts, truncation=True, padding=True, return_tensors="pt")
    torch.testing.assert_close(model.eval()(**inputs).logits.softmax(-1), ours, atol=1e-5, rtol=0)
    card = (done.folder / "README.md").read_text()
    assert "- xlnet\n" in card
    assert "Electra" not in card
    exec(card.split("```python\n")[1].split("```")[0].replace('"."', repr(str(done.folder))), {})


def test_rows_may_be_longer_than_any_in_pre_training(run: Path, tmp_path: Path) -> None:
    notes = Notes()
    longer = prepare_finetuning(request(run, tmp_path, "task.sequence_length=200"), notes)
    assert longer.config.task_config("own").sequence_length == 200 > longer.loaded.encoder.config.max_positions
    assert any("from 32 on were not trained in pre-training" in line for line in notes.lines)
    make_run(tmp_path / "electra")
    with pytest.raises(ConfigError, match=r"sequence_length is 200, but the model has 128 positions"):
        prepare_finetuning(request(tmp_path / "electra", tmp_path, "task.sequence_length=200"), Silent())


def test_a_frame_that_the_encoder_has_no_tables_for_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "electra")
    with pytest.raises(ConfigError, match="cls-last"):
        prepare_finetuning(request(tmp_path / "electra", tmp_path, "finetune.frame=cls-last"), Silent())


def test_a_folder_with_xlnets_own_names_of_special_tokens(tmp_path: Path) -> None:
    """As published: <cls>, <sep>, <pad> at id 5."""
    from transformers import XLNetConfig, XLNetLMHeadModel, XLNetTokenizer

    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    letters = sorted({letter for text, _ in ROWS for letter in text if letter != " "})
    pieces = [(token, 0.0) for token in special] + [("▁", -2.0)] + [(letter, -3.0) for letter in letters]
    tokenizer = XLNetTokenizer(vocab=pieces)
    folder = tmp_path / "hub"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = XLNetConfig(vocab_size=len(pieces), d_model=32, n_layer=2, n_head=2, d_inner=64, initializer_range=0.2)
    XLNetLMHeadModel(sizes).save_pretrained(folder)
    loaded = open_model(folder, warn=pytest.fail).encoder
    assert (loaded.max_length, loaded.vocabulary_size) == (512, len(pieces))
    plan = prepare_finetuning(request(folder, tmp_path), Silent())
    first = plan.data["own"].train.features.input_ids[0].tolist()
    assert (first[0], first[-1]) == (3, 4)
    text = ROWS[0][0]
    assert first[1:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("heldout", [True, False])
def test_a_run_is_planned_trained_measured_examined_and_reported(heldout: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "source", overrides=XLNET, tokenizer="unigram")
    data = prepared(tmp_path / "data", tmp_path / "source" / "tokenizer.json", heldout=0.5 if heldout else 0.0)
    two_part = ("data.packing=two-part", "data.sequence_length=32", "objective.memory_length=24", "train.max_steps=4")
    overrides = (*XLNET, *two_part, "train.evaluate_every_steps=2", "objective.next_sentence_weight=1")
    options: dict[str, Any] = {"data": data, "out": tmp_path / "run", "preset": "tiny", "overrides": overrides}
    planned = estimate(plan(**options, warn=pytest.fail)).values
    assert planned["flops"] > planned["parameters"] * 6
    sizes = load_pretrain_config(None, "tiny", overrides).config
    slots = sizes.train.sequences_per_step * 24 * sizes.model.num_layers * sizes.model.hidden_size
    assert planned["slot_memory_bytes"] == 4 * slots < planned["memory_bytes"]
    assert len([warning for warning in planned["warnings"] if "segment B follows segment A" in warning]) == 1
    last = pretrain(**options, progress=Silent())
    assert last is not None
    assert last["flops"] == planned["flops"]
    found = examine(tmp_path / "run", 16, "cpu", Silent(), pytest.fail)
    assert found.facts["text"] == ("held out" if heldout else "trained on")
    knobs = {finding.name: finding.knob for finding in found.findings}
    assert knobs["permutation_lm_loss_share"] == ""
    assert knobs["next_sentence_loss_share"] == "objective.next_sentence_weight"
    if heldout:
        figures = evaluate(tmp_path / "run", progress=Silent(), warn=pytest.fail)
        assert figures["permutation_lm_loss"] == pytest.approx(last["heldout_permutation_lm_loss"], rel=1e-5)
        shares = figures["by_position"]
        assert [row["group"] for row in shares] == ["first quarter", "second quarter", "third quarter", "last quarter"]
        predicted = sum(row["predicted_tokens"] for row in shares)
        mean = sum(row["prediction_loss"] * row["predicted_tokens"] for row in shares) / predicted
        assert mean == pytest.approx(figures["permutation_lm_loss"], rel=1e-5)
    page = report(tmp_path / "run", None).read_text()
    assert "permutation language modeling (XLNet)" in page
    assert ("Next-sentence accuracy" in page) == heldout
