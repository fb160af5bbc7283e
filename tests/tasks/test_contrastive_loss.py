"""InfoNCE and CoSENT: by hand, and against the losses of sentence-transformers on the same vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern.tasks.contrastive_objective import cosent, info_nce

VALUES = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(0))
SCORES = torch.tensor([3.0, 1.0, 3.0, 0.5, 2.0, 1.0])


def loss_of(values: Tensor, keys: list[list[int]] | None = None, **settings: Any) -> Tensor:
    numbers = torch.tensor(keys) if keys else torch.arange(1, values[..., 0].numel() + 1).view(values.shape[:2])
    return info_nce(values, numbers, **{"temperature": 0.05, "sizes": values.shape[-1:], **settings})


@pytest.mark.parametrize("symmetric", [False, True])
def test_orthogonal_pairs_by_hand(symmetric: bool) -> None:
    # Each anchor has cosine 1 with its positive and 0 with the other one.
    loss = loss_of(torch.eye(2)[:, None].expand(2, 2, 2), temperature=0.5, symmetric=symmetric)
    assert float(loss) == pytest.approx(2 * -math.log(math.exp(2) / (math.exp(2) + 1)))


@pytest.mark.parametrize("settings", [{}, {"symmetric": True}, {"sizes": (4, 8)}])
def test_the_rows_of_two_halves_sum_to_the_whole(settings: dict[str, Any]) -> None:
    halves = sum(loss_of(VALUES, rows=slice(first, first + 3), **settings) for first in (0, 3))
    torch.testing.assert_close(halves, loss_of(VALUES, **settings))


def test_false_negatives_are_left_out() -> None:
    pairs = VALUES[:3, :2]
    # The positive of the first row is also that of the second, so neither is a negative of the other.
    shared = loss_of(pairs, [[1, 2], [3, 2], [5, 6]], temperature=1.0)
    cosines = torch.nn.functional.cosine_similarity(pairs[:, None, 0], pairs[None, :, 1], dim=-1)
    expected = torch.zeros(())
    for row, others in enumerate(([2], [2], [0, 1])):
        expected += cosines[row, [row, *others]].logsumexp(0) - cosines[row, row]
    torch.testing.assert_close(shared, expected)
    same_anchor = loss_of(pairs, [[1, 2], [1, 4], [5, 6]], temperature=1.0)
    torch.testing.assert_close(same_anchor, expected, msg="the positives of one anchor are no negatives of each other")
    assert loss_of(pairs, temperature=1.0) > expected


def test_an_anchor_that_is_its_positive_is_compared_with_the_others() -> None:
    pairs = VALUES[:2, :2]
    torch.testing.assert_close(loss_of(pairs, [[1, 1], [2, 2]]), loss_of(pairs))


def test_an_absent_negative_counts_nothing() -> None:
    keys = [[2 * row + 1, 2 * row + 2, 0] for row in range(6)]
    torch.testing.assert_close(loss_of(VALUES, keys), loss_of(VALUES[:, :2]))


def test_cosent_compares_every_two_pairs_of_different_scores() -> None:
    pairs = VALUES[:, :2]
    cosines = torch.nn.functional.cosine_similarity(pairs[:, 0], pairs[:, 1], dim=-1)
    gaps = [cosines[i] - cosines[j] for i in range(6) for j in range(6) if SCORES[i] < SCORES[j]]
    torch.testing.assert_close(cosent(pairs, SCORES, 0.5, (8,)), (1 + (torch.stack(gaps) / 0.5).exp().sum()).log())
    assert cosent(pairs, torch.ones(6), 0.5, (8,)) == 0, "equal scores have no order"


class Fixed(nn.Module):
    """A model of sentence-transformers whose vectors are given."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self) -> int:
        return 8


@pytest.mark.parametrize(("case", "texts"), [("plain", 2), ("plain", 3), ("matryoshka", 3), ("symmetric", 2), ("cosent", 2)])
def test_sentence_transformers_has_the_same_loss_and_gradient(case: str, texts: int) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    ours, other = (VALUES[:, :texts].clone().requires_grad_() for _ in range(2))
    model, settings = Fixed(), {}
    if case == "symmetric":
        settings = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    reference = losses.MultipleNegativesRankingLoss(model, scale=20.0, **settings)
    loss = loss_of(ours, symmetric=case == "symmetric", sizes=(8, 4, 2) if case == "matryoshka" else (8,)) / 6
    if case == "matryoshka":
        reference = losses.MatryoshkaLoss(model, reference, [8, 4, 2])
    elif case == "cosent":
        reference, loss = losses.CoSENTLoss(model, scale=20.0), cosent(ours, SCORES, 0.05, (8,))
    theirs = reference([{"vectors": column} for column in other.unbind(1)], SCORES)
    torch.testing.assert_close(loss, theirs, atol=1e-4, rtol=1e-5)
    loss.backward()
    theirs.backward()
    torch.testing.assert_close(ours.grad, other.grad, atol=1e-5, rtol=1e-4)
