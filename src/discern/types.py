"""The values that are passed between the rooms: batches, loss terms, special tokens. All are frozen.

Dimensions: B sequences, L positions, V vocabulary, M masked positions in the batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that frame a sequence, in the vocabulary of one tokenizer.

    Attributes:
        eod: end of document, if the tokenizer has such a token.
    """

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    eod: int | None = None


@dataclass(frozen=True)
class Spans:
    """Where the real tokens of a batch are, for attention without padding. Found on the host, before the batch is copied.

    Attributes:
        offsets: (S + 1,) start of each span of tokens that see each other, among the T real tokens of all rows, and T; int32.
        places: (T,) index of each real token among the B * L positions; None: all positions are real.
        longest: at least the number of tokens of the longest span.
    """

    offsets: Int[Tensor, "spans_and_1"]
    places: Int[Tensor, "T"] | None
    longest: int


@dataclass(frozen=True)
class TokenBatch:
    """Sequences as they come from the data set, uncorrupted.

    Attributes:
        input_ids: (B, L) token ids; padding holds the pad id.
        attention_mask: (B, L) True = real token.
        special_tokens_mask: (B, L) True = never corrupt ([CLS], [SEP], padding).
        token_type_ids: (B, L) segment of each token, 0 or 1; in rows of two parts [CLS] has a third, 2.
        position_ids: (B, L) position of each token within its document piece.
        document_ids: (B, L) which piece of the row a token belongs to (pieces follow one another, attention stays inside), or
            None when a row is one piece.
        word_starts: (B, L) True where a word begins; None if the data set does not record it.
        example_index: (B,) index of each row in the stream of examples, counted over the whole run.
        slot: (B,) place of each row in the global batch: with memory, row after row of a slot continue each other.
        full: whether it is known that no row has padding.
        is_reversed: (B,) True = the text of the row runs backwards; None: no row is reversed.
        continues: (B,) True = the row's second segment follows the first in the text; None if unknown.
        reuse_length: positions at the beginning of each row that the next row of its slot continues from, and that do not
            attend to the positions after them; 0 if rows have no such part.
        spans: where the real tokens are, for encoders that attend without padding on this device; None: they do not.
    """

    input_ids: Int[Tensor, "B L"]
    attention_mask: Bool[Tensor, "B L"]
    special_tokens_mask: Bool[Tensor, "B L"]
    token_type_ids: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]
    document_ids: Int[Tensor, "B L"] | None
    word_starts: Bool[Tensor, "B L"] | None
    example_index: Int[Tensor, "B"]
    slot: Int[Tensor, "B"]
    full: bool = False
    is_reversed: Bool[Tensor, "B"] | None = None
    continues: Bool[Tensor, "B"] | None = None
    reuse_length: int = 0
    spans: Spans | None = None

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def rows(self, start: int, stop: int) -> TokenBatch:
        """Rows `start` to `stop`, as a micro-batch, without the spans, which belong to the whole."""
        return map_tensors(replace(self, spans=None), lambda tensor: tensor[start:stop])

    @property
    def visible_mask(self) -> Bool[Tensor, "B L"] | None:
        """The attention mask, or None if it would not hide anything: full rows of one piece need no mask."""
        return None if self.full and self.document_ids is None else self.attention_mask

    @property
    def context(self) -> tuple[Any, ...]:
        """The arguments of an encoder besides the ids: mask, segments, positions and documents; then the spans, if any."""
        found = self.visible_mask, self.token_type_ids, self.position_ids, self.document_ids
        return found if self.spans is None else (*found, self.spans)

    @property
    def size(self) -> int:
        """Sequences in the batch."""
        return self.input_ids.shape[0]


@dataclass(frozen=True)
class CorruptedBatch:
    """A batch with the positions chosen for corruption; the objective decides how to corrupt them.

    Attributes:
        tokens: the batch as it was.
        masked_ids: (B, L) input of the generator: at the chosen positions `[MASK]`, a random token or the original.
        masked_positions: (B, L) True where a position was chosen.
        num_masked: number of chosen positions in the batch; counted before the batch moves to a device.
        num_tokens: number of real tokens in the batch.
        draws: (B, L) how often each position was drawn, if the masking draws with replacement; None: once each.
        num_draws: the sum of `draws`; None if `draws` is None.
    """

    tokens: TokenBatch
    masked_ids: Int[Tensor, "B L"]
    masked_positions: Bool[Tensor, "B L"]
    num_masked: int
    num_tokens: int
    draws: Int[Tensor, "B L"] | None = None
    num_draws: int | None = None

    @property
    def num_targets(self) -> int:
        """Number of items in the generator's loss: the chosen positions, where one drawn twice counts twice."""
        return self.num_masked if self.num_draws is None else self.num_draws

    @property
    def target_draws(self) -> Int[Tensor, "M"] | None:
        """How often each chosen position was drawn, row by row; None: once each."""
        return None if self.draws is None else self.draws[self.masked_positions]

    def to(self, device: torch.device) -> CorruptedBatch:
        """The same batch on another device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, tokens=self.tokens.to(device))


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss, as a sum and a count: a mean taken too early is wrong under accumulation and padding.

    Attributes:
        total: scalar, summed over the `count` items, in nats.
        count: number of items in the sum.
        weight: factor of this term's mean in the objective.
    """

    total: Float[Tensor, ""]
    count: int
    weight: float = 1.0


@dataclass(frozen=True)
class StepOutput:
    """The result of one forward pass of an objective.

    Attributes:
        terms: the loss by name; the names are those of `Objective.counts`.
        observations: tensors for evaluation and diagnosis, detached, by name (logits, labels, masks).
        metrics: means to write to the metrics log under their own names; they are not part of the loss.
    """

    terms: Mapping[str, LossTerm]
    observations: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, LossTerm] = field(default_factory=dict)


def map_tensors(batch: BatchT, change: Callable[[Tensor], Tensor]) -> BatchT:
    """A copy of a frozen batch with `change` applied to each tensor field, and to those of the spans."""
    changed: dict[str, Any] = {}
    for item in fields(batch):  # type: ignore[arg-type]
        value = getattr(batch, item.name)
        if isinstance(value, Tensor):
            changed[item.name] = change(value)
        elif isinstance(value, Spans):
            changed[item.name] = map_tensors(value, change)
    return replace(batch, **changed)  # type: ignore[type-var]
