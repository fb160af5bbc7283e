"""Texts of any length through a network: blocks of texts, overlapping windows, batches, and a result for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from discern.data.tokenizer import special_tokens
from discern.data.tokenizer.tokens import UnknownTokens, encode_texts
from discern.errors import NumericsError
from discern.inference.texts import InputText
from discern.models.base import Encoder, Network
from discern.models.two_tower.encoder import TwoTowerEncoder
from discern.progress import Progress
from discern.tasks.supervised import cls_last_states
from discern.types import SpecialTokens

TextT = TypeVar("TextT", bound=InputText)
R = TypeVar("R")

IN_WINDOWS = "read in overlapping windows, each token where it has most context"
# Maximum number of tokens of a forward pass, including padding, and of rows: enough to keep a few cores busy, with little
# memory at any model size. A head over the vocabulary runs on at most that many states at a time.
TOKENS_PER_BATCH, ROWS_PER_BATCH = 4096, 256
# Size of a block: large enough that texts of similar length can share a batch, small enough to be held in memory.
_TEXTS, _CHARACTERS = 1024, 1 << 18


@dataclass(frozen=True)
class TextModel:
    """A tokenizer and the limit of a network in evaluation mode, which a subclass adds.

    Attributes:
        max_length: number of positions it was trained on, including [CLS] and [SEP]; at least 3.
    """

    tokenizer: Tokenizer
    max_length: int

    @property
    def window_size(self) -> int:
        """Number of tokens of text that are read at a time."""
        return self.max_length - 2

    @property
    def special(self) -> SpecialTokens:
        """Ids of the special tokens."""
        return special_tokens(self.tokenizer)


def read_blocks(
    model: TextModel,
    texts: Iterable[TextT],
    compute: Callable[[list[str], list[Encoding]], Iterable[R]],
    progress: Progress,
    warn: Callable[[str], None],
    *,
    description: str,
    how: str = IN_WINDOWS,
) -> Iterator[list[tuple[TextT, R]]]:
    """Each text with its result, in order and in blocks; memory is bounded.

    Args:
        compute: gives the result of each text of a block, from the texts and their encodings without special tokens.
        warn: called about the first text that is longer than the model reads and, at the end, about a high fraction of unknown
            tokens.
        description: name of the work, for `progress`.
        how: how texts that are longer than the model reads are read.
    """
    progress.start(description, None, "texts")
    unknown, warned, rest = UnknownTokens(model.tokenizer), False, iter(texts)
    try:
        while block := list(_block(rest)):
            contents = [each.text for each in block]
            encodings = encode_texts(model.tokenizer, contents)
            for each, encoding in zip(block, encodings, strict=True):
                unknown.add_ids(encoding.ids)
                warned = warned or warn_if_long(model, each.where, encoding.ids, warn, how)
            yield list(zip(block, compute(contents, encodings), strict=True))
            progress.advance(len(block))
    finally:
        progress.finish()
    unknown.report(progress.note, warn)


def _block(texts: Iterator[TextT]) -> Iterator[TextT]:
    characters = 0
    for each in islice(texts, _TEXTS):
        yield each
        characters += len(each.text)
        if characters >= _CHARACTERS:
            return


def warn_if_long(model: TextModel, where: str, ids: Sequence[int], warn: Callable[[str], None], how: str) -> bool:
    """Whether a text is longer than the model reads at a time, after a warning that says how it is read."""
    is_long = len(ids) > model.window_size
    if is_long:
        warn(f"{where}: {len(ids):,} tokens, and the model was trained on {model.window_size:,} at a time: {how}")
    return is_long


@dataclass(frozen=True)
class Window:
    """Tokens of a text that are read at a time.

    Attributes:
        ids: token ids, without [CLS] and [SEP].
        wanted: indices in `ids` of the tokens whose result is taken from this window, ascending.
        word_starts: True for the first token of a word; empty if that does not matter.
    """

    ids: tuple[int, ...]
    wanted: tuple[int, ...]
    word_starts: tuple[bool, ...] = ()


def read_in_windows(
    texts: Sequence[Sequence[int]],
    window_size: int,
    compute: Callable[[list[Window]], Iterable[tuple[int, Sequence[Any]]]],
    *,
    reads_ahead: bool = True,
    word_starts: Sequence[Sequence[bool]] | None = None,
) -> list[list[Any]]:
    """A result for each token of each text.

    A text of more than `window_size` tokens is read in overlapping windows; the result of a token is that of the window where it
    has most context. Windows with the same contents are computed once, so that equal texts have exactly the same results.

    Args:
        texts: ids, without special tokens.
        compute: yields, in any order, the index of each window with the results of its wanted tokens.
        reads_ahead: whether context on the right counts.
    """
    places: dict[Window, list[tuple[int, int]]] = {}
    for number, ids in enumerate(texts):
        for span, wanted in window_spans(len(ids), window_size, reads_ahead=reads_ahead):
            starts = () if word_starts is None else tuple(word_starts[number][span.start : span.stop])
            window = Window(tuple(ids[span.start : span.stop]), wanted, starts)
            places.setdefault(window, []).append((number, span.start))
    windows, results = list(places), [[None] * len(ids) for ids in texts]
    for index, values in compute(windows):
        for number, start in places[windows[index]]:
            for place, value in zip(windows[index].wanted, values, strict=True):
                results[number][start + place] = value
    return results


def window_spans(length: int, window_size: int, *, reads_ahead: bool = True) -> list[tuple[range, tuple[int, ...]]]:
    """Windows that cover a text, neighbors overlapping by at least one half, each with the tokens that it has most context for.

    A side that reaches the end of the text counts as unlimited context; ties go to the first window.

    Returns:
        The positions of each window, and indices of tokens in it; every token is assigned to exactly one window.
    """
    if not length:
        return []
    starts = [*range(0, length - window_size, max(window_size // 2, 1)), max(length - window_size, 0)]
    # A token has most context in the window whose center is nearest; without context on the right, in the first that has it.
    ends = [(start + after + window_size + 1) // 2 if reads_ahead else start + window_size for start, after in pairwise(starts)]
    return [
        (range(start, min(start + window_size, length)), tuple(range(first - start, end - start)))
        for start, first, end in zip(starts, [0, *ends], [*ends, length], strict=True)
    ]


def framed_outputs(
    windows: Sequence[Window],
    compute: Callable[[Int[Tensor, "B L"], Bool[Tensor, "B L"]], Tensor],
    special: SpecialTokens,
    device: torch.device,
) -> Iterator[tuple[int, Sequence[Any]]]:
    """The outputs of a network that reads windows as `[CLS] window [SEP]`, at the wanted tokens of each window.

    Args:
        compute: maps ids and attention mask to a number or a vector for each position.

    Raises:
        NumericsError: an output is not finite.
    """
    for batch in batches([len(window.ids) + 2 for window in windows]):
        with torch.inference_mode():
            input_ids, mask = framed([windows[number].ids for number in batch], special, device)
            outputs = finite(compute(input_ids, mask), mask).float().cpu()
        for number, row in zip(batch, outputs, strict=True):
            wanted = row[[place + 1 for place in windows[number].wanted]]
            yield number, wanted.tolist() if wanted.dim() == 1 else wanted.numpy()


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batches of indices of rows with these lengths, shortest first, so that there is little padding.

    Including padding, a batch has at most `TOKENS_PER_BATCH` tokens; a longer row is a batch of its own.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and ((len(batch) + 1) * lengths[number] > TOKENS_PER_BATCH or len(batch) == ROWS_PER_BATCH):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def framed(
    rows: Sequence[Sequence[int]], special: SpecialTokens, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Rows as `[CLS] row [SEP]`, padded on the right, and the attention mask; token t of a row is at position t + 1."""
    ids = [torch.tensor([special.cls, *row, special.sep]) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=special.pad)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in ids], batch_first=True)
    return input_ids.to(device), mask.to(device)


def read(encoder: Encoder, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L D"]:
    """Hidden states of padded rows `[CLS] text [SEP]`, in this order; the encoder may read the rows in another framing.

    Raises:
        NumericsError: the states are not finite.
    """
    if encoder.fine_tuning.get("finetune.frame") != "cls-last":
        return finite(encoder(input_ids, mask), mask)
    return finite(cls_last_states(encoder, input_ids, mask, torch.zeros_like(input_ids)), mask)


def finite(values: Tensor, mask: Bool[Tensor, "B L"] | None = None) -> Tensor:
    """Check the outputs of a network, (B, L) or (B, L, D), and return them.

    Args:
        mask: attention mask; None: there is no padding.

    Raises:
        NumericsError: an output is not finite, although the weights were when they were loaded.
    """
    if not torch.isfinite(values if mask is None else values[mask]).all():
        raise not_finite()
    return values


def not_finite() -> NumericsError:
    """The error for outputs that are not finite."""
    return NumericsError(
        "the outputs of the network are not finite: its weights are so large that they overflow",
        hint="the file is damaged, or training diverged: use an earlier checkpoint, or train the model again",
    )


def moved(network: Network, device: torch.device) -> Network:
    """The network, after moving it to a device, in evaluation mode."""
    for part in network.parts():
        part.to(device).eval()
    return network


def device_of(encoder: Encoder) -> torch.device:
    """The device of an encoder."""
    return encoder.embeddings.weights.device


Predict = Callable[[Float[Tensor, "n V"], Int[Tensor, "n"]], Iterable[Any]]
"""Makes a result for each token from the logits at its position, float32 over the vocabulary, and its id."""


@torch.inference_mode()
def predicted_from_others(
    network: Network,
    windows: Sequence[Window],
    special: SpecialTokens,
    predict: Predict,
    masked: Callable[[Window, int], range],
) -> Iterator[tuple[int, Sequence[Any]]]:
    """What a network with a head over the vocabulary predicts for each wanted token from the other tokens of its window.

    None of two towers sees the token that it predicts, so one row predicts all tokens of a window. A masked language model reads
    [MASK] instead of the token, so each token needs a row of its own.

    Args:
        masked: positions of a window that are masked to predict the token at a position.
    """
    at_once, device = isinstance(network.encoder, TwoTowerEncoder), device_of(network.encoder)
    rows = [
        (number, places)
        for number, window in enumerate(windows)
        for places in ([window.wanted] if at_once else [(place,) for place in window.wanted])
    ]
    found: dict[tuple[int, int], Any] = {}
    for batch in batches([len(windows[number].ids) + 2 for number, _ in rows]):
        chosen = [rows[index] for index in batch]
        input_ids, mask = framed([windows[number].ids for number, _ in chosen], special, torch.device("cpu"))
        wanted = torch.zeros_like(mask)
        for row, (_, places) in enumerate(chosen):
            wanted[row, [place + 1 for place in places]] = True
        targets = input_ids[wanted].to(device)
        if not at_once:
            for row, (number, (place,)) in enumerate(chosen):
                hidden = masked(windows[number], place)
                input_ids[row, hidden.start + 1 : hidden.stop + 1] = special.mask
        states = read(network.encoder, input_ids.to(device), mask.to(device))[wanted.to(device)]
        parts = zip(torch.split(states, ROWS_PER_BATCH), torch.split(targets, ROWS_PER_BATCH), strict=True)
        results = (result for part, ids in parts for result in predict(finite(network.head(part).float()), ids))
        found |= zip(((number, place) for number, places in chosen for place in places), results, strict=True)
    for number, window in enumerate(windows):
        yield number, [found[number, place] for place in window.wanted]


def log_probabilities(logits: Float[Tensor, "n V"], ids: Int[Tensor, "n"], temperature: float = 1.0) -> Float[Tensor, "n"]:
    """Log-probability of one id for each row of logits."""
    return -F.cross_entropy(logits / temperature, ids, reduction="none")
