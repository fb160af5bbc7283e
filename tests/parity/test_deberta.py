"""The same weights give the same numbers here and in transformers' DeBERTa: states, logits of every class, gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from discern.errors import CheckpointError, DataError
from discern.model_files.huggingface import network_to_huggingface, read_network
from discern.models.base import Network, named_parameters
from discern.models.config import ModelConfig, build_config
from discern.models.heads import ReplacedTokenHead
from tests.parity.small_networks import VOCABULARY, counterpart, make_noisy, network_of, padded_rows
from tests.paths import on_path

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
SIZES = {
    "encoder": "deberta",
    "num_layers": 3,
    "hidden_size": 32,
    "embedding_size": 32,
    "num_heads": 4,
    "feedforward_size": 48,
    "position_buckets": 16,
    "max_positions": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
CASES: dict[str, dict[str, Any]] = {
    "v3": {},
    "projections of their own": {"share_att_key": False, "norm_rel_ebd": "none"},
    "content to position": {"pos_att_type": "c2p"},
    "position to content": {"pos_att_type": "p2c", "share_att_key": False},
    "a bucket a distance": {"position_buckets": 0, "max_relative_positions": 24},
    "absolute positions, segments": {"position_biased_input": True, "num_token_types": 2, "max_positions": 700},
    "convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "convolution of five": {"conv_kernel_size": 5},
    "projected words": {"embedding_size": 16},
    "heads of two": {"num_heads": 16},
}


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds on both paths."""
    yield from on_path(request.param)


def sizes(**changes: Any) -> ModelConfig:
    return build_config({**SIZES, **changes})


@pytest.mark.parametrize(
    ("case", "length"),
    [
        *((case, length) for case in CASES for length in (1, 17, 70)),
        *((case, 700) for case in list(CASES)[:1] + list(CASES)[4:7]),
    ],
)
def test_logits_and_gradients(case: str, length: int) -> None:
    """At lengths below, at and beyond the distances that have a vector of their own."""
    network = network_of(sizes(**CASES[case]), nn.Identity if case == "projected words" else None)
    theirs = counterpart(network)
    ids, real = padded_rows(length)
    real[:, 2::5] &= length != 17
    types = (torch.arange(length) > length // 2).long().expand_as(ids) if "segments" in case else None
    ours = network.token_logits(ids, real, types)
    expected = theirs(ids, attention_mask=real.long(), token_type_ids=types)[0]
    torch.testing.assert_close(ours[real], expected[real], **TOLERANCE)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3)) * real[..., None] / real.sum()
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    compare_gradients(network, theirs)


def compare_gradients(network: Network, theirs: Any) -> None:
    parameters = {name: value for name, value in theirs.named_parameters() if value.grad is not None}
    gradients = {name: value.grad for name, value in named_parameters(network).items()}
    named = network.encoder.architecture.to_huggingface(
        {k: v for k, v in gradients.items() if v is not None}, network.encoder.config
    )
    bare = type(theirs) is transformers.DebertaV2Model
    named = {name.removeprefix("deberta.") if bare else name: value for name, value in named.items()}
    assert named.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(named[name], value.grad, msg=lambda said, name=name: f"{name}: {said}", **TOLERANCE)


def test_packed_documents() -> None:
    """The sum over documents in one row: as transformers computes them one by one."""
    network = network_of(sizes())
    theirs = counterpart(network)
    ids, _ = padded_rows(40)
    cuts = [0, 10, 11, 40]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 1, 29])).expand(3, -1)
    weights = torch.randn(3, 40, VOCABULARY.size, generator=torch.Generator().manual_seed(3)) / 40
    (network.token_logits(ids, torch.ones_like(ids, dtype=torch.bool), None, None, documents) * weights).sum().backward()
    for begin, end in pairwise(cuts):
        (theirs(ids[:, begin:end]).logits * weights[:, begin:end]).sum().backward()
    compare_gradients(network, theirs)


def test_the_mask_decoder_is_that_of_the_released_code() -> None:
    """`EnhancedMaskDecoder` of microsoft/DeBERTa, derived with the layers of transformers: the last one runs twice, its keys and
    values from the states before it, its queries beginning as these plus absolute positions."""
    network = network_of(sizes(mask_decoder=True))
    theirs = counterpart(network, "deberta.embeddings.position_embeddings.weight")
    ids, real = padded_rows(20)
    body, (hidden, mask) = (
        theirs.deberta,
        (theirs.deberta(ids, real.long(), output_hidden_states=True).hidden_states[-2], real.long()),
    )
    queries = hidden + dict(network.encoder.named_parameters())["position.weight"][:20]
    for _ in range(2):
        queries, _ = body.encoder.layer[-1](
            hidden,
            body.encoder.get_attention_mask(mask),
            query_states=queries,
            relative_pos=body.encoder.get_rel_pos(hidden),
            rel_embeddings=body.encoder.get_rel_embedding(),
        )
    expected = theirs.cls(queries)
    ours = network.token_logits(ids, real)
    torch.testing.assert_close(ours[real], expected[real], **TOLERANCE)
    # Tasks read the encoder as transformers computes it, in rows of any length.
    plain = network.encoder.for_tasks()(ids, real)
    assert not network.encoder.for_tasks().config.mask_decoder  # type: ignore[attr-defined]
    torch.testing.assert_close(plain[real], body(ids, real.long()).last_hidden_state[real], **TOLERANCE)
    with pytest.raises(DataError, match=r"a text has 65 tokens, but the model has only 64 absolute positions"):
        network.token_logits(torch.full((1, 65), 7))


def test_the_head_of_a_discriminator_is_that_of_the_released_code() -> None:
    """`LMMaskPredictionHead` of microsoft/DeBERTa reads each state together with that of the text's first token."""
    network = network_of(sizes(), ReplacedTokenHead)
    body = counterpart(network)
    head: Any = network.head
    ids, real = padded_rows(12)
    states = body(ids, real.long()).last_hidden_state
    inner = F.layer_norm(states[:, :1] + states, (32,), head.norm.weight, head.norm.bias, 1e-7)
    expected = (F.gelu(inner @ head.dense.weight.t() + head.dense.bias) @ head.output.weight.t() + head.output.bias)[..., 0]
    torch.testing.assert_close(network.token_logits(ids, real)[real], expected[real], **TOLERANCE)
    # Of several texts in a row, each has a first token.
    documents, positions = torch.tensor([[0] * 5 + [1] * 7]), torch.tensor([[*range(5), *range(7)]])
    whole = network.token_logits(ids[:1], real[:1], None, positions, documents)
    apart = torch.cat([network.token_logits(ids[:1, :5]), network.token_logits(ids[:1, 5:])], 1)
    torch.testing.assert_close(whole, apart, **TOLERANCE)


@pytest.mark.parametrize("kind", ["model", "language model"])
def test_v1_is_read(kind: str, tmp_path: Path) -> None:
    """Joined queries, keys and values, distances with projections of their own, and some biases that are missing."""
    config = transformers.DebertaConfig(
        vocab_size=VOCABULARY.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=30,
        relative_attention=True,
        pos_att_type="c2p|p2c",
        position_biased_input=kind == "model",
    )
    classes: Any = {"model": transformers.DebertaModel, "language model": transformers.DebertaForMaskedLM}
    theirs = classes[kind](config).eval()
    make_noisy(theirs)
    theirs.save_pretrained(tmp_path)
    network = read_network(tmp_path).network
    ids, real = padded_rows(24)
    expected = theirs(ids, attention_mask=real.long())[0]
    torch.testing.assert_close(network.token_logits(ids, real)[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("pos_att_type", "p2p|c2p", "pos_att_type is 'p2p|c2p'"),
        ("pos_att_type", None, "pos_att_type is None"),
        ("relative_attention", False, "relative_attention is false"),
        ("attention_head_size", 16, "attention_head_size is 16, not 8"),
        ("conv_kernel_size", 4, "it must be odd"),
    ],
)
def test_what_is_not_supported(key: str, value: object, told: str, tmp_path: Path) -> None:
    exported = network_to_huggingface(network_of(sizes()), VOCABULARY.special)
    exported.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(exported.config | {key: value}))
    with pytest.raises(CheckpointError, match=told.replace("|", r"\|")):
        read_network(tmp_path)
