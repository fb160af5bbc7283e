"""The encoder: what may influence what, odd rows, and recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from discern import kernels
from discern.corruption.randomness import Randomness
from discern.models.attention import Unpadding
from discern.models.electra.encoder import BertEncoder, PostNormBlock
from discern.models.layers import Dropout, as_states
from discern.objectives.base import Objective
from discern.types import TokenBatch
from tests.parity.small_networks import build, make_noisy, network_logits, sizes, token_batch

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def encoder(**changes: int) -> BertEncoder:
    part = build(sizes(**changes)).networks()["discriminator"].encoder
    assert isinstance(part, BertEncoder)
    return part


def test_a_block_ends_in_a_layer_norm() -> None:
    """Post-norm: with the norm's weight 1 and bias 0, every state has mean 0 and variance 1."""
    block = PostNormBlock(sizes())
    make_noisy(block)
    torch.nn.init.ones_(block.feedforward_norm.weight)
    torch.nn.init.zeros_(block.feedforward_norm.bias)
    output = block(as_states(torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))), Unpadding()).values
    torch.testing.assert_close(output.mean(-1), torch.zeros(2, 5), atol=1e-6, rtol=0)
    torch.testing.assert_close(output.var(-1, unbiased=False), torch.ones(2, 5))


def test_a_block_without_weights_is_two_norms() -> None:
    """Attention and feed-forward give nothing: what is left are the residuals, which dropout leaves alone."""
    block = PostNormBlock(sizes(hidden_dropout=0.5, attention_dropout=0.5)).train()
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    for norm in (block.attention_norm, block.feedforward_norm):
        torch.nn.init.ones_(norm.weight)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(as_states(states), Unpadding()).values, torch.layer_norm(states, [32]), **TOLERANCE)


def test_dropout_falls_on_embeddings_probabilities_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not inside the feed-forward part."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(Dropout, "forward", lambda _, values: shapes.append(tuple(values.shape)) or values)
    with kernels.switched_off():
        encoder(num_layers=1)(token_batch([9, 9]).input_ids)
    heads = sizes().num_heads
    assert shapes == [(2, 9, 16), (2, heads, 9, 9), (2, 9, 32), (2, 9, 32)]


@torch.no_grad()
def test_defaults_are_segment_0_and_counted_positions() -> None:
    part, ids = encoder(), token_batch([17, 17]).input_ids
    stated = part(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids), torch.arange(17).expand(2, 17))
    torch.testing.assert_close(part(ids), stated)
    assert not torch.allclose(part(ids), part(ids, None, torch.ones_like(ids)))
    assert not torch.allclose(part(ids), part(ids, None, None, torch.arange(1, 18).expand(2, 17)))


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    network = build(sizes()).networks()["discriminator"]
    short, long = token_batch([9, 9]), token_batch([9, 9], 30)
    long_ids = long.input_ids.clone()
    long_ids[:, :9] = short.input_ids
    for filler in (0, 50):
        long_ids[:, 9:] = filler
        padded = network.head(network.encoder(long_ids, long.attention_mask))[:, :9]
        torch.testing.assert_close(padded, network_logits(network, short), **TOLERANCE)


def packed_row(lengths: list[int], padding: int) -> tuple[TokenBatch, list[Tensor]]:
    """Pieces `[CLS] ... [SEP]` back to back in one row, and each piece alone."""
    pieces = [token_batch([length], seed=length).input_ids for length in lengths]
    width = sum(lengths) + padding
    row = token_batch([sum(lengths)], width)
    ids = torch.cat([*pieces, torch.zeros(1, padding, dtype=torch.long)], 1)
    order = torch.tensor([[number for number, length in enumerate([*lengths, padding]) for _ in range(length)]])
    places = torch.cat([torch.arange(length) for length in [*lengths, padding]])[None]
    batch = TokenBatch(
        input_ids=ids,
        attention_mask=row.attention_mask,
        special_tokens_mask=row.special_tokens_mask | (ids == 2) | (ids == 3),
        token_type_ids=torch.zeros_like(ids),
        position_ids=places,
        document_ids=order,
        word_starts=None,
        example_index=row.example_index,
        slot=row.slot,
        full=padding == 0,
    )
    return batch, pieces


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_packed_pieces_do_not_see_each_other(padding: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    part = encoder()
    batch, pieces = packed_row([11, 3, 14], padding)
    packed = part(batch.input_ids, batch.visible_mask, batch.token_type_ids, batch.position_ids, batch.document_ids)
    assert packed.isfinite().all()
    start = 0
    for piece in pieces:
        torch.testing.assert_close(packed[:, start : start + piece.shape[1]], part(piece), **TOLERANCE)
        start += piece.shape[1]


@torch.no_grad()
def test_packed_pieces_need_no_attention_mask() -> None:
    part = encoder()
    batch, _ = packed_row([11, 3, 14], 0)
    context = batch.token_type_ids, batch.position_ids, batch.document_ids
    torch.testing.assert_close(part(batch.input_ids, None, *context), part(batch.input_ids, batch.attention_mask, *context))


def step_gradients(objective: Objective, batch: TokenBatch, seed: int = 0) -> dict[str, Tensor]:
    """Gradients of one training step's mean losses, by parameter."""
    randomness = Randomness(0, 0, batch.slot)
    torch.manual_seed(seed)
    objective.zero_grad(set_to_none=True)
    output = objective(objective.corrupt(batch, randomness), randomness)
    loss = sum(term.weight * term.total / max(term.count, 1) for term in output.terms.values())
    assert isinstance(loss, Tensor)
    assert loss.isfinite()
    loss.backward()
    return {name: value.grad for name, value in objective.named_parameters() if value.grad is not None}


ODD_ROWS = {
    "all padding": [0, 12],
    "nothing but padding": [0, 0],
    "no maskable token": [2, 12],
    "only [CLS] [SEP]": [2],
    "one token": [3],
    "one token and padding": [3, 20],
}


@pytest.mark.parametrize("rows", ODD_ROWS)
@pytest.mark.parametrize("name", ["rtd", "mlm"])
@pytest.mark.parametrize("fused", [False, True])
def test_odd_rows_stay_finite(rows: str, name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    objective = build(sizes(hidden_dropout=0.1, attention_dropout=0.1), name).train()
    batch = token_batch(ODD_ROWS[rows], max(ODD_ROWS[rows]) or 8)
    gradients = step_gradients(objective, batch)
    assert gradients.keys() == dict(objective.named_parameters()).keys()
    for parameter, gradient in gradients.items():
        assert gradient.isfinite().all(), parameter


@pytest.mark.parametrize("fused", [False, True])
def test_a_packed_row_with_padding_stays_finite(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    batch, _ = packed_row([11, 3], 4)
    for parameter, gradient in step_gradients(build(sizes()).train(), batch).items():
        assert gradient.isfinite().all(), parameter


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["rtd", "mlm"])
def test_recomputation_gives_the_same_gradients(dropout: float, name: str) -> None:
    model = sizes(hidden_dropout=dropout, attention_dropout=dropout)
    batch = token_batch([17, 12, 5], 19)
    plain, recomputed = (
        step_gradients(build(model, name, checkpointing=checkpointing).train(), batch) for checkpointing in (False, True)
    )
    assert plain.keys() == recomputed.keys()
    for parameter, gradient in plain.items():
        assert torch.equal(gradient, recomputed[parameter]), parameter


def test_recomputation_really_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = PostNormBlock.forward
    monkeypatch.setattr(PostNormBlock, "forward", lambda *inputs: calls.append(1) or forward(*inputs))
    batch = token_batch([9])
    step_gradients(build(sizes(), "mlm", checkpointing=True).train(), batch)
    assert len(calls) == 2 * sizes().num_layers
