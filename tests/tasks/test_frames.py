"""Frames: what an encoder is given of a task's rows, and that heads get states back in the rows' order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

from discern.models.base import Encoder
from discern.tasks.base import Labels
from discern.tasks.classification import Classification, ClassificationConfig, ClassificationHead
from discern.tasks.features import TaskRows
from discern.tasks.frames import FRAMES, cls_last_places
from tests.parity.small_networks import make_noisy, token_batch
from tests.parity.small_xlnet import build_network, sizes


def test_places_by_hand() -> None:
    """[CLS] a b [SEP] - - becomes - - a b [SEP] [CLS]."""
    real = torch.tensor([[True] * 4 + [False] * 2, [True] * 6, [True] + [False] * 5])
    assert cls_last_places(real).tolist() == [[5, 2, 3, 4, 0, 1], [5, 0, 1, 2, 3, 4], [5, 0, 1, 2, 3, 4]]


class Recorder(Encoder):
    """Gives what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[list[int]]] = []

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, document_ids=None):  # type: ignore[no-untyped-def]
        self.given = [values.tolist() for values in (input_ids, attention_mask.long(), token_type_ids)]
        return input_ids[..., None].float()

    def forward_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        return 0.0


def test_cls_last_gives_rows_as_xlnet_has_them() -> None:
    batch = token_batch([4, 6], second=[6, 4])
    seen = Recorder()
    states = FRAMES["cls-last"].states(seen, batch)
    (a, b), (_, w) = batch.input_ids[0, 1:3].tolist(), batch.input_ids[1, 3:5].tolist()
    x, y, z = batch.input_ids[1, 1:4].tolist()
    assert seen.given[0] == [[0, 0, a, b, 3, 2], [x, y, z, w, 3, 2]]
    assert seen.given[1] == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert seen.given[2] == [[3, 3, 0, 0, 0, 2], [0, 0, 0, 1, 1, 2]]
    assert torch.equal(states[..., 0].long(), batch.input_ids)


def test_cls_first_gives_rows_as_they_are() -> None:
    batch = token_batch([4, 6])
    seen = Recorder()
    assert torch.equal(FRAMES["cls-first"].states(seen, batch)[..., 0].long(), batch.input_ids)
    assert seen.given[0] == batch.input_ids.tolist()


@torch.no_grad()
def test_padding_changes_no_state() -> None:
    encoder = build_network(sizes()).encoder
    long = FRAMES["cls-last"].states(encoder, token_batch([9, 5], width=14))
    short = FRAMES["cls-last"].states(encoder, token_batch([9, 5], width=14).rows(1, 2))
    torch.testing.assert_close(long[1:, :5], short[:, :5], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("activation", "function"), [("tanh", torch.tanh), ("gelu", torch.nn.functional.gelu)])
def test_the_summary_by_hand(activation: Literal["tanh", "gelu"], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    head = ClassificationHead(4, 0.0, Labels(("a", "b")), activation=activation)
    with torch.no_grad():
        make_noisy(head)
    hidden = torch.randn(3, 5, 4)
    rows = TaskRows("t", torch.arange(3), torch.arange(3), {})
    assert head.summary is not None
    state = function(hidden[:, 0] @ head.summary.weight.T + head.summary.bias)
    _, said = head(hidden, token_batch([5, 5, 5]), rows)
    torch.testing.assert_close(said["logits"], state @ head.output.weight.T + head.output.bias)


def test_the_mean_by_hand() -> None:
    head = ClassificationHead(4, 0.0, Labels(("a", "b")), pooling="mean")
    batch = token_batch([5, 2])
    hidden = torch.randn(2, 5, 4).masked_fill(~batch.attention_mask[..., None], float("nan"))
    states = torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])
    _, said = head(hidden, batch, TaskRows("t", torch.arange(2), torch.arange(2), {}))
    torch.testing.assert_close(said["logits"], (states @ head.output.weight.T + head.output.bias).detach())


def test_the_setting_decides_the_head() -> None:
    for name, activation in (("linear", None), ("summary", "tanh"), ("dense", "gelu")):
        task = Classification("t", ClassificationConfig(head=name), ("accuracy",), Labels(("a", "b")))
        head = task.head(sizes(hidden_size=8), 0.1)
        assert (head.summary is not None) == (activation is not None)
        assert head.activation == activation
