"""XLNet folders: ours in transformers, transformers' here, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from discern.errors import CheckpointError, ConfigError
from discern.interop.families import ENCODER_TYPES, family_in, family_of, to_huggingface
from discern.interop.tokenizer import read_max_length
from discern.interop.xlnet import encoder_from_huggingface, load_huggingface_weights, network_from_huggingface
from discern.models.base import Network
from discern.models.heads import ReplacedTokenHead
from discern.models.xlnet.encoder import XLNetEncoder
from discern.storage.checksums import CHECKSUMS_NAME
from tests.parity.small_networks import VOCABULARY
from tests.parity.small_xlnet import build_network, encoder_of, rows, sizes

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What we write, without the checksums."""
    to_huggingface(build_network(sizes(clamp_length=7, activation="gelu-tanh")), VOCABULARY).write(tmp_path)
    (tmp_path / CHECKSUMS_NAME).unlink()
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_transformers_loads_all_of_it(folder: Path) -> None:
    from transformers import XLNetLMHeadModel, XLNetModel

    network = network_from_huggingface(folder)
    ids, segments = rows(2, 9)
    model, info = XLNetLMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.clamp_len == 7
    with torch.no_grad():
        expected = network.head(network.encoder(ids, None, segments))
        torch.testing.assert_close(model.eval()(ids, token_type_ids=segments).logits, expected, **TOLERANCE)
    bare, info = XLNetModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        states = bare.eval()(ids, token_type_ids=segments).last_hidden_state
        torch.testing.assert_close(states, network.encoder(ids, None, segments), **TOLERANCE)


@pytest.mark.parametrize("kind", ["XLNetLMHeadModel", "XLNetModel", "XLNetForSequenceClassification"])
def test_what_transformers_writes_is_read(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.XLNetConfig(
        vocab_size=97, d_model=32, n_layer=2, n_head=4, d_inner=48, ff_activation="relu", initializer_range=0.3, dropout=0.2
    )
    theirs = getattr(transformers, kind)(config).eval()
    theirs.save_pretrained(tmp_path)
    encoder = encoder_from_huggingface(tmp_path)
    assert (encoder.config.activation, encoder.config.hidden_dropout, encoder.training) == ("relu", 0.2, False)
    assert family_in(tmp_path).encoders == (XLNetEncoder,)
    ids, segments = rows(2, 9)
    with torch.no_grad():
        expected = getattr(theirs, "transformer", theirs)(ids, token_type_ids=segments).last_hidden_state
        torch.testing.assert_close(encoder(ids, None, segments), expected, **TOLERANCE)
        if kind == "XLNetLMHeadModel":
            network = network_from_huggingface(tmp_path)
            logits = theirs(ids, token_type_ids=segments).logits
            torch.testing.assert_close(network.head(network.encoder(ids, None, segments)), logits, **TOLERANCE)
        else:
            with pytest.raises(CheckpointError, match=r"lm_loss\.bias"):
                network_from_huggingface(tmp_path)


def test_the_way_there_and_back_changes_nothing(folder: Path, tmp_path: Path) -> None:
    network = build_network(sizes(clamp_length=7, activation="gelu-tanh"))
    back = network_from_huggingface(folder)
    assert encoder_of(back).config.clamp_length == 7
    assert encoder_of(back).config.activation == "gelu-tanh"
    for one, other in ((network.encoder, back.encoder), (network.head, back.head)):
        given = dict(one.named_parameters())
        assert given.keys() == dict(other.named_parameters()).keys()
        for name, value in other.named_parameters():
            assert torch.equal(value, given[name]), name


def test_an_objective_is_filled(folder: Path) -> None:
    network = build_network(sizes(clamp_length=7, activation="gelu-tanh"), seed=9)
    family_of(network.encoder).fill(network, folder)
    expected = network_from_huggingface(folder)
    assert torch.equal(encoder_of(network).query_embedding, encoder_of(expected).query_embedding)
    assert torch.equal(network.head.bias, expected.head.bias)


@pytest.mark.parametrize(
    ("name", "ours"), [("swish", "silu"), ("silu", "silu"), ("gelu_pytorch_tanh", "gelu-tanh"), ("gelu_new", "gelu-tanh")]
)
def test_other_names_of_an_activation_and_no_clamp_at_all(folder: Path, name: str, ours: str) -> None:
    edit(folder, ff_activation=name, clamp_len=None)
    config = encoder_from_huggingface(folder).config
    assert (config.activation, config.clamp_length) == (ours, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_type": "uni"}, "attn_type"),
        ({"untie_r": False}, "untie_r"),
        ({"ff_activation": "gelu_fast"}, "ff_activation"),
        ({"clamp_len": "far"}, "clamp_len"),
        ({"d_head": 3}, "d_head"),
        ({"n_layer": "two"}, "n_layer"),
        ({"n_head": 5}, "num_heads"),
        ({"d_inner": 65}, "shape"),
        ({"n_layer": 2}, "unexpected tensor"),
        ({"n_layer": 4}, "is missing"),
        ({"model_type": "longformer"}, "model_type"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, change: dict[str, Any], says: str) -> None:
    edit(folder, **({"d_head": None} if "n_head" in change else {}), **change)
    with pytest.raises(CheckpointError, match=says):
        network_from_huggingface(folder)


def test_an_output_matrix_of_its_own_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_loss.weight"] = tensors["transformer.word_embedding.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tied"):
        network_from_huggingface(folder)


def test_a_head_that_xlnet_has_not_is_refused() -> None:
    network = build_network(sizes())
    with pytest.raises(ConfigError, match="ReplacedTokenHead"):
        to_huggingface(Network(network.encoder, ReplacedTokenHead(network.encoder.config)), VOCABULARY)
    with pytest.raises(CheckpointError):
        load_huggingface_weights(network, Path("nowhere"))


def test_families() -> None:
    assert set(ENCODER_TYPES) == {"electra", "bert", "modernbert", "xlnet"}
    assert family_of(build_network(sizes()).encoder).frame == "cls-last"
    assert family_of(build_network(sizes(encoder="bert")).encoder).pretrained_type == "electra"


def test_rows_of_a_model_without_positions_are_as_long_as_it_says_or_usual(folder: Path) -> None:
    limit = encoder_from_huggingface(folder).config.max_positions
    assert read_max_length(folder, limit) == 512
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1_000_000_000_000}))
    assert read_max_length(folder, limit) == 512
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    assert read_max_length(folder, limit) == 1024
