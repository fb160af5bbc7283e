"""Two heads that predict start and end of an answer from the hidden state of every token.

Both return for each row `starts`, `start_scores`, `ends` and `end_scores`: the likeliest positions with their scores, with ends
for each start (R, K, K) or for all starts (R, K). The score of a span is the sum of both. `null` is the score for no answer.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.models.fused_ops import Dropout
from discern.models.heads import PredictionLayers
from discern.tasks.base import TaskHead
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

    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        allowed = allowed_positions(tokens.attention_mask, tokens.token_type_ids)
        start_logits = _masked(self.start(hidden).squeeze(-1), allowed)
        # The layer of a pair is the sum of a layer of each, so only that sum is computed for all pairs of positions.
        width = hidden.shape[-1]
        of_tokens = F.linear(hidden, self.end_inner.weight[:, width:], self.end_inner.bias)
        of_starts = F.linear(hidden, self.end_inner.weight[:, :width])
        null = None if self.answerable_weight is None else self._impossible_logits(hidden, start_logits)
        loss = None
        if "start" in rows.targets:
            start, end = rows.targets["start"], rows.targets["end"]
            end_logits = _masked(self._end_logits(_at(of_starts, start), of_tokens), allowed)
            loss = 0.5 * (
                F.cross_entropy(start_logits, start, reduction="sum") + F.cross_entropy(end_logits, end, reduction="sum")
            )
            if null is not None and self.answerable_weight is not None:
                impossible = rows.targets["impossible"]
                loss = loss + self.answerable_weight * F.binary_cross_entropy_with_logits(null, impossible, reduction="sum")
        if self.training:
            return loss, {}
        found = self._search(start_logits.detach(), of_starts.detach(), of_tokens.detach(), allowed)
        return loss, found if null is None else {**found, "null": null.detach()}

    def _end_logits(self, start: Float[Tensor, "R F"], of_tokens: Float[Tensor, "R L F"]) -> Float[Tensor, "R L"]:
        return self.end(F.gelu(start[:, None] + of_tokens)).squeeze(-1)  # type: ignore[no-any-return]

    def _impossible_logits(self, hidden: Float[Tensor, "R L D"], start_logits: Float[Tensor, "R L"]) -> Float[Tensor, "R"]:
        """Logits, positive for no answer in the window, from [CLS] and the expected state of the start."""
        where = start_logits.softmax(-1).to(hidden.dtype)
        begin = (where[:, None] @ hidden)[:, 0]
        both = torch.cat([hidden[:, 0], begin.to(hidden.dtype)], -1)
        return self.answerable(F.gelu(self.answerable_inner(both))).squeeze(-1).float()  # type: ignore[no-any-return]

    def _search(
        self,
        start_logits: Float[Tensor, "R L"],
        of_starts: Float[Tensor, "R L F"],
        of_tokens: Float[Tensor, "R L F"],
        allowed: Bool[Tensor, "R L"],
    ) -> dict[str, Tensor]:
        """The likeliest starts, and the likeliest ends of each, with their log-probabilities."""
        beam = min(self.beam_size, start_logits.shape[1])
        start_scores, starts = start_logits.log_softmax(-1).topk(beam)
        end_scores, ends = [], []
        # One start of all rows at a time: (R, L, F) values in memory instead of (R, K, L, F).
        for start in starts.unbind(1):
            logits = _masked(self._end_logits(_at(of_starts, start), of_tokens), allowed)
            scores, places = logits.log_softmax(-1).topk(beam)
            end_scores.append(scores.detach())
            ends.append(places)
        return {
            "starts": starts,
            "start_scores": start_scores,
            "ends": torch.stack(ends, 1),
            "end_scores": torch.stack(end_scores, 1),
        }


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

    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        allowed = allowed_positions(tokens.attention_mask, tokens.token_type_ids)
        states = hidden if self.inner is None else self.inner(hidden)
        start_logits, end_logits = (_masked(logits, allowed) for logits in self.output(self.dropout(states)).unbind(-1))
        loss = None
        if "start" in rows.targets:
            loss = 0.5 * (
                F.cross_entropy(start_logits, rows.targets["start"], reduction="sum")
                + F.cross_entropy(end_logits, rows.targets["end"], reduction="sum")
            )
        return loss, {} if self.training else self.search(start_logits.detach(), end_logits.detach(), allowed)

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
    logits = logits.float()  # many positions share one softmax
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)


def _at(states: Float[Tensor, "R L F"], positions: Int[Tensor, "R"]) -> Float[Tensor, "R F"]:
    """The state at one position of each row."""
    return states[torch.arange(len(positions), device=positions.device), positions]
