"""The head that compares two texts: its state by hand, rows beside one another, and when it is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from discern.models.base import build_encoder
from discern.models.heads import PairStates
from discern.models.layers import Embeddings
from discern.tasks.base import Labels
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.features import TaskRows
from discern.tasks.supervised import SupervisedObjective
from tests.parity.small_networks import make_noisy, token_batch
from tests.parity.small_xlnet import sizes
from tests.support import settings

WIDTH = 4


def task(pairs: bool = True, **settings: Any) -> Classification:
    return Classification("t", ClassificationConfig(**settings), ("accuracy",), Labels(("a", "b"), pairs=pairs))


def pair_states() -> PairStates:
    states = PairStates(WIDTH, WIDTH, 0.0)
    with torch.no_grad():
        make_noisy(states)
    return states


def by_hand(states: PairStates, texts: list[torch.Tensor], ids: list[list[int]]) -> torch.Tensor:
    """The state of one row, token by token. The first text begins with [CLS]."""
    aligned = []
    for side in range(2):
        known, importance = [], []
        for token, identity in zip(texts[side], ids[side], strict=True):
            cosines = torch.stack([token @ each / (token.norm() * each.norm()) for each in texts[1 - side]])
            weights = torch.softmax(cosines * states.sharpness.exp(), 0)
            gap = (token - weights @ texts[1 - side]).abs()
            known.append(torch.cat([gap, cosines.max().reshape(1), torch.tensor([float(identity in ids[1 - side])])]))
            importance.append(token @ states.importance)
        aligned.append(torch.softmax(torch.stack(importance), 0) @ torch.stack(known))
    one, two = (text.mean(0) for text in texts)
    everything = torch.cat([texts[0][0], one, two, (one - two).abs(), one * two, *aligned])
    return states.norm(F.gelu(everything @ states.dense.weight.T + states.dense.bias))


@torch.no_grad()
def test_the_state_by_hand() -> None:
    states = pair_states()
    batch = token_batch([7, 5], second=[4, 2])
    batch.input_ids[0, 5] = batch.input_ids[0, 2]
    # What padding holds must not matter.
    hidden = torch.randn(2, 7, WIDTH).masked_fill(~batch.attention_mask[..., None], float("nan"))
    expected = []
    for row, (middle, end) in enumerate([(4, 7), (2, 5)]):
        ids = batch.input_ids[row].tolist()
        expected.append(by_hand(states, [hidden[row, :middle], hidden[row, middle:end]], [ids[:middle], ids[middle:end]]))
    torch.testing.assert_close(states(hidden, batch), torch.stack(expected))


def test_a_text_alone_is_compared_to_zeros() -> None:
    hidden = torch.randn(1, 5, WIDTH, requires_grad=True)
    states = pair_states()
    state = states(hidden, token_batch([5]))
    text, nothing = hidden[0], torch.zeros(WIDTH)
    known = torch.softmax(text @ states.importance, 0) @ torch.cat([text.abs(), torch.tensor([[-1.0, 0.0]] * 5)], 1)
    everything = torch.cat([text[0], text.mean(0), nothing, text.mean(0).abs(), nothing, known, torch.zeros(WIDTH + 2)])
    torch.testing.assert_close(state[0], states.norm(F.gelu(everything @ states.dense.weight.T + states.dense.bias)))
    state.square().sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize(
    ("pooling", "pairs", "width", "layers", "expected"),
    [
        ("auto", True, 192, 12, "pair"),
        ("auto", True, 256, 11, "pair"),
        ("auto", True, 256, 12, "cls"),
        ("auto", True, 768, 6, "cls"),
        ("auto", False, 192, 12, "cls"),
        ("cls", True, 192, 12, "cls"),
        ("pair", True, 256, 12, "pair"),
    ],
)
def test_pairs_and_small_networks_choose_it(pooling: str, pairs: bool, width: int, layers: int, expected: str) -> None:
    made = task(pairs, pooling=pooling)
    assert made.head(sizes(hidden_size=width, num_layers=layers, num_heads=8), 0.1).pooling == expected


def test_words_are_read_beside_states() -> None:
    config = settings().model
    encoder = build_encoder(Embeddings(100, config.embedding_size + 2, config), config)
    objective = SupervisedObjective(encoder, {"t": task(pooling="pair")})
    ids, hidden = torch.arange(14).view(2, 7), torch.randn(2, 7, config.hidden_size)
    table = encoder.embeddings.word.weight[ids]
    words = (table - table.mean(-1, keepdim=True)) / (table.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    inputs = objective.heads["t"].inputs(hidden, encoder, ids)
    torch.testing.assert_close(inputs, torch.cat([hidden, words], -1))
    assert objective.heads["t"].pair.importance.shape == inputs.shape[-1:]


def test_the_loss_reaches_every_part_of_the_head() -> None:
    head = task(pooling="pair", compare_words=False).head(sizes(hidden_size=WIDTH, num_heads=1), 0.0)
    with torch.no_grad():
        make_noisy(head)
    batch = token_batch([7, 5], second=[4, 2])
    rows = TaskRows("t", torch.arange(2), torch.arange(2), {"class": torch.tensor([0, 1])})
    loss, _ = head(torch.randn(2, 7, WIDTH), batch, rows)
    assert loss is not None
    loss.backward()
    assert [name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()] == []
