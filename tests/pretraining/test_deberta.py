"""DeBERTaV3 as Microsoft released it: both networks read from one folder, continued, exported; and one trained from scratch."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import CheckpointError, DataError
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.model_files.huggingface import HuggingFaceFolder
from discern.model_files.import_ import import_model
from discern.model_files.run import load_run
from discern.models.base import named_parameters
from discern.pretraining.adapt import adapt
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.progress import Silent
from tests.parity.small_networks import make_noisy
from tests.pretraining.commands import Notes

transformers, sentencepiece = pytest.importorskip("transformers"), pytest.importorskip("sentencepiece")
WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
ROWS = 300  # more than the tokenizer has entries, as in the released files
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_relative_positions": -1,
    "layer_norm_eps": 1e-7,
}
DELTA = "deberta.embeddings.word_embeddings._weight"
WORD_TABLE = "deberta.embeddings.word_embeddings.weight"
QUICK = ("optimizer.learning_rate=1e-3", "data.sequence_length=32", "train.sequences_per_step=8", "train.log_every_steps=5")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of microsoft/deberta-v3-*: a discriminator with its head, the generator with absolute positions for its mask
    decoder beside it, a model of SentencePiece."""
    folder = tmp_path_factory.mktemp("deberta") / "hub"
    folder.mkdir()
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(5, 12))) + "." for _ in range(500)]
    (folder.parent / "text.txt").write_text("\n".join(f"{line}{chr(10) * (n % 9 == 8)}" for n, line in enumerate(lines)))
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    pieces = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=folder / "spm", vocab_size=60, hard_vocab_limit=False, **ids, **pieces
    )
    (folder / "spm.vocab").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))

    body = transformers.DebertaV2Model(transformers.DebertaV2Config(num_hidden_layers=2, **SIZES))
    generator = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(num_hidden_layers=1, legacy=False, **SIZES))
    for seed, model in enumerate((body, generator)):
        make_noisy(model, seed)
    (folder / "config.json").write_text(json.dumps({"model_type": "deberta-v2", "num_hidden_layers": 2, **SIZES}))
    (folder / "generator_config.json").write_text(json.dumps({"model_type": "deberta-v2", "num_hidden_layers": 1, **SIZES}))
    random_head = {"dense.weight": (32, 32), "dense.bias": (32,), "LayerNorm.bias": (32,), "LayerNorm.weight": (32,)}
    random_head |= {"classifier.weight": (1, 32), "classifier.bias": (1,)}
    discriminator = {f"deberta.{name}": tensor for name, tensor in body.state_dict().items()}
    discriminator |= {f"mask_predictions.{name}": torch.randn(shape) / 6 for name, shape in random_head.items()}
    # A released discriminator also has the generator's head, which is not its own.
    discriminator["lm_predictions.lm_head.bias"] = torch.zeros(ROWS)
    torch.save(discriminator, folder / "pytorch_model.bin")
    positions = {"deberta.embeddings.position_embeddings.weight": torch.randn(64, 32) / 6}
    torch.save(generator.state_dict() | positions, folder / "pytorch_model.generator.bin")
    return folder


@pytest.fixture(scope="module")
def data(hub: Path) -> Path:
    build = PrepareOptions(heldout=0.1, workers=1)
    prepare(
        [str(hub.parent / "text.txt")],
        out=hub.parent / "data",
        tokenizer=TokenizerChoice(path=hub),
        options=build,
        progress=Silent(),
    )
    return hub.parent / "data"


def parameters(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {name: named_parameters(network) for name, network in open_model(folder, warn=pytest.fail).networks_to_train.items()}


def assert_equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    assert one.keys() == other.keys() == {"discriminator", "generator"}
    for name, values in one.items():
        assert values.keys() == other[name].keys()
        for key, value in values.items():
            torch.testing.assert_close(other[name][key], value, msg=lambda said, key=key: f"{key}: {said}")


def copied(hub: Path, out: Path, *removed: str) -> Path:
    shutil.copytree(hub, out)
    for name in removed:
        (out / name).unlink()
    return out


def test_both_networks_go_in_and_out(hub: Path, data: Path, tmp_path: Path) -> None:
    stored = parameters(hub)
    assert "encoder.position.weight" in stored["generator"]
    assert "encoder.position.weight" not in stored["discriminator"]
    done = import_model([hub], out=tmp_path / "imported", progress=Silent(), warn=pytest.fail)
    assert done.measurable
    assert done.model.left_out == ["lm_predictions.lm_head"]
    assert_equal(parameters(tmp_path / "imported"), stored)
    settings = (tmp_path / "imported" / "discern.toml").read_text()
    assert 'tying = "gradient-disentangled"' in settings
    assert "mask_decoder = true" in settings
    assert evaluate(tmp_path / "imported", data=data, progress=Silent(), warn=pytest.fail)["generator_loss"] > 0
    ids = torch.tensor([[1, *range(5, 25), 2]])
    tokenizer = load_tokenizer(hub)
    for name in stored:
        export(tmp_path / "imported", out=tmp_path / name, network=name, progress=Silent(), warn=pytest.fail)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs("the old cat sat.").input_ids == tokenizer.encode("the old cat sat.").ids
    network = HuggingFaceFolder(hub).networks()["discriminator"]
    found = transformers.AutoModel.from_pretrained(tmp_path / "discriminator").eval()(ids).last_hidden_state
    torch.testing.assert_close(found, network.encoder(ids), atol=1e-5, rtol=1e-5)
    assert "the enhanced mask decoder" in (tmp_path / "generator" / "README.md").read_text()
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "generator")


def test_words_stored_as_the_difference_from_the_generators(hub: Path, tmp_path: Path) -> None:
    folder = copied(hub, tmp_path / "delta")
    state, words = torch.load(folder / "pytorch_model.bin"), torch.load(folder / "pytorch_model.generator.bin")[WORD_TABLE]
    state[DELTA] = state.pop(WORD_TABLE) - words
    torch.save(state, folder / "pytorch_model.bin")
    assert_equal(parameters(folder), parameters(hub))
    # A file with both has the sum under the usual name.
    torch.save({**state, WORD_TABLE: state[DELTA] + words}, folder / "pytorch_model.bin")
    assert_equal(parameters(folder), parameters(hub))
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "pytorch_model.generator.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.generator\.safetensors"):
        parameters(folder)


def test_both_networks_are_continued(hub: Path, data: Path, tmp_path: Path) -> None:
    notes = Notes()
    settings = (*QUICK, "train.max_steps=30")
    results = adapt(hub, data=data, out=tmp_path / "run", overrides=settings, progress=notes)
    assert results is not None
    assert results["fresh"] == []
    before, after = results["before"]["data"], results["after"]["data"]
    assert after["generator_loss"] < before["generator_loss"] - 0.5
    assert after["discriminator_loss"] < before["discriminator_loss"]
    assert load_run(tmp_path / "run", warn=pytest.fail).config.model.mask_decoder  # type: ignore[attr-defined]


def test_a_generator_is_made_from_the_first_layers(hub: Path, data: Path, tmp_path: Path) -> None:
    folder, notes = copied(hub, tmp_path / "alone", "pytorch_model.generator.bin", "generator_config.json"), Notes()
    still = ("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "train.max_steps=2", *QUICK[1:])
    results = adapt(folder, data=data, out=tmp_path / "run", overrides=still, progress=notes)
    assert results is not None
    told = "the head of the generator, which starts as the first layers of the model"
    assert results["fresh"] == [told]
    assert any(told in line for line in notes.lines)
    given, run = open_model(folder, warn=pytest.fail), load_run(tmp_path / "run", warn=pytest.fail)
    theirs = named_parameters(given.networks_to_train["discriminator"])
    rows = load_tokenizer(folder).get_vocab_size()
    for name, network in run.objective.networks().items():
        for key, value in named_parameters(network).items():
            if key.startswith("encoder."):
                torch.testing.assert_close(value, theirs[key][:rows] if "word" in key else theirs[key], msg=f"{name}: {key}")


def test_without_its_tokenizer(hub: Path, tmp_path: Path) -> None:
    folder = copied(hub, tmp_path / "bare", "spm.model")
    with pytest.raises(DataError, match=r"tokenizer folder .* has neither"):
        import_model([folder], out=tmp_path / "out", progress=Silent(), warn=pytest.fail)


def test_the_tokenizer_keeps_its_fingerprint(hub: Path, data: Path) -> None:
    """Numbers of a model of SentencePiece are read back from tokenizer.json with the same bits."""
    assert fingerprint(load_tokenizer(hub)) == fingerprint(load_tokenizer(data / "tokenizer.json"))


def test_one_trained_from_scratch(data: Path, tmp_path: Path) -> None:
    settings = ["model.encoder=deberta", "model.embedding_size=32", "model.position_buckets=16", "model.mask_decoder=true"]
    settings += ["objective.tying=gradient-disentangled", "objective.generator_size=1", "objective.generator_depth=0.5"]
    settings += ["data.packing=packed", "train.max_steps=40", "optimizer.learning_rate=3e-3"]
    run = tmp_path / "run"
    pretrain(data=data, out=run, preset="tiny", overrides=settings, progress=Silent())
    before = evaluate(run, data=data, progress=Silent(), warn=pytest.fail)
    assert before["generator_loss"] < 3.5
    export(run, out=tmp_path / "all", all_networks=True, progress=Silent(), warn=pytest.fail)
    after = evaluate(tmp_path / "all", data=data, progress=Silent(), warn=pytest.fail)
    for key in ("discriminator_auc", "generator_loss", "discriminator_loss"):
        assert after[key] == pytest.approx(before[key], abs=1e-5)
