"""Names and shapes of Hugging Face, there and back: dictionaries of weights in, dictionaries of weights out."""

from __future__ import annotations

import pytest
import torch

from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.electra import huggingface as electra
from discern.models.modernbert import huggingface as modernbert
from discern.models.weight_names import renamed
from discern.models.xlnet import huggingface as xlnet

SIZES = {"num_layers": 12, "hidden_size": 16, "embedding_size": 16, "num_heads": 4, "feedforward_size": 24, "max_positions": 32}


def weights(encoder: str, width: int = 16) -> dict[str, torch.Tensor]:
    config = build_config(encoder=encoder, **SIZES)
    embeddings = build_embeddings(50, width, config)
    body = build_encoder(embeddings, config)
    head = body.language_head()
    found = {f"encoder.{name}": value.detach() for name, value in body.named_parameters()}
    tied = ("word_embeddings.", "projection.")
    return found | {f"head.{name}": value.detach() for name, value in head.named_parameters() if not name.startswith(tied)}


def test_electra_there_and_back() -> None:
    ours = weights("bert")
    theirs = electra.to_huggingface(ours)
    assert theirs["electra.encoder.layer.11.attention.self.query.weight"] is ours["encoder.blocks.11.attention.query.weight"]
    assert theirs["generator_lm_head.bias"] is ours["head.bias"]
    assert electra.from_huggingface(theirs) == ours
    assert electra.bert_name("generator_predictions.LayerNorm.bias") == "cls.predictions.transform.LayerNorm.bias"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (["head.dense.weight", "head.output.weight"], "discriminator_predictions.dense.weight"),
        (["head.dense.weight", "head.bias"], "generator_predictions.dense.weight"),
        (["head.words.dense.weight", "head.copy_gate.weight"], "generator_predictions.dense.weight"),
        (["bilinear.context.weight", "head.output.weight"], "bilinear_term.context.weight"),
        (["encoder.left.blocks.3.expand.bias"], "electra.left.encoder.layer.3.intermediate.dense.bias"),
    ],
)
def test_the_head_decides_on_its_names(ours: list[str], theirs: str) -> None:
    given = {name: torch.zeros(1) for name in ours}
    found = electra.to_huggingface(given)
    assert next(iter(found)) == theirs
    assert list(electra.from_huggingface(found)) == ours


def test_xlnet_there_and_back() -> None:
    ours = weights("xlnet")
    theirs = xlnet.to_huggingface(ours, num_heads=4)
    query = ours["encoder.blocks.11.attention.query.weight"]
    assert theirs["transformer.layer.11.rel_attn.q"].shape == (16, 4, 4)
    assert theirs["transformer.layer.11.rel_attn.q"][5, 2, 1] == query[2 * 4 + 1, 5]
    assert theirs["transformer.mask_emb"].shape == (1, 1, 16)
    again = xlnet.from_huggingface(theirs)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_modernbert_there_and_back() -> None:
    ours = weights("modernbert")
    theirs = modernbert.to_huggingface(ours)
    packed = theirs["model.layers.11.attn.Wqkv.weight"]
    for third, name in enumerate(("query", "key", "value")):
        assert torch.equal(packed[16 * third : 16 * third + 16], ours[f"encoder.blocks.11.attention.{name}.weight"])
    assert "model.layers.0.attn_norm.weight" not in theirs  # the embeddings are normalized already
    assert theirs["model.layers.1.attn_norm.weight"] is ours["encoder.blocks.1.attention_norm.weight"]
    assert theirs["decoder.bias"] is ours["head.bias"]
    again = modernbert.from_huggingface(theirs)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_modernbert_without_a_projection_has_the_product() -> None:
    ours = weights("modernbert", width=24)
    theirs = modernbert.to_huggingface(ours)
    product = ours["encoder.embeddings.word.weight"] @ ours["encoder.projection.weight"].t()
    assert torch.equal(theirs["model.embeddings.tok_embeddings.weight"], product)
    assert not any("projection" in name for name in theirs)


def test_an_unknown_weight_is_an_error() -> None:
    with pytest.raises(KeyError):
        renamed("encoder.blocks.3.mystery.weight", {"encoder.blocks.#.expand": "layer.#.dense"})
