"""The values that are passed between the packages: batches, loss terms, special tokens. All are frozen.

Dimensions: B sequences, L positions, V vocabulary, M masked positions in the batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")
PlacesOf = Literal["chosen", "words", "real", "texts", "next", "predicted"]
"""The positions chosen for corruption, those that may be chosen, all real tokens, the first token of each text, the words of
causal rows that follow another token, or these and the positions chosen in other rows."""


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
        """The same batch on another device. What only the host reads stays where it is: `slot`."""
        return replace(map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True)), slot=self.slot)

    def rows(self, start: int, stop: int) -> TokenBatch:
        """Rows `start` to `stop`, as a micro-batch, without the spans, which belong to the whole."""
        return map_tensors(replace(self, spans=None), lambda tensor: tensor[start:stop])

    @property
    def maskable(self) -> Bool[Tensor, "B L"]:
        """True where a token may be corrupted: real tokens that are not special, [UNK] included."""
        return self.attention_mask & ~self.special_tokens_mask

    @property
    def text_starts(self) -> Bool[Tensor, "B L"]:
        """True at the first token of each text: of a row, or of each document piece in it."""
        return (self.position_ids == 0) & self.attention_mask

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
class Places:
    """Some positions of a batch as an index, row by row.

    An index has as many entries as there are positions, so finding them makes the host wait for a device. They are therefore
    found on the host, before the batch moves. For a device, each row can have equally many entries: shapes then hardly change
    from step to step, and entries that only fill up a row count zero times.

    Attributes:
        index: (N,) place of each entry among the B * L positions; for an entry that fills up a row, its first position.
        count: number of items, where a position drawn twice counts twice.
        draws: (N,) how often each entry counts; None: once each.
        drawn_again: indices of the entries that count at least twice, of those that count at least three times, ...
        even: whether all rows have equally many entries.
    """

    index: Int[Tensor, "N"]
    count: int
    draws: Int[Tensor, "N"] | None = None
    drawn_again: tuple[Tensor, ...] = ()
    even: bool = False

    @classmethod
    def of(cls, mask: Bool[Tensor, "B L"], draws: Int[Tensor, "B L"] | None = None, *, even: bool = False) -> Places:
        """The positions where a mask is True.

        Args:
            draws: how often each of them counts; None: once.
            even: give all rows the number of entries of the fullest one, and at least one.
        """
        index, counted = mask.flatten().nonzero().flatten(), None if draws is None else draws[mask]
        count = len(index) if counted is None else int(counted.sum())
        if even:
            index, counted = _filled_up(mask, index, counted)
        again = [] if draws is None else range(1, int(draws.max()) if draws.numel() else 0)
        assert counted is not None or not again
        drawn_again = tuple((counted > ordinal).nonzero().squeeze(1) for ordinal in again if counted is not None)
        return cls(index, count, counted, drawn_again, even)

    def gather(self, values: Shaped[Tensor, "B L ..."]) -> Shaped[Tensor, "N ..."]:
        """The values at these positions."""
        # By index rather than by mask: its backward pass is a copy of rows.
        return values.flatten(0, 1).index_select(0, self.index)

    def scatter(self, values: Shaped[Tensor, "B L"], entries: Shaped[Tensor, "N"]) -> Shaped[Tensor, "B L"]:
        """The values with those at these positions replaced."""
        if self.draws is None or not self.even:
            return values.flatten().scatter(0, self.index, entries).view(values.shape)
        # Entries that fill up go to one place more, which is dropped.
        index = torch.where(self.draws > 0, self.index, values.numel())
        return F.pad(values.flatten(), (0, 1)).scatter(0, index, entries)[:-1].view(values.shape)

    def among(self, others: Places) -> Int[Tensor, "N"]:
        """The index of each entry among those of `others`, which include all these positions and are not `even`."""
        return torch.searchsorted(others.index, self.index).clamp(max=max(len(others.index) - 1, 0))

    def weigh(self, values: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        """The values times the number of times each of them counts."""
        return values if self.draws is None else values * self.draws


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
        is_causal: (B,) True = each token is predicted from those before it, and none is masked; None: no such rows.
        following: (B, L) True at the words of causal rows that follow another token; None: there are none.
        located: places that were found before the batch moved to a device; see `places`.
    """

    tokens: TokenBatch
    masked_ids: Int[Tensor, "B L"]
    masked_positions: Bool[Tensor, "B L"]
    num_masked: int
    num_tokens: int
    draws: Int[Tensor, "B L"] | None = None
    num_draws: int | None = None
    is_causal: Bool[Tensor, "B"] | None = None
    following: Bool[Tensor, "B L"] | None = None
    located: Mapping[PlacesOf, Places] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        """Number of items in the generator's loss: the chosen positions, where one drawn twice counts twice."""
        return self.num_masked if self.num_draws is None else self.num_draws

    @property
    def target_draws(self) -> Int[Tensor, "M"] | None:
        """How often each chosen position was drawn, row by row; None: once each."""
        return self.places("chosen").draws

    def places(self, which: PlacesOf) -> Places:
        """Positions as an index. If they were not `locate`d before, finding them waits for the device of the batch."""
        return self.located.get(which) or self._places(which, even=False)

    def locate(self, kinds: Collection[PlacesOf], *, even: bool) -> CorruptedBatch:
        """The same batch with these places found.

        Args:
            even: give all rows equally many of the chosen positions; see `Places`.
        """
        located = {which: self._places(which, even=even) for which in kinds}
        for which, places in located.items():
            if even and which in ("words", "predicted") and not len(places.index):
                # The entries that fill up the chosen positions need a word to point to.
                located[which] = Places(nowhere := torch.zeros(1, dtype=torch.long), 0, nowhere, even=True)
        return replace(self, located=located)

    def mask(self, which: PlacesOf) -> Bool[Tensor, "B L"]:
        """True at these positions."""
        if which == "chosen":
            return self.masked_positions
        if which == "words":
            return self.tokens.maskable
        if which in ("next", "predicted") and self.following is not None:
            return self.following if which == "next" else self.following | self.masked_positions
        return self.tokens.text_starts if which == "texts" else self.tokens.attention_mask

    def to(self, device: torch.device) -> CorruptedBatch:
        """The same batch on another device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, tokens=replace(moved.tokens, slot=self.tokens.slot))

    def _places(self, which: PlacesOf, *, even: bool) -> Places:
        return Places.of(self.mask(which), self.draws if which == "chosen" else None, even=even and which == "chosen")


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


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of a frozen batch with `change` applied to all its tensors, also those in tuples, mappings and batches in it."""
    changed: Any = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif isinstance(value, tuple):
        changed = tuple(map_tensors(item, change) for item in value)
    elif isinstance(value, Mapping):
        changed = {name: map_tensors(item, change) for name, item in value.items()}
    elif is_dataclass(value):
        changed = replace(changed, **{item.name: map_tensors(getattr(value, item.name), change) for item in fields(value)})
    return cast(T, changed)


def _filled_up(
    mask: Bool[Tensor, "B L"], index: Int[Tensor, "M"], counted: Int[Tensor, "M"] | None
) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"] | None]:
    """Index and counts with as many entries for every row as the fullest one has; None as counts if nothing was filled up."""
    (rows, length), sizes = mask.shape, mask.sum(1)
    size = max(int(sizes.max()) if rows else 0, 1)
    if len(index) == rows * size:
        return index, counted
    row = index // length
    slots = row * size + torch.arange(len(index), device=index.device) - (sizes.cumsum(0) - sizes)[row]
    filled = (torch.arange(rows, device=index.device) * length).repeat_interleave(size)
    counts = torch.zeros_like(filled)
    return filled.scatter(0, slots, index), counts.scatter(0, slots, torch.ones_like(index) if counted is None else counted)


_NEARLY_FULL = 0.97  # fraction of real tokens from which leaving out padding saves nothing


def with_spans(batch: TokenBatch) -> TokenBatch:
    """The batch with the spans of its real tokens; as it is if padding is between the real tokens of a document.

    It runs on the host: on a GPU, the number of real tokens would have to be read back.
    """
    if batch.size == 0:
        return batch
    mask, documents = batch.attention_mask, batch.document_ids
    found = find_spans(batch.input_ids.shape, None if batch.full else mask, documents)
    if found.has_holes or len(found.offsets) < 2:
        return batch
    if found.places is not None and len(found.places) > _NEARLY_FULL * mask.numel():
        # Padding in spans of its own: most batches of packed rows are full, and compiled code is made for each shape.
        documents = torch.zeros_like(batch.input_ids) if documents is None else documents
        found = find_spans(batch.input_ids.shape, None, torch.where(mask, documents, documents.max() + 1))
    # Rounded up to a power of two, so that compiled code, which is made for each value, is made for few of them.
    longest, row = int(found.offsets.diff().max()), batch.input_ids.shape[1]
    return replace(batch, spans=Spans(found.offsets.int(), found.places, min(row, 1 << (longest - 1).bit_length())))


@dataclass(frozen=True)
class FoundSpans:
    """The spans of some rows: their `offsets` and `places`, as in `Unpadding`, and where they start.

    Attributes:
        starts: (T - 1,) True where the next token begins a span; None: every row is one span without padding.
    """

    offsets: Int[Tensor, "spans_and_1"]
    places: Int[Tensor, "T"] | None = None
    starts: Bool[Tensor, "T_less_1"] | None = None

    @property
    def has_holes(self) -> bool:
        """Whether padding is between two tokens of a span."""
        return self.places is not None and self.starts is not None and bool(((self.places.diff() != 1) & ~self.starts).any())


def find_spans(
    shape: torch.Size, attention_mask: Bool[Tensor, "B L"] | None, document_ids: Int[Tensor, "B L"] | None
) -> FoundSpans:
    """The spans of rows of this shape."""
    batch, length = shape
    if attention_mask is None and document_ids is None:
        return FoundSpans(torch.arange(0, batch * length + 1, length))
    places = None
    if attention_mask is not None and not attention_mask.all():
        places = attention_mask.flatten().nonzero().flatten()
    row = torch.arange(batch).repeat_interleave(length)
    document = torch.zeros_like(row) if document_ids is None else document_ids.flatten()
    if places is not None:
        row, document = row[places], document[places]
    starts = (row.diff() != 0) | (document.diff() != 0)
    middle = starts.nonzero().flatten() + 1
    return FoundSpans(torch.cat([middle.new_zeros(1), middle, middle.new_full((1,), len(row))]), places, starts)
