"""The heads against the same computed position by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from discern.tasks.answer_heads import JointHead, SpanHead, allowed_positions
from tests.tasks.question_support import question_batch, task_rows

BATCH = question_batch([2, 1, 3], [5, 6, 2])
ALLOWED = [[0, 4, 5, 6, 7, 8, 9], [0, 3, 4, 5, 6, 7, 8, 9], [0, 5, 6, 7]]
START, END = torch.tensor([4, 0, 5]), torch.tensor([6, 0, 5])
WIDTH = 6


def joint_head(beam: int = 20, weight: float | None = 0.5) -> tuple[JointHead, torch.Tensor]:
    torch.manual_seed(0)
    return JointHead(WIDTH, beam, weight).eval(), torch.randn(3, BATCH.input_ids.shape[1], WIDTH)


def pair_logit(head: JointHead, start: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return head.end(F.gelu(head.end_inner(torch.cat([start, token]))))[0]


def log_probabilities(logits: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    total = torch.stack(list(logits.values())).logsumexp(0)
    return {place: logit - total for place, logit in logits.items()}


def test_allowed_positions() -> None:
    allowed = allowed_positions(BATCH.attention_mask, BATCH.token_type_ids)
    assert [row.nonzero().flatten().tolist() for row in allowed] == ALLOWED


def test_joint_loss_by_hand() -> None:
    head, hidden = joint_head()
    impossible = torch.tensor([0.0, 1.0, 0.0])
    expected = torch.zeros(())
    nulls = []
    for row, places in enumerate(ALLOWED):
        starts = log_probabilities({place: head.start(hidden[row, place])[0] for place in places})
        ends = log_probabilities({place: pair_logit(head, hidden[row, START[row]], hidden[row, place]) for place in places})
        expected = expected - (starts[int(START[row])] + ends[int(END[row])]) / 2
        mean = sum(starts[place].exp() * hidden[row, place] for place in places)
        null = head.answerable(F.gelu(head.answerable_inner(torch.cat([hidden[row, 0], mean]))))[0]
        nulls.append(null)
        expected = expected - 0.5 * F.logsigmoid(null if impossible[row] else -null)
    loss, said = head(hidden, BATCH, task_rows(3, start=START, end=END, impossible=impossible))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(said["null"], torch.stack(nulls))
    loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        # A bias that shifts the scores of all positions alike has the gradient zero, but for rounding.
        assert parameter.grad.any() or name in ("start.bias", "end.bias"), name


@torch.no_grad()
def test_joint_search_gives_the_probabilities_of_pairs() -> None:
    head, hidden = joint_head(beam=20)
    loss, said = head(hidden, BATCH, task_rows(3))
    assert loss is None
    for row, places in enumerate(ALLOWED):
        starts = log_probabilities({place: head.start(hidden[row, place])[0] for place in places})
        order = sorted(places, key=lambda place: -float(starts[place]))
        assert said["starts"][row, : len(places)].tolist() == order
        for number, start in enumerate(order):
            ends = log_probabilities({place: pair_logit(head, hidden[row, start], hidden[row, place]) for place in places})
            found = dict(zip(said["ends"][row, number].tolist(), said["end_scores"][row, number].tolist(), strict=True))
            for place in places:
                assert found[place] == pytest.approx(float(ends[place]), abs=1e-5)
            assert said["start_scores"][row, number] == pytest.approx(float(starts[start]), abs=1e-5)
    smaller = JointHead(WIDTH, 3, 0.5).eval()
    smaller.load_state_dict(head.state_dict())
    few = smaller(hidden, BATCH, task_rows(3))[1]
    assert few["ends"].shape == (3, 3, 3)
    torch.testing.assert_close(few["end_scores"], said["end_scores"][:, :3, :3])


def test_without_impossible_questions_nothing_says_that_there_is_no_answer() -> None:
    head, hidden = joint_head(weight=None)
    loss, said = head(hidden, BATCH, task_rows(3, start=START, end=END))
    assert loss is not None
    assert "null" not in said
    assert not any("answerable" in name for name, _ in head.named_parameters())


def test_span_head_by_hand() -> None:
    torch.manual_seed(1)
    head, hidden = SpanHead(WIDTH, 4).eval(), torch.randn(3, BATCH.input_ids.shape[1], WIDTH)
    loss, said = head(hidden, BATCH, task_rows(3, start=START, end=END))
    logits = head.output(hidden)
    expected = torch.zeros(())
    for row, places in enumerate(ALLOWED):
        for output, gold, name in ((0, START, "start"), (1, END, "end")):
            each = {place: logits[row, place, output] for place in places}
            expected = expected - log_probabilities(each)[int(gold[row])] / 2
            order = [places[place] for place in torch.stack(list(each.values())).argsort(descending=True)[:4]]
            assert said[f"{name}s"][row].tolist() == order
            torch.testing.assert_close(said[f"{name}_scores"][row], torch.stack([each[place] for place in order]).detach())
        torch.testing.assert_close(said["null"][row], logits[row, 0].sum().detach())
    torch.testing.assert_close(loss, expected)


def test_span_head_is_that_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.ElectraConfig(
        vocab_size=20, embedding_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    theirs = transformers.ElectraForQuestionAnswering(config).eval()
    ours = SpanHead(8, BATCH.input_ids.shape[1]).eval()
    ours.output.load_state_dict(theirs.qa_outputs.state_dict())
    with torch.no_grad():
        output = theirs(BATCH.input_ids, BATCH.attention_mask, BATCH.token_type_ids, output_hidden_states=True)
        said = ours(output.hidden_states[-1], BATCH, task_rows(3))[1]
    for row, places in enumerate(ALLOWED):
        for name, logits in (("start", output.start_logits), ("end", output.end_logits)):
            found = dict(zip(said[f"{name}s"][row].tolist(), said[f"{name}_scores"][row].tolist(), strict=True))
            np.testing.assert_allclose([found[place] for place in places], logits[row, places].numpy(), atol=1e-6)


@pytest.mark.parametrize("head", [JointHead(WIDTH, 3, 0.5), SpanHead(WIDTH, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_no_rows_at_all(head: JointHead | SpanHead, training: bool) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    head.train(training)
    loss, said = head(
        torch.zeros(0, BATCH.input_ids.shape[1], WIDTH),
        BATCH.rows(0, 0),
        task_rows(0, start=nothing, end=nothing, impossible=nothing.float()),
    )
    assert loss is not None
    assert loss.item() == 0
    assert bool(said) is not training


def test_in_half_precision() -> None:
    head, hidden = joint_head()
    with torch.autocast("cpu", torch.bfloat16):
        loss, said = head(hidden.bfloat16(), BATCH, task_rows(3, start=START, end=END, impossible=torch.zeros(3)))
    assert loss.dtype == said["end_scores"].dtype == torch.float32
    assert torch.isfinite(loss)
