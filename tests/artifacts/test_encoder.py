"""The encoder that one fine-tunes, from whatever folder, and the same with nothing learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from discern.artifacts.encoder import (
    LoadedEncoder,
    encoder_of_preset,
    fingerprint_weights,
    first_layers,
    fresh_encoder,
    loaded_encoder,
)
from discern.artifacts.opening import open_model
from discern.convert.export import export
from discern.data.tokenizer import vocab_size
from discern.errors import CheckpointError, ConfigError, DataError
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.embeddings import Embeddings
from discern.progress import Silent
from tests.interop.small_tokenizers import small_tokenizer
from tests.parity.small_networks import make_noisy
from tests.small.run import make_run

IDS = torch.tensor([[2, 7, 8, 9, 3], [2, 11, 4, 13, 3]])
TOKENIZER = small_tokenizer("wordpiece, lower-cased")


def load(folder: Path) -> LoadedEncoder:
    return open_model(folder, warn=pytest.fail).encoder


def exported(run: Path, out: Path, *, network: str | None = None, precision: str = "float32") -> Path:
    return export(run, out=out, network=network, precision=precision, progress=Silent(), warn=pytest.fail).folder


def bert(folder: Path, rows: int = 199) -> Path:
    """Somebody else's BERT with its tokenizer."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(
            vocab_size=rows,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=40,
            initializer_range=0.05,
        )
    )
    model.save_pretrained(folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("tying", ["embeddings", "none", "gradient-disentangled"])
@torch.no_grad()
def test_a_run_and_its_export_give_the_same_encoder(tying: str, tmp_path: Path) -> None:
    overrides = [f"objective.tying={tying}", "data.sequence_length=24", "model.initialization=local"]
    objective = make_run(tmp_path / "run", overrides=overrides, step=22_000)
    run, other = load(tmp_path / "run"), load(exported(tmp_path / "run", tmp_path / "out"))
    assert run.description == f"run {tmp_path / 'run'} at step 22,000"
    assert other.description == f"export {tmp_path / 'out'} of step 22,000"
    assert run.source_fingerprint == other.source_fingerprint
    expected = objective.networks()["discriminator"].encoder(IDS)
    for loaded in (run, other):
        assert isinstance(loaded.encoder.embeddings, Embeddings)
        assert loaded.max_length == 24
        assert loaded.vocabulary_size == vocab_size(TOKENIZER)
        assert not any(part.training for part in loaded.encoder.modules())
        assert all(value.requires_grad and value.dtype == torch.float32 for value in loaded.encoder.parameters())
        torch.testing.assert_close(loaded.encoder(IDS), expected, atol=1e-5, rtol=1e-5)
    # How weights begin stands in the settings of an export, not in its config.json.
    assert fresh_encoder(run, 1).source_fingerprint == fresh_encoder(other, 1).source_fingerprint


def test_pre_norm_encoders_and_other_objectives_can_be_fine_tuned(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", overrides=["model.normalization=pre", "objective.name=mlm"])
    loaded = load(tmp_path / "run")
    with torch.no_grad():
        torch.testing.assert_close(loaded.encoder(IDS), made.networks()["encoder"].encoder(IDS))


def test_the_network_at_the_root_of_an_export_is_taken(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    loaded = load(exported(tmp_path / "run", tmp_path / "out", network="generator", precision="float16"))
    assert loaded.encoder.config.hidden_size == made.networks()["generator"].encoder.config.hidden_size
    assert {value.dtype for value in loaded.encoder.parameters()} == {torch.float32}


def test_a_bert_of_somebody_else(tmp_path: Path) -> None:
    loaded = load(bert(tmp_path, rows=vocab_size(TOKENIZER) + 3))
    assert loaded.description == f"Hugging Face bert folder {tmp_path}"
    assert loaded.vocabulary_size == vocab_size(TOKENIZER) + 3, "spare rows are no matter"
    assert loaded.max_length == 40
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32}))
    assert load(tmp_path).max_length == 32


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(tmp_path: Path) -> None:
    entries = vocab_size(TOKENIZER)
    said = f"the tokenizer has {entries} entries, but the embeddings have only {entries - 1} rows"
    with pytest.raises(DataError, match=said) as caught:
        load(bert(tmp_path, rows=entries - 1))
    assert "tokenizer.json or vocab.txt" in str(caught.value.hint)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"neither tokenizer\.json nor vocab\.txt"):
        load(tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"neither a run nor a config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="model_type is 'gpt2', expected 'electra' or 'bert'"):
        load(tmp_path)


def test_a_fresh_encoder_has_learned_nothing(tmp_path: Path) -> None:
    like = load(bert(tmp_path, rows=300))
    make_noisy(like.encoder)
    fresh = fresh_encoder(like, 3)
    shapes = {name: value.shape for name, value in like.encoder.named_parameters()}
    assert {name: value.shape for name, value in fresh.encoder.named_parameters()} == shapes
    # The cut at two deviations leaves 0.88 of the range that config.json states.
    assert float(fresh.encoder.embeddings.weights.detach().std()) == pytest.approx(0.88 * 0.05, rel=0.05)
    assert (fresh.tokenizer_path, fresh.max_length, fresh.vocabulary_size) == (tmp_path, like.max_length, 300)
    assert fresh.description == f"untrained, as Hugging Face bert folder {tmp_path}"
    assert (fresh.trained, like.trained) == (False, True)
    assert not fresh.encoder.training
    prints = [fresh_encoder(like, seed).source_fingerprint for seed in (3, 4)]
    assert prints[0] == fresh.source_fingerprint != prints[1]


def test_the_encoder_of_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(str(path))
    made = encoder_of_preset("tiny", path, 0)
    run = make_run(tmp_path / "run").networks()["discriminator"].encoder
    assert made.encoder.config == run.config
    assert made.vocabulary_size == run.embeddings.vocab_size
    assert made.description == "untrained, preset tiny"
    assert fresh_encoder(made, 0).source_fingerprint == made.source_fingerprint
    with pytest.raises(ConfigError, match="tinny"):
        encoder_of_preset("tinny", path, 0)


def test_the_fingerprint_is_of_the_values_in_the_file(tmp_path: Path) -> None:
    before = load(bert(tmp_path, rows=250))
    assert before.source_fingerprint == load(tmp_path).source_fingerprint == fingerprint_weights(before.encoder)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["cls.predictions.bias"] += 1
    save_file(tensors, path)
    assert load(tmp_path).source_fingerprint == before.source_fingerprint, "a head is not the encoder"
    tensors["bert.embeddings.LayerNorm.bias"][0] += 1
    save_file(tensors, path)
    assert load(tmp_path).source_fingerprint != before.source_fingerprint


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@torch.no_grad()
def test_the_first_layers_compute_what_they_did_in_the_whole(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "embedding_size": 32, "num_heads": 2, "feedforward_size": 48}
    config = build_config(encoder=kind, **sizes)
    encoder = build_encoder(build_embeddings(vocab_size(TOKENIZER), 32, config), config)
    make_noisy(encoder)
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    whole = loaded_encoder(encoder, tmp_path / "tokenizer.json", 24, "a model")
    part = first_layers(whole, 2)
    states: list[list[torch.Tensor]] = [[], []]
    for found, loaded in zip(states, (whole, part), strict=True):
        # The first alone: the last block of a ModernBERT computes no LayerNorm for a next one.
        block = loaded.encoder.repeated_blocks()[0]
        block.register_forward_hook(lambda _, __, output, found=found: found.append(output))
        loaded.encoder(IDS)
    assert len(part.encoder.repeated_blocks()) == part.encoder.config.num_layers == 2
    torch.testing.assert_close(states[1], states[0])
    weights = dict(whole.encoder.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in part.encoder.named_parameters())
    assert part.description == "the first 2 of 3 layers of a model"
    assert part.source_fingerprint != whole.source_fingerprint
    with pytest.raises(ConfigError, match=r"finetune\.layers is 4, but the encoder has 3"):
        first_layers(whole, 4)
