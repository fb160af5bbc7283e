"""InfoNCE: by hand, and against the losses of sentence-transformers on the same vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern.tasks.contrastive_loss import ABSENT, Vectors, info_nce, text_key


def batch(values: Tensor, keys: list[list[int]] | None = None) -> Vectors:
    rows, texts = values.shape[:2]
    return Vectors(values, torch.tensor(keys) if keys else torch.arange(1, rows * texts + 1).view(rows, texts))


def loss_of(vectors: Vectors, **settings: Any) -> float:
    return float(info_nce(vectors, vectors, 0, **{"temperature": 0.05, **settings}))


@pytest.fixture
def values() -> Tensor:
    return torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(0))


def test_texts_that_are_all_the_same_are_told_apart_by_chance() -> None:
    assert loss_of(batch(torch.ones(4, 3, 5))) == pytest.approx(4 * math.log(8))
    assert loss_of(batch(torch.ones(4, 2, 5)), symmetric=True) == pytest.approx(4 * math.log(4))


def test_orthogonal_pairs_by_hand() -> None:
    # Each anchor has cosine 1 with its positive and 0 with the other one.
    found = loss_of(batch(torch.eye(2)[:, None].expand(2, 2, 2)), temperature=0.5)
    assert found == pytest.approx(2 * -math.log(math.exp(2) / (math.exp(2) + 1)))


def test_the_rows_of_two_halves_sum_to_the_whole(values: Tensor) -> None:
    whole = batch(values)
    parts = [Vectors(whole.values[a : a + 3], whole.keys[a : a + 3]) for a in (0, 3)]
    for settings in ({}, {"symmetric": True}, {"sizes": (4, 8)}):
        halves = sum(float(info_nce(part, whole, 3 * n, temperature=0.1, **settings)) for n, part in enumerate(parts))
        assert halves == pytest.approx(loss_of(whole, temperature=0.1, **settings), rel=1e-5)


def test_false_negatives_are_left_out(values: Tensor) -> None:
    pairs = values[:3, :2]
    # The positive of the first row is also that of the second, so neither is a negative of the other.
    shared = loss_of(batch(pairs, [[1, 2], [3, 2], [5, 6]]), temperature=1.0)
    cosines = torch.nn.functional.cosine_similarity(pairs[:, None, 0], pairs[None, :, 1], dim=-1)
    expected = 0.0
    for row, others in enumerate(([2], [2], [0, 1])):
        expected += float(cosines[row, [row, *others]].logsumexp(0) - cosines[row, row])
    assert shared == pytest.approx(expected, rel=1e-5)
    same_anchor = loss_of(batch(pairs, [[1, 2], [1, 4], [5, 6]]), temperature=1.0)
    assert same_anchor == pytest.approx(expected, rel=1e-5), "the positives of one anchor are no negatives of each other"
    assert loss_of(batch(pairs, [[1, 2], [3, 4], [5, 6]]), temperature=1.0) > expected


def test_an_anchor_that_is_its_positive_is_compared_with_the_others(values: Tensor) -> None:
    found = loss_of(batch(values[:2, :2], [[1, 1], [2, 2]]))
    assert found == pytest.approx(loss_of(batch(values[:2, :2])), rel=1e-6)
    assert loss_of(batch(values[:2, :2], [[1, 1], [1, 1]])) == pytest.approx(0.0, abs=1e-6), "one text twice has no negative"


def test_an_absent_negative_counts_nothing(values: Tensor) -> None:
    pairs = values[:, :2]
    padded = torch.cat([pairs, torch.zeros(6, 1, 8)], 1)
    keys = [[2 * row + 1, 2 * row + 2, ABSENT] for row in range(6)]
    assert loss_of(batch(padded, keys)) == pytest.approx(loss_of(batch(pairs)), rel=1e-6)


def test_keys_tell_texts_apart() -> None:
    assert text_key("a") == text_key("a") != text_key("b")
    assert text_key("") != ABSENT


class Fixed(nn.Module):
    """A model of sentence-transformers whose vectors are given."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self) -> int:
        return 8


@pytest.mark.parametrize("texts", [2, 3])
def test_sentence_transformers_has_the_same_loss_and_gradient(values: Tensor, texts: int) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    def theirs(loss: nn.Module, columns: Iterable[Tensor]) -> Tensor:
        found: Tensor = loss([{"vectors": column} for column in columns], None)
        return found

    model = Fixed()
    plain = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    cases = [(plain, {}), (losses.MatryoshkaLoss(model, plain, [8, 4, 2]), {"sizes": (8, 4, 2)})]
    if texts == 2:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        cases.append((losses.MultipleNegativesRankingLoss(model, scale=20.0, **both), {"symmetric": True}))
    for loss, settings in cases:
        ours, other = (values[:, :texts].clone().requires_grad_() for _ in range(2))
        mine = info_nce(batch(ours), batch(ours), 0, temperature=0.05, **settings) / 6
        reference = theirs(loss, other.unbind(1))
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-5)
        mine.backward()
        reference.backward()
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-5, rtol=1e-4)
