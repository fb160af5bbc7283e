"""Names and shapes of Hugging Face, there and back: dictionaries of weights in, dictionaries of weights out."""

from __future__ import annotations

import pytest
import torch

from discern.models.base import build_embeddings, build_encoder, build_language_head
from discern.models.config import build_config
from discern.models.electra import huggingface as electra
from discern.models.weight_names import renamed
from discern.models.xlnet import huggingface as xlnet

SIZES = {"num_layers": 12, "hidden_size": 16, "embedding_size": 16, "num_heads": 4, "feedforward_size": 24, "max_positions": 32}


def weights(encoder: str) -> dict[str, torch.Tensor]:
    config = build_config(encoder=encoder, **SIZES)
    embeddings = build_embeddings(50, 16, config)
    body, head = build_encoder(embeddings, config), build_language_head(embeddings, config)
    found = {f"encoder.{name}": value.detach() for name, value in body.named_parameters()}
    return found | {f"head.{name}": value.detach() for name, value in head.named_parameters() if "word_embeddings" not in name}


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


def test_an_unknown_weight_is_an_error() -> None:
    with pytest.raises(KeyError):
        renamed("encoder.blocks.3.mystery.weight", {"encoder.blocks.#.expand": "layer.#.dense"})
