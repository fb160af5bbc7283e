import math

import pytest
import torch

from discern.objectives.losses import masked_token_loss, replaced_token_loss


def test_uniform_generator_loss_is_log_vocabulary() -> None:
    term = masked_token_loss(logits=torch.zeros(3, 7), targets=torch.tensor([0, 4, 6]))
    torch.testing.assert_close(term.total / term.count, torch.tensor(7.0).log())


def test_no_masked_position_gives_zero_and_a_gradient() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    term = masked_token_loss(logits, torch.zeros(0, dtype=torch.long))
    term.total.backward()
    assert term.total.item() == 0
    assert term.count == 0


def test_replaced_token_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 50.0]])
    replaced = torch.tensor([[True, False, False, False]])
    real = torch.tensor([[True, True, True, False]])
    term = replaced_token_loss(logits, replaced, real, count=3, weight=50.0)
    expected = math.log(2) + math.log(1 + math.exp(2)) + math.log(1 + math.exp(-1))
    assert term.total.item() == pytest.approx(expected, rel=1e-6)
    assert (term.count, term.weight) == (3, 50.0)


def test_padding_gets_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0]], requires_grad=True)
    term = replaced_token_loss(logits, torch.zeros(1, 2, dtype=torch.bool), torch.tensor([[True, False]]), count=1)
    term.total.backward()
    assert logits.grad is not None
    assert logits.grad[0, 1] == 0
    assert logits.grad[0, 0] == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item())


def test_losses_are_float32_whatever_the_logits_are() -> None:
    term = masked_token_loss(torch.zeros(2, 1000, dtype=torch.bfloat16), torch.tensor([1, 2]))
    assert term.total.dtype == torch.float32
    assert term.total.item() == pytest.approx(2 * math.log(1000), rel=1e-6)
