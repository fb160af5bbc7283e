"""Two heads that predict start and end of an answer from the hidden state of every token.

Both return for each row `starts`, `start_scores`, `ends` and `end_scores`: the likeliest positions with their scores, with ends
for each start (R, K, K) or for all starts (R, K). The score of a span is the sum of both. `null` is the score for no answer.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.models.heads import PredictionLayers
from discern.models.layers import Dropout
from discern.tasks.base import LossAndOutputs, TaskHead
from discern.tasks.features import TaskRows
from discern.types import TokenBatch

# Width of the hidden layers of the joint head for encoders of any width, as in the released code.
_INNER = 512


def allowed_positions(real: Bool[Tensor, "R L"], segments: Int[Tensor, "R L"]) -> Bool[Tensor, "R L"]:
    """Positions where an answer may start and end: in the window, at the [SEP] after it, and at [CLS] for no answer."""
    allowed = real & (segments == 1)
    allowed[:, 0] = True
    return allowed


class JointHead(TaskHead):
    """Predicts p(start) p(end | start), and with two more layers whether there is an answer.

    In training the end is predicted from the true start; otherwise from each of the likeliest starts.

    Args:
        beam_size: number of starts, and of ends per start, in the search.
        answerable_weight: weight of the loss of whether there is an answer; None: every question has an answer.

    Reference: google-research/electra, finetune/qa: no dropout; the loss is (start + end) / 2 + weight * answerable.
    """

    def __init__(self, hidden_size: int, beam_size: int, answerable_weight: float | None) -> None:
        super().__init__()
        self.beam_size = beam_size
        self.answerable_weight = answerable_weight
        self.start = nn.Linear(hidden_size, 1)
        # Input: the state of the start and the state of a token, in this order.
        self.end_inner = nn.Linear(2 * hidden_size, _INNER)
        self.end = nn.Linear(_INNER, 1)
        if answerable_weight is not None:
            self.answerable_inner = nn.Linear(2 * hidden_size, _INNER)
            self.answerable = nn.Linear(_INNER, 1)

    def forward(self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows) -> LossAndOutputs:
        allowed = allowed_positions(tokens.attention_mask, tokens.token_type_ids)
        start_logits = _masked(self.start(hidden).squeeze(-1), allowed)
        # The layer of a pair is the sum of a layer of each, so only that sum is computed for all pairs of positions.
        of_start, of_token = self.end_inner.weight.chunk(2, 1)
        start_states, token_states = F.linear(hidden, of_start), F.linear(hidden, of_token, self.end_inner.bias)

        def end_logits(start: Int[Tensor, "R"]) -> Float[Tensor, "R L"]:
            states = F.gelu(start_states.take_along_dim(start[:, None, None], 1) + token_states)
            return _masked(self.end(states).squeeze(-1), allowed)

        loss = _span_loss(start_logits, end_logits(rows.targets["start"]), rows) if "start" in rows.targets else None
        outputs = {}
        if self.answerable_weight is not None:
            # No answer in the window, if positive: from [CLS] and the expected state of the start.
            expected = (start_logits.softmax(-1).to(hidden.dtype)[:, None] @ hidden)[:, 0]
            inner = self.answerable_inner(torch.cat([hidden[:, 0], expected], -1))
            null = self.answerable(F.gelu(inner)).squeeze(-1).float()
            outputs["null"] = null
            if loss is not None:
                impossible = rows.targets["impossible"]
                loss = loss + self.answerable_weight * F.binary_cross_entropy_with_logits(null, impossible, reduction="sum")
        if self.training:
            return loss, {}

        # The likeliest starts, and the likeliest ends of each, with their log-probabilities. One start of all rows at a time:
        # (R, L, F) values in memory instead of (R, K, L, F).
        with torch.no_grad():
            beam = min(self.beam_size, start_logits.shape[1])
            outputs["start_scores"], outputs["starts"] = start_logits.log_softmax(-1).topk(beam)
            best = [end_logits(start).log_softmax(-1).topk(beam) for start in outputs["starts"].unbind(1)]
            outputs["end_scores"], outputs["ends"] = (torch.stack(tensors, 1) for tensors in zip(*best, strict=True))
        return loss, outputs


class SpanHead(TaskHead):
    """Predicts start and end independently with one linear layer; [CLS] as both means no answer. Scores are logits.

    Args:
        candidates: number of starts, and of ends, in the search.
        inner: ModernBERT's layers before the last one; None: there are none.
        dropout: dropout before the last layer.

    Reference: Devlin et al. 2019, section 4.2; `ElectraForQuestionAnswering` of Hugging Face has the same layer, and
        `ModernBertForQuestionAnswering` those before it.
    """

    def __init__(self, hidden_size: int, candidates: int, inner: PredictionLayers | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.candidates = candidates
        self.inner = inner
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, 2)

    def forward(self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows) -> LossAndOutputs:
        allowed = allowed_positions(tokens.attention_mask, tokens.token_type_ids)
        states = hidden if self.inner is None else self.inner(hidden)
        start_logits, end_logits = (_masked(logits, allowed) for logits in self.output(self.dropout(states)).unbind(-1))
        loss = _span_loss(start_logits, end_logits, rows) if "start" in rows.targets else None
        return loss, {} if self.training else self.search(start_logits, end_logits, allowed)

    @torch.no_grad()
    def search(
        self, start_logits: Float[Tensor, "R L"], end_logits: Float[Tensor, "R L"], allowed: Bool[Tensor, "R L"]
    ) -> dict[str, Tensor]:
        """The likeliest starts and ends at the allowed positions, with their logits, and the logit of no answer."""
        start_logits, end_logits = _masked(start_logits, allowed), _masked(end_logits, allowed)
        number = min(self.candidates, start_logits.shape[1])
        start_scores, starts = start_logits.topk(number)
        end_scores, ends = end_logits.topk(number)
        null = start_logits[:, 0] + end_logits[:, 0]
        return {"starts": starts, "start_scores": start_scores, "ends": ends, "end_scores": end_scores, "null": null}


def _masked(logits: Float[Tensor, "R L"], allowed: Bool[Tensor, "R L"]) -> Float[Tensor, "R L"]:
    """The logits with the smallest finite number at positions where no answer may be."""
    # float32, since many positions share one softmax.
    return logits.float().masked_fill(~allowed, torch.finfo(torch.float32).min)


def _span_loss(start_logits: Float[Tensor, "R L"], end_logits: Float[Tensor, "R L"], rows: TaskRows) -> Tensor:
    start_loss = F.cross_entropy(start_logits, rows.targets["start"], reduction="sum")
    return 0.5 * (start_loss + F.cross_entropy(end_logits, rows.targets["end"], reduction="sum"))
