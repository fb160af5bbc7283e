"""The same weights give the same numbers here and in transformers' ModernBERT: states, logits and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from discern.models.base import Network
from discern.models.config import ModelConfig, build_config
from discern.models.heads import ReplacedTokenHead
from discern.models.modernbert.encoder import ModernBertEncoder
from tests.parity.small_networks import VOCABULARY, counterpart, network_of, padded_rows
from tests.paths import on_path

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
SIZES = {
    "encoder": "modernbert",
    "num_layers": 4,
    "hidden_size": 32,
    "embedding_size": 32,
    "num_heads": 4,
    "feedforward_size": 24,
}
BIASES = {"attention_bias": True, "feedforward_bias": True, "norm_bias": True, "classifier_bias": True}
WINDOW = 16  # a token sees those up to 8 away
LENGTHS = (1, 2, 7, 8, 9, 10, 15, 16, 17, 18, 33, 70)


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds on both paths."""
    yield from on_path(request.param)


def sizes(**changes: Any) -> ModelConfig:
    return build_config({**SIZES, "local_window": WINDOW, **changes})


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("biases", [{}, BIASES], ids=["without biases", "with biases"])
@pytest.mark.parametrize("padded", [False, True], ids=["full rows", "padded rows"])
def test_logits_around_the_window(length: int, biases: dict[str, bool], padded: bool) -> None:
    network = network_of(sizes(**biases))
    theirs = counterpart(network)
    ids, real = padded_rows(length, padded=padded)
    with torch.no_grad():
        ours = network.token_logits(ids, real if padded else None)
        expected = theirs(ids, attention_mask=real.long()).logits
    torch.testing.assert_close(ours[real], expected[real], **TOLERANCE)


CASES: dict[str, dict[str, Any]] = {
    "windows of two": {"local_window": 2},
    "windows wider than the row": {"local_window": 400},
    "every second layer full": {"full_attention_every": 2},
    "all layers full": {"full_attention_every": 1},
    "only the first layer full": {"full_attention_every": 9},
    "other frequencies": {"full_rope_theta": 500.0, "local_rope_theta": 20.0},
    "one head": {"num_heads": 1},
    "heads of two": {"num_heads": 16},
    "one layer": {"num_layers": 1},
    "another epsilon": {"layer_norm_epsilon": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_setting(case: str) -> None:
    network = network_of(sizes(**CASES[case]))
    theirs = counterpart(network)
    ids, real = padded_rows(37)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long()).logits
        torch.testing.assert_close(network.token_logits(ids, real)[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("length", [1, 8, 9, 16, 17, 37])
@pytest.mark.parametrize("biases", [{}, BIASES], ids=["without biases", "with biases"])
@pytest.mark.parametrize("kind", ["words", "replaced"])
def test_gradients(kind: str, biases: dict[str, bool], length: int) -> None:
    network = network_of(sizes(**biases), None if kind == "words" else ReplacedTokenHead)
    theirs = counterpart(network)
    ids, real = padded_rows(length)
    ours, expected = network.token_logits(ids, real), theirs(ids, attention_mask=real.long()).logits
    ours = ours if kind == "words" else ours[..., None]
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3)) * real[..., None]
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    compare_gradients(network, theirs)


def test_gradients_of_packed_documents() -> None:
    """The sum over documents in one row: as transformers computes them one by one."""
    network = network_of(sizes(local_window=6))
    theirs = counterpart(network)
    ids, _ = padded_rows(40, padded=False)
    cuts = [0, 10, 11, 40]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 1, 29])).expand(3, -1)
    weights = torch.randn(3, 40, VOCABULARY.size, generator=torch.Generator().manual_seed(3))
    real = torch.ones_like(ids, dtype=torch.bool)
    (network.token_logits(ids, real, None, None, documents) * weights).sum().backward()
    for begin, end in pairwise(cuts):
        (theirs(ids[:, begin:end]).logits * weights[:, begin:end]).sum().backward()
    compare_gradients(network, theirs)


def compare_gradients(network: Network, theirs: Any) -> None:
    ours = {f"encoder.{name}": value.grad for name, value in network.encoder.named_parameters()}
    ours |= {f"head.{name}": value.grad for name, value in network.head.named_parameters() if "word_embeddings" not in name}
    expected = {name: value.grad for name, value in theirs.named_parameters()}
    found = ModernBertEncoder.architecture.to_huggingface(
        {name: gradient for name, gradient in ours.items() if gradient is not None}, network.encoder.config
    )
    assert found.keys() == expected.keys() - {"decoder.weight"}
    for name, gradient in found.items():
        scale = max(float(expected[name].abs().max()), 1e-3)
        torch.testing.assert_close(gradient / scale, expected[name] / scale, atol=1e-5, rtol=1e-4, msg=name)


def test_a_mask_with_holes_measures_the_window_in_positions() -> None:
    network = network_of(sizes(**BIASES))
    theirs = counterpart(network)
    ids, real = padded_rows(40, padded=False)
    real[:, 10:20] = False
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long()).logits
        torch.testing.assert_close(network.token_logits(ids, real)[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("length", [9, 40])
def test_documents_of_a_row_are_as_if_alone(length: int) -> None:
    """Packed rows: each document as transformers computes it by itself, whatever stands beside it."""
    network = network_of(sizes(**BIASES))
    theirs = counterpart(network)
    ids, _ = padded_rows(length, padded=False)
    cuts = [0, length // 4, length // 4 + 1, length]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([b - a for a, b in pairwise(cuts)]))
    with torch.no_grad():
        ours = network.token_logits(ids, torch.ones_like(ids, dtype=torch.bool), None, None, documents.expand(3, -1))
        alone = [theirs(ids[:, a:b]).logits for a, b in pairwise(cuts)]
    torch.testing.assert_close(ours, torch.cat(alone, 1), **TOLERANCE)
