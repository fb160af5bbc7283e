"""The heads against the same computed position by position."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from discern.tasks.answer_heads import JointHead, SpanHead
from discern.tasks.features import TaskRows
from tests.support import make_batch

# [CLS] question [SEP] window [SEP]
BATCH = replace(
    make_batch([[2, 5, 5, 3, 6, 6, 6, 3], [2, 5, 3, 6, 6, 3]]),
    token_type_ids=torch.tensor([[0] * 4 + [1] * 4, [0] * 3 + [1] * 3 + [0] * 2]),
)
ALLOWED = [[0, 4, 5, 6, 7], [0, 3, 4, 5]]
TARGETS = {"start": torch.tensor([4, 0]), "end": torch.tensor([6, 0]), "impossible": torch.tensor([0.0, 1.0])}
WIDTH = 6
HIDDEN = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))


def task_rows(targets: dict[str, torch.Tensor]) -> TaskRows:
    return TaskRows("task", torch.arange(2), torch.arange(2), targets)


def joint_head(beam: int = 20, weight: float | None = 0.5) -> JointHead:
    torch.manual_seed(0)
    return JointHead(WIDTH, beam, weight).eval()


def start_scores(head: JointHead, row: int) -> torch.Tensor:
    """Log-probability of a start at each allowed position of a row."""
    return head.start(HIDDEN[row, ALLOWED[row]])[:, 0].log_softmax(0)


def end_scores(head: JointHead, row: int, start: int) -> torch.Tensor:
    pairs = torch.stack([torch.cat([HIDDEN[row, start], HIDDEN[row, position]]) for position in ALLOWED[row]])
    return head.end(F.gelu(head.end_inner(pairs)))[:, 0].log_softmax(0)


def test_joint_loss_by_hand() -> None:
    head, expected, nulls = joint_head(), torch.zeros(()), []
    for row, positions in enumerate(ALLOWED):
        start, end, impossible = (int(TARGETS[name][row]) for name in ("start", "end", "impossible"))
        starts, ends = start_scores(head, row), end_scores(head, row, start)
        mean = starts.exp() @ HIDDEN[row, positions]
        nulls.append(head.answerable(F.gelu(head.answerable_inner(torch.cat([HIDDEN[row, 0], mean]))))[0])
        expected = expected - (starts[positions.index(start)] + ends[positions.index(end)]) / 2
        expected = expected - 0.5 * F.logsigmoid(nulls[row] if impossible else -nulls[row])
    loss, outputs = head(HIDDEN, BATCH, task_rows(TARGETS))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(outputs["null"], torch.stack(nulls))
    assert "null" not in joint_head(weight=None)(HIDDEN, BATCH, task_rows(TARGETS))[1]
    loss.backward()
    for name, parameter in head.named_parameters():
        # A bias that shifts the scores of all positions alike has the gradient zero, but for rounding.
        assert parameter.grad is not None
        assert parameter.grad.any() or name in ("start.bias", "end.bias"), name


def check_best(outputs: dict[str, torch.Tensor], name: str, index: tuple[int, ...], scores: torch.Tensor, count: int) -> None:
    """Check that the first `count` outputs are the best positions with their scores."""
    best = scores.topk(count)
    assert outputs[f"{name}s"][index][:count].tolist() == [ALLOWED[index[0]][number] for number in best.indices]
    torch.testing.assert_close(outputs[f"{name}_scores"][index][:count], best.values)


@torch.no_grad()
def test_joint_search_gives_the_probabilities_of_pairs() -> None:
    head = joint_head()
    loss, outputs = head(HIDDEN, BATCH, task_rows({}))
    assert loss is None
    for row, positions in enumerate(ALLOWED):
        check_best(outputs, "start", (row,), start_scores(head, row), len(positions))
        for number, start in enumerate(outputs["starts"][row, : len(positions)].tolist()):
            check_best(outputs, "end", (row, number), end_scores(head, row, start), len(positions))
    few = joint_head(beam=3)(HIDDEN, BATCH, task_rows({}))[1]
    torch.testing.assert_close(few["end_scores"], outputs["end_scores"][:, :3, :3])


@torch.no_grad()
def test_span_head_by_hand() -> None:
    torch.manual_seed(1)
    head, expected = SpanHead(WIDTH, 4).eval(), 0.0
    loss, outputs = head(HIDDEN, BATCH, task_rows(TARGETS))
    for row, positions in enumerate(ALLOWED):
        for name, logits in zip(("start", "end"), head.output(HIDDEN[row, positions]).unbind(-1), strict=True):
            expected -= float(logits.log_softmax(0)[positions.index(int(TARGETS[name][row]))]) / 2
            check_best(outputs, name, (row,), logits, 4)
        torch.testing.assert_close(outputs["null"][row], head.output(HIDDEN[row, 0]).sum())
    assert float(loss) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("head", [JointHead(WIDTH, 3, 0.5), SpanHead(WIDTH, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_without_rows_of_the_task(head: JointHead | SpanHead, training: bool) -> None:
    rows = task_rows(TARGETS).between(0, 0)
    loss, outputs = head.train(training)(HIDDEN[:0], BATCH.rows(0, 0), rows)
    assert loss == 0
    assert bool(outputs) is not training


def test_in_half_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss, outputs = joint_head()(HIDDEN.bfloat16(), BATCH, task_rows(TARGETS))
    assert loss.dtype == outputs["end_scores"].dtype == torch.float32
    assert torch.isfinite(loss)
