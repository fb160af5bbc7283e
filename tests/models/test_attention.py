"""Attention on cases that can be computed by hand, and on both of its paths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from discern.models.attention import SelfAttention, Unpadding, visible_keys
from tests.parity.small_networks import make_noisy, sizes


def attention(heads: int = 2, **changes: float) -> SelfAttention:
    """Random weights, no dropout unless asked for, hidden size 8."""
    part = SelfAttention(sizes(hidden_size=8, num_heads=heads, **changes))
    make_noisy(part)
    return part.eval()


@torch.no_grad()
def plain(heads: int) -> SelfAttention:
    """Query, key, value and output are the identity without bias."""
    part = attention(heads)
    for layer in (part.query, part.key, part.value, part.output):
        layer.weight.copy_(torch.eye(8))
        nn.init.zeros_(layer.bias)
    return part


def attend(part: SelfAttention, states: Tensor, visible: Tensor | None) -> Tensor:
    """In rows of equal length, projected back."""
    return part.output(part(states, Unpadding(visible)))


def hidden(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def through_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the code writes attention out, unless it is being compiled."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


MASKS = {
    "no mask": None,
    "padding": visible_keys(torch.tensor([[True] * 5 + [False], [True] * 6]), None),
    "pieces": visible_keys(torch.tensor([[True] * 5 + [False], [True] * 6]), torch.tensor([[0, 0, 0, 1, 1, 2], [0] * 6])),
    "a row of padding": visible_keys(torch.tensor([[False] * 6, [True] * 6]), None),
}


def test_equal_keys_are_attended_evenly() -> None:
    part = plain(2)
    nn.init.zeros_(part.key.weight)
    states = hidden(1, 5, 8)
    expected = states.mean(1, keepdim=True).expand_as(states)
    torch.testing.assert_close(attend(part, states, None), expected)


def test_two_keys_by_hand() -> None:
    """One head of width 8: scores are dot products over sqrt(8)."""
    states = torch.zeros(1, 2, 8)
    states[0, 0, 0], states[0, 1, 0], states[0, 1, 1] = 2.0, 1.0, 3.0
    # Query 0: scores 4/sqrt 8 and 2/sqrt 8; its weight on key 0 is the logistic function of the difference.
    weight = 1 / (1 + math.exp(-(4 - 2) / math.sqrt(8)))
    expected = weight * states[0, 0] + (1 - weight) * states[0, 1]
    torch.testing.assert_close(attend(plain(1), states, None)[0, 0], expected)


def test_heads_attend_apart() -> None:
    """Two heads of width 4 are two attentions of width 4, side by side."""
    states = hidden(2, 5, 8)
    scores = (states[..., :4] / 2) @ states[..., :4].transpose(1, 2)
    torch.testing.assert_close(attend(plain(2), states, None)[..., :4], scores.softmax(-1) @ states[..., :4])


def test_visible_keys_by_hand() -> None:
    real = torch.tensor([[True, True, False]])
    assert visible_keys(real, None).tolist() == [[[[True, True, False]]]]
    pieces = visible_keys(torch.tensor([[True, True, True, False]]), torch.tensor([[0, 0, 1, 2]]))
    assert pieces.tolist() == [
        [
            [
                [True, True, False, False],
                [True, True, False, False],
                [False, False, True, False],
                [False, False, False, True],
            ]
        ]
    ]


def test_every_query_sees_something_and_nothing_real_sees_padding() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 9, (4, 1), generator=random)
        real = torch.arange(8)[None, :] < lengths
        pieces = torch.randint(0, 2, (4, 8), generator=random).cumsum(1)
        for document_ids in (None, pieces):
            visible = visible_keys(real, document_ids).expand(4, 1, 8, 8)[:, 0]
            assert visible.any(-1).all()
            assert not (visible & real[:, :, None] & ~real[:, None, :]).any()


@pytest.mark.parametrize("fused", [False, True])
def test_a_hidden_key_has_no_influence(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        through_the_fused_kernel(monkeypatch)
    part, states = attention(), hidden(2, 6, 8)
    changed = states.clone()
    changed[0, 5] = 1e6
    first, second = (attend(part, value, MASKS["padding"]) for value in (states, changed))
    assert torch.equal(first[0, :5], second[0, :5])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [1, 4])
def test_the_fused_path_gives_the_same(mask: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fused in (False, True):
        if fused:
            through_the_fused_kernel(monkeypatch)
        part, states = attention(heads), hidden(2, 6, 8).requires_grad_()
        output = attend(part, states, MASKS[mask])
        (output * hidden(2, 6, 8, seed=1)).sum().backward()
        gradients = {name: value.grad for name, value in part.named_parameters()} | {"states": states.grad}
        results.append((output, gradients))
    (written, written_gradients), (kernel, kernel_gradients) = results
    torch.testing.assert_close(written, kernel, atol=1e-6, rtol=1e-5)
    for name, gradient in written_gradients.items():
        assert gradient is not None
        assert gradient.isfinite().all(), name
        torch.testing.assert_close(gradient, kernel_gradients[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_falls_on_the_probabilities_while_training(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal keys and values of one, an output is the share of the keys kept, over 0.75: a multiple of 1/48."""
    if fused:
        through_the_fused_kernel(monkeypatch)
    part = plain(1)
    part.dropout.probability = 0.25
    part.train()
    nn.init.zeros_(part.key.weight)
    torch.manual_seed(0)
    output = attend(part, torch.ones(64, 64, 8), None).detach()
    shares = output * 0.75 * 64
    torch.testing.assert_close(shares, shares.round(), atol=1e-3, rtol=0)
    assert output.std() > 0.02
    assert abs(float(output[..., 0].mean()) - 1) < 0.01
