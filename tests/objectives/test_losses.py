import math

import pytest
import torch

from discern.objectives.losses import DenseLogits, copy_loss, replaced_token_loss
from discern.types import Places


def test_replaced_token_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 50.0]])
    replaced = torch.tensor([[True, False, False, False]])
    real = torch.tensor([[True, True, True, False]])
    term = replaced_token_loss(logits, replaced, real, count=3, weight=50.0)
    expected = math.log(2) + math.log(1 + math.exp(2)) + math.log(1 + math.exp(-1))
    assert term.total.item() == pytest.approx(expected, rel=1e-6)
    assert (term.count, term.weight) == (3, 50.0)


def test_losses_are_float32_whatever_the_logits_are() -> None:
    logits = DenseLogits(torch.zeros(2, 1000, dtype=torch.bfloat16))
    term = logits.loss(torch.tensor([1, 2]), Places(torch.arange(2), 2))
    assert term.total.dtype == torch.float32
    assert term.total.item() == pytest.approx(2 * math.log(1000), rel=1e-6)


def word_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def test_copy_loss_by_hand() -> None:
    """Three words. The gate copies with 3/4, 1/2 and 1/5; the words are even, even, and 1/2, 1/4, 1/4."""
    word_logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [math.log(2), 0.0, 0.0]])
    copy_logits = torch.tensor([math.log(3), 0.0, math.log(1 / 4)])
    read, original = torch.tensor([1, 2, 2]), torch.tensor([1, 0, 2])
    term = copy_loss(word_losses(word_logits, original), copy_logits, read, original)
    expected = -math.log(3 / 4 + 1 / 4 / 3) - math.log(1 / 2 / 3) - math.log(1 / 5 + 4 / 5 / 4)
    assert term.total.item() == pytest.approx(expected, rel=1e-6)
    assert term.count == 3


@pytest.mark.parametrize("sure", [-200.0, 200.0])
def test_a_sure_gate_stays_finite(sure: float) -> None:
    gate = torch.full((2,), sure, requires_grad=True)
    words = torch.zeros(2, 5, requires_grad=True)
    targets = torch.tensor([1, 2])
    term = copy_loss(word_losses(words, targets), gate, torch.tensor([1, 1]), targets)
    term.total.backward()
    assert torch.isfinite(term.total)
    assert gate.grad is not None
    assert torch.isfinite(gate.grad).all()
    assert words.grad is not None
    assert torch.isfinite(words.grad).all()
