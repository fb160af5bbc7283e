import math

import pytest
import torch
from torch.nn import functional as F

from discern.corruption.masking import Sampling, sample_tokens
from discern.models.heads import MaskedLMHead
from discern.objectives.losses import ChunkedLogits, DenseLogits, word_logits
from discern.types import Places
from tests.support import settings

N, E, V = 23, 6, 41


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    states, table, bias = (torch.randn(size, generator=rng).requires_grad_() for size in ((N, E), (V, E), (V,)))
    return states, table, bias


TARGETS = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rows", [1, 5, 23, 100])
def test_losses_in_parts_are_those_of_the_matrix(rows: int) -> None:
    states, table, bias = operands()
    weights = torch.linspace(-1, 2, N)
    expected = F.cross_entropy(F.linear(states, table, bias), TARGETS, reduction="none")
    got = ChunkedLogits(states, table, bias, rows).losses(TARGETS)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(
        *(torch.autograd.grad((each * weights).sum(), (states, table, bias)) for each in (got, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_under_autocast_only_the_products_are_in_bfloat16() -> None:
    states, table, bias = operands()
    with torch.autocast("cpu", torch.bfloat16):
        whole = DenseLogits(F.linear(states, table, bias)).losses(TARGETS)
        parts = ChunkedLogits(states, table, bias, 5).losses(TARGETS)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(each.sum(), (states, table, bias)) for each in (parts, whole)), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(top_p=0.7, disallow_original=True)])
def test_samples_in_parts_are_the_same_tokens(sampling: Sampling) -> None:
    states, table, bias = operands()
    uniforms = torch.rand(N, generator=torch.Generator().manual_seed(2))
    parts = ChunkedLogits(states, table, bias, 4)
    expected = sampling.sample(parts.matrix(), uniforms, TARGETS)
    assert torch.equal(parts.map(sampling.sample, uniforms, TARGETS), expected)
    some = torch.tensor([3, 20, 7])
    assert torch.equal(parts.select(some).map(sample_tokens, uniforms[some]), sample_tokens(parts.matrix()[some], uniforms[some]))


def test_entries_that_fill_up_a_row_do_not_count() -> None:
    states, table, bias = operands()
    places = Places(torch.arange(N), 12, torch.arange(N) % 2 + (torch.arange(N) == 5))
    losses = F.cross_entropy(F.linear(states, table, bias), TARGETS, reduction="none").detach()
    expected = losses[1::2].sum() + losses[5]
    for logits in (ChunkedLogits(states, table, bias, 5), DenseLogits(F.linear(states, table, bias))):
        term = logits.loss(TARGETS, places, 2.0)
        torch.testing.assert_close(term.total, expected)
        assert (term.count, term.weight) == (12, 2.0)


def test_no_part_of_a_step_holds_all_logits_on_a_device() -> None:
    sizes = settings().model
    head = MaskedLMHead(sizes, torch.nn.Embedding(V, E)).to("meta")
    states = torch.zeros(N, sizes.hidden_size, device="meta")
    assert isinstance(word_logits(head.train(), states), ChunkedLogits)
    assert word_logits(head, states).observed("mlm") == {}
    # Evaluation looks at the logits.
    assert isinstance(word_logits(head.eval(), states), DenseLogits)
    assert word_logits(head, states).observed("mlm")["mlm_logits"].shape == (N, V)
    assert math.prod(word_logits(head.train(), states).matrix().shape) == N * V
