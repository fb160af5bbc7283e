"""The heads, by hand and at chosen positions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from discern.models.heads import MaskedLMHead, ReplacedTokenHead, gather_positions
from tests.parity.small_networks import make_noisy, sizes

STATES = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def test_gathers_row_by_row() -> None:
    positions = torch.tensor([[False, True, False, True, False], [True, False, False, False, False]])
    gathered = gather_positions(STATES, positions)
    assert torch.equal(gathered, torch.stack([STATES[0, 1], STATES[0, 3], STATES[1, 0]]))
    assert gather_positions(STATES, torch.zeros(2, 5, dtype=torch.bool)).shape == (0, 32)


def test_masked_lm_head_by_hand() -> None:
    table = nn.Embedding(7, 16)
    head = MaskedLMHead(sizes(), table)
    make_noisy(head)
    inner = F.gelu(STATES @ head.dense.weight.T + head.dense.bias)
    inner = (inner - inner.mean(-1, keepdim=True)) / inner.var(-1, keepdim=True, unbiased=False).sqrt()
    inner = inner * head.norm.weight + head.norm.bias
    torch.testing.assert_close(head(STATES), inner @ table.weight.T + head.bias, atol=1e-5, rtol=1e-5)


def test_replaced_token_head_by_hand() -> None:
    head = ReplacedTokenHead(sizes())
    make_noisy(head)
    inner = F.gelu(STATES @ head.dense.weight.T + head.dense.bias)
    expected = (inner * head.output.weight[0]).sum(-1) + head.output.bias
    torch.testing.assert_close(head(STATES), expected, atol=1e-5, rtol=1e-5)
