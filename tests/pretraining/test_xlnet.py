"""An XLNet run: exported, loaded by transformers, fine-tuned, and what is fine-tuned used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from discern.doctor.checks import examine
from discern.errors import ConfigError
from discern.inference.prediction import predict
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.pretraining.estimate import estimate
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import plan, pretrain
from discern.progress import Silent
from discern.report.run_page import report
from discern.training.config import load_pretrain_config
from tests.pretraining.commands import Notes
from tests.pretraining.test_evaluate import prepared
from tests.small.run import make_run
from tests.small.task import ROWS, Finetuning, finetune, prepare_finetuning, small_request
from tests.small.tokenizers import HARD, KINDS, reading_special

AS_ELECTRA = ("finetune.frame=cls-first", "task.head=linear")
XLNET = ("objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xlnet") / "run"
    make_run(folder, overrides=XLNET, tokenizer="unigram")
    return folder


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    return export(run, out=tmp_path / "out", progress=Silent(), warn=pytest.fail).folder


def request(model: Path, folder: Path, *overrides: str) -> Finetuning:
    small = small_request(model, folder)
    return replace(small, overrides=(*small.overrides, *overrides))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_export_whole_with_the_same_ids(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, XLNetLMHeadModel

    network = make_run(tmp_path / "run", overrides=XLNET, tokenizer=kind).networks()["encoder"]
    done = export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
    assert (done.networks, done.loads_as) == (("encoder",), "XLNetLMHeadModel")
    model, info = XLNetLMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    source = reading_special(Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json")))
    for text in HARD:
        encoded = (theirs(text)["input_ids"], source.encode(text, add_special_tokens=False).ids)
        plain, expected = ([number for number in ids if number not in theirs.all_special_ids] for ids in encoded)
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


def test_an_export_is_the_same_encoder_and_is_exported_again(run: Path, exported: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (open_model(folder, warn=pytest.fail).encoder for folder in (run, exported))
    assert ours.max_length == theirs.max_length == 32
    assert ours.source_fingerprint == theirs.source_fingerprint
    export(exported, out=tmp_path / "same", progress=Silent(), warn=pytest.fail)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "discern.toml"):
        assert (tmp_path / "same" / name).read_bytes() == (exported / name).read_bytes()
    half = export(tmp_path / "same", out=tmp_path / "half", precision="bfloat16", progress=Silent(), warn=pytest.fail)
    assert (half.loads_as, half.networks) == ("XLNetLMHeadModel", ("encoder",))
    assert json.loads((half.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(half.folder)("the model")["token_type_ids"][-1] == 2, "[CLS] stays at the end"
    assert open_model(half.folder, warn=pytest.fail).max_length == 32


@pytest.mark.parametrize("settings", [(), AS_ELECTRA], ids=["usual", "as ELECTRA's"])
@torch.no_grad()
def test_a_fine_tuned_export_gives_our_probabilities(settings: tuple[str, ...], exported: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    (tmp_path / "task").mkdir()
    with torch.enable_grad():
        results = finetune(request(exported, tmp_path / "task", *settings), Silent())
    record = json.loads((tmp_path / "task" / "out" / "finetuned.json").read_text())
    assert (results["median"], record["frame"]) == (1.0, "cls-first" if settings else "cls-last")
    done = export(tmp_path / "task" / "out", out=tmp_path / "hf", progress=Silent(), warn=pytest.fail)
    assert done.loads_as == "XLNetForSequenceClassification"
    # Readers take off spaces at the ends, which a Unigram model would see.
    texts = [text.strip() for text in [*HARD, "returns none of the files " * 20] if "[" not in text]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"review": text}) + "\n" for text in texts))
    records: list[dict[str, Any]] = []
    predict(tmp_path / "task" / "out", tmp_path / "texts.jsonl", records.extend, Silent())
    ours = torch.tensor([list(record["probabilities"].values()) for record in records])
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


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("task.sequence_length=200", r"sequence_length is 200, but the model has 128 positions"),
        ("finetune.frame=cls-last", "cls-last"),
    ],
)
def test_what_only_xlnet_can_is_refused_of_electra(small_model: Path, tmp_path: Path, setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare_finetuning(request(small_model, tmp_path, setting), Silent())


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
    prepared_plan = prepare_finetuning(request(folder, tmp_path), Silent())
    first = prepared_plan.data["own"].train.features.input_ids[0].tolist()
    assert (first[0], first[-1]) == (3, 4)
    text = ROWS[0][0]
    assert first[1:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_run_is_planned_trained_measured_examined_and_reported(run: Path, tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", run / "tokenizer.json")
    two_part = ("data.packing=two-part", "data.sequence_length=32", "objective.memory_length=24", "train.max_steps=4")
    overrides = (*XLNET, *two_part, "train.evaluate_every_steps=2", "objective.next_sentence_weight=1")
    options: dict[str, Any] = {"data": data, "out": tmp_path / "run", "preset": "tiny", "overrides": overrides}
    planned = estimate(plan(**options, warn=pytest.fail)).values
    assert planned["flops"] > planned["parameters"] * 6
    sizes = load_pretrain_config(None, "tiny", overrides).config
    slots = sizes.train.sequences_per_step * 24 * sizes.model.num_layers * sizes.model.hidden_size
    assert planned["slot_memory_bytes"] == 4 * slots < planned["memory_bytes"]
    last = pretrain(**options, progress=Silent())
    assert last is not None
    assert last["flops"] == planned["flops"]
    health = examine(tmp_path / "run", 16, "cpu", Silent(), pytest.fail)
    assert health["text"] == "held out"
    figures = evaluate(tmp_path / "run", progress=Silent(), warn=pytest.fail)
    assert figures["permutation_lm_loss"] == pytest.approx(last["heldout_permutation_lm_loss"], rel=1e-5)
    shares = figures["by_position"]
    assert [row["group"] for row in shares] == ["first quarter", "second quarter", "third quarter", "last quarter"]
    predicted = sum(row["predicted_tokens"] for row in shares)
    mean = sum(row["prediction_loss"] * row["predicted_tokens"] for row in shares) / predicted
    assert mean == pytest.approx(figures["permutation_lm_loss"], rel=1e-5)
    page = report(tmp_path / "run", None).read_text()
    assert "permutation language modeling" in page
    assert "Next-sentence accuracy" in page
