"""Attention among the real tokens alone: on a GPU as it is, on the CPU with a stand-in that computes the same plainly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from discern import kernels
from discern.corruption.randomness import Randomness
from discern.models import attention, encoders
from discern.models.attention import Direction, attend_in_spans, span_obstacle, visible_in_window, visible_keys
from discern.models.base import Encoder, build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.types import TokenBatch, with_spans
from tests.parity.small_networks import make_noisy, token_batch
from tests.support import SPECIAL, make_batch, settings

LENGTHS = [30, 30, 11, 4]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    **others: Any,
) -> Tensor:
    """The arguments of torch's `varlen_attn`, and what it computes, span by span."""
    assert not others
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q.tolist() == cu_seq_k.tolist()
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k >= int(cu_seq_q.diff().max())
    found = []
    for start, stop in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        parts = (part[start:stop].transpose(0, 1) for part in (query, key, value))
        apart = torch.arange(stop - start)[None, :] - torch.arange(stop - start)[:, None]
        left, right = window_size
        near = ((apart >= -left) | (left < 0)) & ((apart <= right) | (right < 0))
        found.append(F.scaled_dot_product_attention(*parts, attn_mask=near).transpose(0, 1))
    return torch.cat(found)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts the plain computation in the place of torch's, and counts its calls."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[5])
        return plain(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    return calls


def encoder(name: str, **options: Any) -> Encoder:
    sizes = {"num_layers": 3, "hidden_size": 32, "embedding_size": 16, "num_heads": 2, "feedforward_size": 24}
    window = {"local_window": 6} if name == "modernbert" else {}
    config = build_config({"encoder": name, "attention_dropout": 0.0, "hidden_dropout": 0.0, **sizes, **window})
    build: Any = encoders.load(name)
    built: Encoder = build(build_embeddings(97, 16, config), config, **options)
    make_noisy(built)
    return built


def two_towers(name: str) -> Encoder:
    either = encoder(name)
    return TwoTowerEncoder(either.embeddings, either.config)


def rows(kind: str) -> TokenBatch:
    """Rows with padding; of several documents with padding, with little padding, or full."""
    batch = token_batch({"full": [30] * 4, "nearly full": [30, 30, 28, 29]}.get(kind, LENGTHS))
    if kind == "padded":
        return batch
    documents = (torch.arange(30) >= torch.tensor([7, 30, 9, 2])[:, None]).long()
    positions = torch.where(documents > 0, torch.arange(30) - torch.tensor([7, 30, 9, 2])[:, None], torch.arange(30))
    return replace(batch, document_ids=documents, position_ids=positions, full=kind == "full")


@pytest.mark.parametrize("kind", ["padded", "documents", "nearly full", "full"])
@pytest.mark.parametrize("direction", ["both", "left-to-right", "right-to-left"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_spans_give_the_states_and_gradients_of_padded_rows(name: str, direction: str, kind: str, stand_in: list[int]) -> None:
    """Offsets, places, positions, directions and windows: states of the real tokens, and gradients of all weights."""
    batch, network = rows(kind), encoder(name, direction=direction)
    real = batch.attention_mask
    found = []
    for each in (batch, with_spans(batch)):
        network.zero_grad()
        with kernels.switched_off():
            hidden = network(each.input_ids, *each.context)
        (hidden * torch.linspace(-1, 1, 32))[real].square().sum().backward()
        found.append((hidden[real].detach(), [weight.grad for weight in network.parameters() if weight.grad is not None]))
    assert len(stand_in) == 3
    assert set(stand_in) == {30}
    (states, gradients), (ours, ours_of_weights) = found
    torch.testing.assert_close(ours, states, atol=1e-5, rtol=1e-5)
    for theirs, other in zip(gradients, ours_of_weights, strict=True):
        torch.testing.assert_close(other, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["padded", "documents", "nearly full", "full"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_spans_give_the_states_of_two_towers(name: str, kind: str, stand_in: list[int]) -> None:
    """Those of padding are zeros in both layouts where the neighbor is real, and undefined otherwise."""
    batch, network = rows(kind), two_towers(name)
    with kernels.switched_off(), torch.no_grad():
        states, ours = (network(each.input_ids, *each.context) for each in (batch, with_spans(batch)))
    assert len(stand_in) == 6
    real = batch.attention_mask
    torch.testing.assert_close(ours[real], states[real], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", [name for name in objectives.names() if name != "permutation-lm"])
def test_every_objective_passes_the_spans_on(name: str) -> None:
    """Its losses are those of padded rows. XLNet always runs in padded rows."""
    objective = objectives.load(name)
    built: Objective = objective(objective.Config(), settings(attention_dropout=0.0, hidden_dropout=0.0))
    built.initialize(0)
    tokens = make_batch([[SPECIAL.cls, *range(5, 5 + length), SPECIAL.sep] for length in (20, 7, 13)])
    numbers = Randomness(0, 0, tokens.slot)
    losses = []
    for each in (tokens, with_spans(tokens)):
        with kernels.switched_off():
            output = built(built.corrupt(each, numbers), numbers)
        losses.append({term: float(found.total.detach()) for term, found in output.terms.items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_spans_by_hand() -> None:
    """Rows of 3, 2 and 3 real tokens of 4, the last of two documents, [2, 1]."""
    batch = token_batch([3, 2, 3], width=4)
    batch = replace(batch, document_ids=torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 2]]))
    spans = with_spans(batch).spans
    assert spans is not None
    assert spans.offsets.tolist() == [0, 3, 5, 7, 8]
    assert spans.places is not None
    assert spans.places.tolist() == [0, 1, 2, 4, 5, 8, 9, 10]
    assert spans.longest == 4  # 3, rounded up to a power of two
    moved = with_spans(batch).to(torch.device("meta")).spans
    assert moved is not None
    assert moved.offsets.device.type == "meta"
    assert with_spans(batch).rows(0, 2).spans is None


def test_little_padding_stays_in_spans_of_its_own() -> None:
    """The rows keep their shape, for which compiled code is made."""
    spans = with_spans(token_batch([50, 48, 50])).spans
    assert spans is not None
    assert spans.offsets.tolist() == [0, 50, 98, 100, 150]
    assert spans.places is None


def test_full_rows_are_spans_of_equal_length() -> None:
    spans = with_spans(replace(token_batch([6, 6]), full=True)).spans
    assert spans is not None
    assert spans.offsets.tolist() == [0, 6, 12]
    assert spans.places is None
    assert spans.longest == 6


def test_padding_between_tokens_keeps_the_rows() -> None:
    """A window counts positions, so the tokens of a document must be neighbors."""
    batch = token_batch([5, 5])
    mask = batch.attention_mask.clone()
    mask[0, 2] = False
    assert with_spans(replace(batch, attention_mask=mask, full=False)).spans is None


def test_why_a_gpu_uses_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    network = encoder("bert")
    assert span_obstacle(network, torch.device("cpu"), "bfloat16") == "the device is no GPU"
    assert span_obstacle(network, gpu, "bfloat16") is None

    def reason(model: Encoder, precision: str = "bfloat16") -> str:
        return span_obstacle(model, gpu, precision) or ""

    assert "float32" in reason(network, "float32")
    with kernels.switched_off(attention.SPANS_OFF):
        assert "switched off" in reason(network)
    network.blocks[1].attention.dropout.probability = 0.1
    assert "attention dropout is 0.1" in reason(network)
    assert span_obstacle(network.eval(), gpu, "bfloat16") is None
    narrow = build_config(encoder="bert", hidden_size=12, embedding_size=12, num_heads=1, attention_dropout=0.0)
    assert "heads of width 12" in reason(build_encoder(build_embeddings(97, 12, narrow), narrow))
    recurrent = build_config(encoder="xlnet", hidden_size=16, embedding_size=16, num_heads=2)
    assert "encoder 'xlnet'" in reason(build_encoder(build_embeddings(97, 16, recurrent), recurrent))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "Old GPU" in reason(encoder("bert"))


def operands(dtype: torch.dtype, device: str) -> list[Tensor]:
    """Queries, keys and values of two rows of 24, (B, H, L, d)."""
    drawn = torch.randn(3, 2, 2, 24, 16, generator=torch.Generator().manual_seed(0))
    return [part.to(device, dtype) for part in drawn]


def written_out(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """The definition, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    scores = (query @ key.transpose(-1, -2) / 4).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_sdpa_and_flex_attention_compute_the_definition(device: str, window: int | None) -> None:
    """With document boundaries and a window, in float32."""
    query, key, value = operands(torch.float32, device)
    documents = (torch.arange(24, device=device) >= torch.tensor([[9], [17]], device=device)).long()
    visible = visible_keys(torch.ones(2, 24, dtype=torch.bool, device=device), documents)
    if window is not None:
        windowed = visible_in_window(visible, 24, window, query.device)
        assert windowed is not None
        visible = windowed

    def sees(row: Tensor, head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
        near = (asking - seen).abs() <= (24 if window is None else window)
        return (documents[row, asking] == documents[row, seen]) & near

    expected = written_out(query, key, value, visible)
    mask = create_block_mask(sees, 2, None, 24, 24, device=device)
    ours = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    flexible = flex_attention(query, key, value, block_mask=mask)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flexible.double(), expected, atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]


@needs_gpu
@pytest.mark.parametrize("direction", ["both", "left-to-right", "right-to-left"])
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_attention_computes_the_definition_on_a_gpu(window: int | None, direction: Direction) -> None:
    parts = operands(torch.bfloat16, "cuda")
    offsets = torch.tensor([0, 9, 24, 41, 48], dtype=torch.int32, device="cuda")
    documents = (torch.arange(24, device="cuda") >= torch.tensor([[9], [17]], device="cuda")).long()
    visible = visible_keys(torch.ones(2, 24, dtype=torch.bool, device="cuda"), documents)
    visible = visible if window is None else visible_in_window(visible, 24, window, visible.device)  # type: ignore[assignment]
    if direction != "both":
        visible = visible & (visible.new_ones(24, 24).tril() if direction == "left-to-right" else visible.new_ones(24, 24).triu())
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in parts)
    ours = attend_in_spans(query, key, value, offsets, 32, window, direction)
    expected = written_out(*parts, visible).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(ours.double(), expected, atol=1e-2, rtol=1e-2)


@needs_gpu
@pytest.mark.parametrize("kind", ["padded", "documents", "nearly full", "full"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_spans_give_the_states_of_padded_rows_on_a_gpu(name: str, kind: str) -> None:
    device = torch.device("cuda")
    batch, network = rows(kind), encoder(name).eval().to(device)
    states = []
    for each in (batch, with_spans(batch)):
        moved = each.to(device)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            states.append(network(moved.input_ids, *moved.context)[moved.attention_mask])
    distance = (states[0] - states[1]).double().norm() / states[0].double().norm()
    assert float(distance) < 1e-2
