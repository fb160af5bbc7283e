"""How far an ONNX file is from the model that it was written from: outputs, decisions, score, size and speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from discern.convert.onnx import Feed, Found
from discern.convert.onnx_graph import Graph, Served
from discern.data.tokenizer.plain_text import encode_texts

Runner: TypeAlias = Callable[[Feed], Found]
Row: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Token ids and segments of a row, with [CLS] and [SEP]."""
_BATCH, _SEED, _FRACTION = 16, 7, 0.15
_TIMED_BATCHES, _TIMED_LENGTH, _REPEATS, _SECONDS = (1, 32), 64, 5, 4.0

# Ordinary sentences, for models whose user gives no text.
_SENTENCES = """The bridge over the river was built of stone and has carried carts, horses and later cars for three centuries.
Most of the snow had melted by the time the first visitors came up the valley.
She asked whether the library would be open on Sunday, but nobody at the desk knew.
A short walk from the station leads to the old market, where fish is sold in the morning.
The committee will publish its report next year, and its members do not expect it to change much.
When the engine stopped, the captain sent two of his men to look for help.
Prices rose by four percent in March, more than economists had predicted.
He wrote the letter twice and sent neither version.
Bread, cheese and a few apples were all that was left in the kitchen.
The new method needs less memory than the old one, although it is no faster on small problems.
Children learn the names of colors later than the names of things.
In the north of the country it rains for most of the winter, and the roads are often closed.
The film was praised for its music, while its plot was found hard to follow.
Two of the three players who were hurt last week are expected to return on Friday.
Water boils at a lower temperature in the mountains than at the coast.
The museum bought the painting from a family that had owned it since 1874.""".split("\n")


@dataclass(frozen=True)
class Difference:
    """Outputs of a copy compared with those of the model.

    Attributes:
        largest: largest absolute difference of an output.
        spread: standard deviation of the model's outputs.
        agreement: fraction of the decisions that are the same; for vectors, the mean cosine, and for numbers the correlation.
    """

    largest: float
    spread: float
    agreement: float


@dataclass(frozen=True)
class Parity:
    """What the card of an ONNX file reports.

    Attributes:
        difference: of the file from the model, on `texts` rows of `source`.
        decision: what was compared, see `discern.convert.onnx_graph.Decision`.
        metric, scores: headline metric of the task, and its value for the model ('torch') and the file ('onnx').
        sizes: bytes of the files, 'float32' and 'int8'.
        milliseconds: median time of a batch by what ran it ('torch', 'onnx', 'int8') and number of rows.
        length: tokens per row of these batches.
        threads: threads that were used.
        per_channel: whether each column has its own scale; None for float32.
    """

    difference: Difference
    decision: str
    texts: int
    source: str
    metric: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    milliseconds: dict[str, dict[int, float]] = field(default_factory=dict)
    length: int = 0
    threads: int = 0
    per_channel: bool | None = None

    @property
    def loss(self) -> float:
        """What was lost: of the score of the task if it is known, otherwise the fraction of decisions that changed."""
        if self.scores:
            return max(0.0, self.scores["torch"] - self.scores["onnx"])
        return 1.0 - self.difference.agreement


def sample_rows(served: Served, texts: Sequence[str] | None = None) -> list[Row]:
    """Rows to compare a model and its copies on.

    For a network that detects or predicts tokens, 15% of the tokens are replaced by random ones, or masked.

    Args:
        texts: one per row; None: some English sentences, or random tokens if the vocabulary lacks their words.
    """
    special, tokenizer, random = served.special, served.tokenizer, np.random.default_rng(_SEED)
    words = tokenizer.get_vocab_size()
    given = texts if texts is not None else _SENTENCES
    ids = [np.array(each.ids, np.int64) for each in encode_texts(tokenizer, given, ids_only=True)]
    ids = [each for each in ids if len(each)]
    if texts is None and (not ids or np.mean(np.concatenate(ids) == special.unk) > 0.2):
        ids = [random.integers(0, words, length) for length in random.integers(5, 40, len(_SENTENCES))]
    pairs = served.reads_pairs
    rows = []
    for number, first in enumerate(ids):
        second = ids[(number + 1) % len(ids)] if pairs else None
        room = (served.max_length - 2) if second is None else (served.max_length - 3) // 2
        first = first[:room].copy()
        if served.corrupts is not None:
            chosen = random.random(len(first)) < _FRACTION
            chosen[random.integers(len(first))] = True
            first[chosen] = special.mask if served.corrupts == "mask" else random.integers(0, words, int(chosen.sum()))
        rows.append(_framed(first, None if second is None else second[:room], special.cls, special.sep))
    return rows


def _framed(first: NDArray[np.int64], second: NDArray[np.int64] | None, cls: int, sep: int) -> Row:
    ids: list[NDArray[np.int64]] = [np.array([cls]), first, np.array([sep])]
    if second is not None:
        ids += [second, np.array([sep])]
    segments = np.zeros(sum(map(len, ids)), np.int64)
    segments[len(first) + 2 :] = 1
    return np.concatenate(ids), segments


def feed_of(graph: Graph, rows: Sequence[Row], pad: int) -> dict[str, NDArray[np.int64]]:
    """Rows as the inputs of a graph, padded to the longest."""
    length = max(len(ids) for ids, _ in rows)
    feed = {name: np.zeros((len(rows), length), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    feed["input_ids"][:] = pad
    for number, (ids, segments) in enumerate(rows):
        feed["input_ids"][number, : len(ids)] = ids
        feed["attention_mask"][number, : len(ids)] = 1
        feed["token_type_ids"][number, : len(ids)] = segments
    return {name: feed[name] for name in graph.inputs}


def outputs_on(run: Runner, served: Served, rows: Sequence[Row]) -> list[Found]:
    """The outputs for each row, without those of padding."""
    found: list[Found] = [{} for _ in rows]
    for chosen in _batches([len(ids) for ids, _ in rows]):
        feed = feed_of(served.graph, [rows[number] for number in chosen], served.special.pad)
        batch, length = run(feed), feed["input_ids"].shape[1]
        for place, number in enumerate(chosen):
            real = len(rows[number][0])
            found[number] = {
                name: values[place, :real] if _per_token(served, name, values, length) else values[place]
                for name, values in batch.items()
            }
    return found


def compare(served: Served, rows: Sequence[Row], model: Sequence[Found], copy: Sequence[Found]) -> Difference:
    """Compare the outputs of a copy with those of the model, at the tokens that the model decides about."""
    decision, names = served.graph.decision, served.graph.decisive
    sides: tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]] = ([], [])
    for row, *found in zip(rows, model, copy, strict=True):
        counted = _counted(served, *row)
        for side, each in zip(sides, found, strict=True):
            side.append(tuple(each[name] if counted is None else each[name][counted] for name in names))
    ours, theirs = (np.concatenate([np.ravel(part) for one in side for part in one]) for side in sides)
    largest, spread = float(np.abs(ours - theirs).max()), float(ours.std())
    if decision == "vector":
        cosines = [_cosine(one[0], other[0]) for one, other in zip(*sides, strict=True)]
        return Difference(largest, spread, float(np.mean(cosines)))
    if decision == "number":
        varies = spread > 0 and float(theirs.std()) > 0
        return Difference(largest, spread, float(np.corrcoef(ours, theirs)[0, 1]) if varies else float(largest == 0))
    same = np.concatenate([_same(decision, one, other) for one, other in zip(*sides, strict=True)])
    return Difference(largest, spread, float(same.mean()))


def timed(run: Runner, served: Served) -> dict[int, float]:
    """Median milliseconds of a batch of random rows, by the number of rows."""
    random, found = np.random.default_rng(_SEED), {}
    for size in _TIMED_BATCHES:
        ids = random.integers(0, served.tokenizer.get_vocab_size(), (size, timed_length(served)))
        feed = feed_of(served.graph, [(row, np.zeros_like(row)) for row in ids], served.special.pad)
        run(feed)  # allocates
        times: list[float] = []
        while len(times) < _REPEATS and (len(times) < 3 or sum(times) < _SECONDS):
            began = time.perf_counter()
            run(feed)
            times.append(time.perf_counter() - began)
        found[size] = 1000 * statistics.median(times)
    return found


def timed_length(served: Served) -> int:
    """Tokens per row of `timed`."""
    return min(served.max_length, _TIMED_LENGTH)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), _BATCH):
        yield order[start : start + _BATCH]


def _per_token(served: Served, name: str, values: NDArray[np.float32], length: int) -> bool:
    return name in served.graph.per_token and values.shape[1] == length


def _counted(served: Served, ids: NDArray[np.int64], segments: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """The tokens of a row that are compared; None: the outputs are not per token."""
    special, graph = served.special, served.graph
    if not set(graph.decisive) & graph.per_token:
        return None
    if served.corrupts == "mask":
        return np.asarray(ids == special.mask)
    if graph.decision == "span":
        counted = segments == 1
        counted[0] = True
        return np.asarray(counted)
    return np.asarray((ids != special.cls) & (ids != special.sep))


def _same(decision: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> NDArray[np.bool_]:
    """Which of the decisions of a row are the same."""
    if decision == "span":
        return np.array([all(a.argmax() == b.argmax() for a, b in zip(ours, theirs, strict=True))])
    (a,), (b,) = ours, theirs
    if decision in ("sign", "signs"):
        return np.asarray((a > 0) == (b > 0)).ravel()
    return np.atleast_1d(a.argmax(-1) == b.argmax(-1))


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Cosine of two vectors, or the mean of those of the states of a text."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.mean(np.where(norms > 0, (a * b).sum(-1) / np.maximum(norms, 1e-12), 1.0)))
