"""Mixtures: the data sets of a run, called sources, and which of them each row comes from."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path, PurePath

import numpy as np
import torch
from numpy.typing import NDArray

from discern.config.schema import ScheduleSegment
from discern.data.batching.stream import Integers, RowStream, join_batches
from discern.data.config import DataConfig
from discern.data.dataset.shards import TokenData
from discern.data.tokenizer.training import pieces_of_added
from discern.errors import ConfigError, DataError
from discern.types import TokenBatch

_CYCLE = 10_000  # rows after which the order of the sources repeats, so shares are rounded to multiples of 1/10,000
_WEIGHTED = re.compile(r"([^?]+)=([+-]?\d*\.?\d+(?:e[+-]?\d+)?)", re.IGNORECASE)  # after a "?" comes the query of an address


class MixedData(TokenData):
    """Several data sets with one tokenizer. Their statistics are added, and settings in which they differ are left out.

    Attributes:
        sources: the data sets by name.
        weights: share of each source in the tokens that are trained on, at the end of the run.
        tokens: number of tokens of each source to train on.
    """

    def __init__(self, sources: Mapping[str, TokenData], config: DataConfig) -> None:
        self.sources = sources
        self.tokens = [data.split("train").num_tokens for data in sources.values()]
        weights = np.array(config.mixture[-1][1]) if config.mixture else weights_by_size(self.tokens, config)
        self.weights = dict(zip(sources, (weights / weights.sum()).tolist(), strict=True))
        manifests = [data.manifest for data in sources.values()]
        first, statistics, overlaps = manifests[0], [each.statistics for each in manifests], [each.overlap for each in manifests]
        sums = {name: sum(getattr(each, name) for each in statistics) for name, value in statistics[0] if isinstance(value, int)}
        sums |= {"unknown_fraction": sums["unknown_tokens"] / sums["tokens"], "tokens_per_word": sums["tokens"] / sums["words"]}
        changes = {
            "fingerprint": hashlib.sha256("".join(each.fingerprint for each in manifests).encode()).hexdigest(),
            "statistics": statistics[0].model_copy(update=sums),
            "configuration": dict(set.intersection(*(set(each.configuration.items()) for each in manifests))),
            "overlap": None if None in overlaps else tuple(file for files in overlaps for file in files or ()),
        }
        super().__init__(next(iter(sources.values())).folder, first.model_copy(update=changes))

    @property
    def location(self) -> str:
        """Where the data sets are, for messages."""
        return ", ".join(data.location for data in self.sources.values())

    def token_counts(self) -> Integers:
        """(V,) occurrences of each id in as many tokens of the mixture as the training splits have together."""
        counts = np.zeros(self.vocab_size)
        for (name, data), tokens in zip(self.sources.items(), self.tokens, strict=True):
            own = data.token_counts()
            counts[: len(own)] += own * (self.weights[name] * sum(self.tokens) / tokens)
        return np.rint(counts).astype(np.int64)


def sources_of(data: TokenData) -> Mapping[str, TokenData]:
    """The sources of a data set or a mixture, by name."""
    return data.sources if isinstance(data, MixedData) else {source_names([data.location])[0]: data}


def weights_by_size(tokens: Sequence[int], config: DataConfig) -> NDArray[np.float64]:
    """Weights of sources with these numbers of tokens, for a configuration without weights."""
    return np.array(tokens) ** (1 / config.mixture_temperature)


def open_data(locations: Sequence[Path | str]) -> TokenData:
    """The data set at a location, or the mixture of those at several, weighted by their sizes.

    Raises:
        ConfigError: a location is given twice, or a package that an address needs is missing.
        DataError: a folder is not a data set or is damaged, or one has another tokenizer than the first.
    """
    opened = [TokenData.open(location) for location in locations]
    first = opened[0]
    for data in opened:
        # The first may have been prepared with more tokens than the others.
        other = data.tokenizer_fingerprint != first.tokenizer_fingerprint
        if other and pieces_of_added(data.tokenizer(), first.tokenizer()) is None:
            raise DataError(
                f"{data.location} was made with a different tokenizer ({data.tokenizer_fingerprint[:12]}) from that of "
                f"{first.location} ({first.tokenizer_fingerprint[:12]}): the same ids stand for other tokens",
                hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {first.folder}/tokenizer.json",
            )
    sources = dict(zip(source_names([data.location for data in opened]), opened, strict=True))
    if len(sources) < len(opened):
        raise ConfigError("a data set is given twice", hint="give each data set once, with its weight: --data A=0.7 --data B=0.3")
    return first if len(opened) == 1 else MixedData(sources, DataConfig())


def weighted(data: TokenData, config: DataConfig, *, in_slots: bool = False) -> TokenData:
    """The data set, or the mixture with the weights of the configuration.

    Args:
        in_slots: whether each slot of the batch continues from step to step, for a model with memory.

    Raises:
        ConfigError: `data.mixture` has another number of weights, or a mixture would be read in slots.
    """
    sources = sources_of(data)
    if config.mixture and len(config.mixture[0][1]) != len(sources):
        raise ConfigError(
            f"data.mixture has {len(config.mixture[0][1])} weights, but --data names {len(sources)}: {', '.join(sources)}",
            hint="give one --data for each weight, in the same order; or --set data.mixture=[]",
        )
    if isinstance(data, MixedData) and in_slots:
        raise ConfigError(
            "objective.memory_length remembers the text before each row, but several data sets are read in turn",
            hint="set objective.memory_length=0, or prepare one data set from all texts",
        )
    return MixedData(sources, config) if isinstance(data, MixedData) else data


def source_names(locations: Sequence[str]) -> list[str]:
    """A name for each location: its last part, or where two of these are equal, all of it."""
    names = [PurePath(location).name for location in locations]
    return names if len(set(names)) == len(names) else list(locations)


def parse_sources(values: Sequence[str]) -> Sequence[str] | dict[str, float]:
    """Locations, with their weights if they have the form `LOCATION=WEIGHT`. A path that exists may contain a '='.

    Raises:
        ConfigError: only some have a weight, or a weight is not above 0.
    """
    matches = [None if Path(value).exists() else _WEIGHTED.fullmatch(value) for value in values]
    weights = {match[1]: float(match[2]) for match in matches if match}
    if weights and (len(weights) < len(values) or min(weights.values()) <= 0):
        raise ConfigError(
            f"--data {' --data '.join(values)}: expected different data sets, and a weight above 0 for all or none",
            hint="for example --data A=0.7 --data B=0.3, or --data A --data B to weight them by their sizes",
        )
    return weights or values


class _Segment:
    """Rows of one length and one mixture, in which the order of the sources repeats after a cycle.

    The sources are spread evenly: the k-th of the n rows of a source is placed at (k + 1/2) / n of the cycle. A source with a
    positive weight has at least one row.

    Args:
        first: index of the first row.
        streams: the stream of each source.
        weights: weight of each source in the rows.
        read: epochs of each source that are read before.
        multiple: the stream of each source begins with a row number that is a multiple of it.
    """

    def __init__(
        self, first: int, streams: Sequence[RowStream], weights: NDArray[np.float64], read: Sequence[Fraction], multiple: int
    ) -> None:
        self.first, self.streams, self._read = first, streams, read
        begins = [ceil(epochs * stream.num_rows / multiple) * multiple for epochs, stream in zip(read, streams, strict=True)]
        self._begins = np.array(begins)
        self._counts = np.maximum(np.rint(weights / weights.sum() * _CYCLE), weights > 0).astype(np.int64)
        order = np.argsort(np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts]), kind="stable")
        self._sources = np.repeat(np.arange(len(weights)), self._counts)[order]
        self._ranks = np.concatenate([np.arange(count) for count in self._counts])[order]

    def locate(self, rows: Integers) -> tuple[Integers, Integers]:
        """The source of each row, and its number in the stream of that source."""
        cycles, places = np.divmod(rows - self.first, len(self._sources))
        sources = self._sources[places]
        return sources, self._begins[sources] + cycles * self._counts[sources] + self._ranks[places]

    def epochs(self, row: int) -> list[Fraction]:
        """Epochs of each source that are read before a row."""
        cycles, place = divmod(row - self.first, len(self._sources))
        counts = cycles * self._counts + np.bincount(self._sources[:place], minlength=len(self._counts))
        pairs = zip(self._read, counts.tolist(), self.streams, strict=True)
        return [read + Fraction(count, stream.num_rows) for read, count, stream in pairs]


class MixedStream:
    """Rows of one or several sources in turn, in segments that begin with another mixture or another length of the rows.

    The index of a row decides which source it comes from and which row of it, so any row is available without those before it.
    Weights are shares of tokens. Rows of sources differ in the tokens that they hold if they are padded, so a source has rows
    in proportion to its weight divided by its mean number of tokens per row (those of an epoch, dropped ones included).

    In each segment, a source continues at the part of its epoch at which the segment before ended. If f is the fraction of an
    epoch, or the number of epochs, that has been read, a stream of n rows per epoch begins with row ceil(f n). So each epoch
    has as much text as without a change, and after the epoch of the change each row is again read once per epoch. In that
    epoch some text is read twice and some not at all if the length changes: rows of another length are other pieces of the
    text, in another order.

    Args:
        segments: the steps of each segment.
        build: returns the stream of each source in a segment.
        tokens: number of tokens of each source.
        default: weights of the sources for segments without weights.
        whole_steps: begin each stream with a row number that is a multiple of the rows per step, for rows read in slots.
    """

    def __init__(
        self,
        segments: Sequence[ScheduleSegment],
        build: Callable[[ScheduleSegment], Sequence[RowStream]],
        tokens: Sequence[int] | NDArray[np.float64],
        default: NDArray[np.float64],
        *,
        whole_steps: bool = False,
    ) -> None:
        self._segments: list[_Segment] = []
        for segment in segments:
            streams, first = build(segment), segment.examples
            read = self._segments[-1].epochs(first) if self._segments else [Fraction(0)] * len(streams)
            rows = np.array([stream.num_rows for stream in streams])
            weights = (np.array(segment.weights) if segment.weights else default) * rows / tokens
            self._segments.append(_Segment(first, streams, weights, read, segment.rows if whole_steps else 1))
        self.streams = [segment.streams for segment in self._segments]

    @property
    def num_rows(self) -> int:
        """Rows per epoch of all sources together, in the last segment."""
        return sum(stream.num_rows for stream in self.streams[-1])

    def epochs(self, rows: int) -> list[float]:
        """Number of times that the first `rows` rows read each source."""
        return [float(epochs) for epochs in self._segment(rows).epochs(rows)]

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence, all of one step."""
        segment = self._segment(int(indices[0]))
        sources, numbers = segment.locate(indices)
        if len(segment.streams) == 1:
            return segment.streams[0].batch(numbers, slots)
        parts = []
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            parts.append((chosen, segment.streams[source].batch(numbers[chosen], slots[chosen])))
        # Masks follow from the index, so that rows of the same number in different sources have different masks.
        return replace(join_batches(parts), example_index=torch.from_numpy(indices))

    def _segment(self, row: int) -> _Segment:
        return self._segments[bisect_right(self._segments, row, key=lambda segment: segment.first) - 1]


class HeldoutMixture(MixedStream):
    """Held-out rows of several sources. An evaluation reads each source apart; as a stream they come in turn.

    Args:
        sources: rows of each source by name.
        weights: weight of each source in the metrics of the mixture.
    """

    def __init__(self, sources: Mapping[str, RowStream], weights: Mapping[str, float]) -> None:
        ones = np.ones(len(sources))
        super().__init__([ScheduleSegment(0, 1, 1)], lambda _: [*sources.values()], ones, ones)
        # Above 0, so that there are metrics if only sources without weight have held-out text.
        self.sources, self._weights = sources, [max(weights[name], 1e-9) for name in sources]

    def mean(self, metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The metrics of the mixture: means of those of the sources."""
        return {name: float(np.average([each[name] for each in metrics], weights=self._weights)) for name in metrics[0]}
