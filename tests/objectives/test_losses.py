import math

import pytest
import torch

from discern.objectives.losses import copy_loss


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
