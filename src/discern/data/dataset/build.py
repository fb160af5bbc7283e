"""Tokenizes documents in worker processes and writes them to shards, with statistics."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt
from tokenizers import Tokenizer

from discern.data.curation.contamination import ContaminationSearch, NgramFinder, NgramIndex
from discern.data.curation.filters import Rules
from discern.data.curation.near_duplicates import Banding
from discern.data.dataset.manifest import COUNTS_NAME, FileInfo, NearDuplicates, SplitInfo, SplitName, Statistics
from discern.data.dataset.writing import HeldoutSplit, Placed, SplitWriter
from discern.data.executors import WorkerPool
from discern.data.sources.corpus import CorpusProgress
from discern.data.sources.documents import Document
from discern.data.tokenizer import special_ids, vocab_size
from discern.data.tokenizer.encoding import DIGEST_BYTES, EncodedChunk, encoding_service, token_dtype
from discern.data.tokenizer.words import SegmenterName, check_segmenter
from discern.errors import ConfigError
from discern.storage.files import write_file, writing_temporary_files

MOST_HELDOUT = 0.99
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_EXACT = 4096
_RATIO = 1.01
_BUCKETS = _EXACT + 4096


class LengthHistogram:
    """Histogram of lengths: a bucket per length below 4096, then buckets of 1% width."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, dtype=np.int64)
        self._largest = 0

    def add(self, lengths: Int[np.ndarray, " n"]) -> None:
        """Count some lengths."""
        if not len(lengths):
            return
        logarithmic = _EXACT + np.floor(np.log(np.maximum(lengths, _EXACT) / _EXACT) / np.log(_RATIO)).astype(np.int64)
        buckets = np.where(lengths < _EXACT, lengths, logarithmic)
        self._counts += np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)
        self._largest = max(self._largest, int(lengths.max()))

    def to_array(self) -> Int[np.ndarray, " buckets"]:
        """The counts of all buckets, then the largest length."""
        return np.append(self._counts, self._largest)

    def merge(self, other: Int[np.ndarray, " buckets"]) -> None:
        """Add what another histogram has counted, as `to_array` gives it."""
        self._counts += other[:-1]
        self._largest = max(self._largest, int(other[-1]))

    def quantiles(self) -> dict[str, int]:
        """The length at each level: the smallest bucket that this fraction of the lengths does not exceed."""
        total = int(self._counts.sum())
        if not total:
            return {}
        ranks = np.maximum(np.ceil(np.array(QUANTILES) * total), 1)
        buckets = np.searchsorted(np.cumsum(self._counts), ranks)
        lengths = np.where(buckets < _EXACT, buckets, np.round(_EXACT * _RATIO ** (buckets - _EXACT))).astype(np.int64)
        lengths[-1] = self._largest
        return {f"{level:g}": int(length) for level, length in zip(QUANTILES, lengths, strict=True)}


class StatisticsCounter:
    """Counts chunks. Memory does not grow with the data set, except for 16 bytes per document at the end.

    Args:
        unknown_id: id of [UNK].
    """

    def __init__(self, unknown_id: int) -> None:
        self._unknown_id = unknown_id
        with writing_temporary_files():
            self._digests = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._document_lengths, self._sentence_lengths = LengthHistogram(), LengthHistogram()
        self.documents = self.sentences = self.tokens = self.words = 0
        self.unknown = self.empty = self.characters = 0
        self.unknown_causes, self.filtered = Counter[str](), Counter[str]()

    def __enter__(self) -> StatisticsCounter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):  # nothing in it is kept; a full disk was reported before
            self._digests.close()

    def add(self, chunk: EncodedChunk) -> None:
        """Count one chunk."""
        block = chunk.block
        self.documents += block.num_documents
        self.sentences += len(block.sentence_lengths)
        self.tokens += len(block.tokens)
        self.words += int(block.word_starts.sum())
        self.unknown += int((block.tokens == self._unknown_id).sum())
        self.empty += int((~chunk.kept).sum())
        self.characters += chunk.characters
        self.unknown_causes.update(chunk.unknown)
        self.filtered.update(chunk.filtered)
        self._document_lengths.add(block.document_lengths)
        self._sentence_lengths.add(block.sentence_lengths)
        with writing_temporary_files():
            self._digests.write(block.digests.tobytes())

    def finish(self, bytes_read: int) -> Statistics:
        """The statistics of all chunks."""
        return Statistics(
            documents=self.documents,
            sentences=self.sentences,
            tokens=self.tokens,
            words=self.words,
            unknown_tokens=self.unknown,
            unknown_fraction=self.unknown / max(self.tokens, 1),
            unknown_causes=self.unknown_causes,
            tokens_per_word=self.tokens / max(self.words, 1),
            duplicates=self._duplicates(),
            empty_documents=self.empty,
            characters=self.characters,
            bytes_read=bytes_read,
            document_lengths=self._document_lengths.quantiles(),
            sentence_lengths=self._sentence_lengths.quantiles(),
        )

    def _duplicates(self) -> int:
        """Number of documents whose digest occurred before: 16 bytes of memory per document, sorted in place."""
        with writing_temporary_files():
            self._digests.seek(0)  # writes what is buffered
        return repeated(np.fromfile(self._digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES))


def repeated(digests: UInt[np.ndarray, "n 16"]) -> int:
    """Number of documents whose digest occurred before. Sorts the digests, in place."""
    ordered = digests.view(f"S{DIGEST_BYTES}").ravel()
    ordered.sort()
    return int((ordered[1:] == ordered[:-1]).sum())


CHUNK_CHARACTERS = 1 << 19
"""Number of characters that a worker gets at a time. It does not depend on the number of workers, nor does the output."""

SHARD_TOKENS = 1 << 27
"""256 MiB of uint16."""


@dataclass(frozen=True)
class BuildOptions:
    """How documents become shards.

    Attributes:
        segmenter: source of word boundaries.
        heldout: expected fraction of held-out documents.
        seed: seed of the choice of held-out documents.
        shard_tokens: maximum number of tokens per shard, unless a single document is longer.
        workers: number of processes that tokenize; the output does not depend on it.
        filters: names of filters, which leave out documents before they are tokenized.
        near_duplicates: similarity from which documents are near-duplicates, of which the first is kept; None keeps all.
    """

    segmenter: SegmenterName = "none"
    heldout: float = 0.01
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS
    workers: int = 1
    near_duplicates: float | None = None
    filters: tuple[str, ...] = ()

    def check(self) -> None:
        """Check the options before any work.

        Raises:
            ConfigError: a number is out of range, there is no such filter, or the segmenter is not installed.
        """
        if not 0 <= self.heldout <= MOST_HELDOUT:
            raise ConfigError(
                f"--heldout is {self.heldout:g}, expected a fraction of the documents from 0 to {MOST_HELDOUT:g}",
                hint="0.01 holds out one document in a hundred",
            )
        if self.workers < 1:
            raise ConfigError(f"--workers is {self.workers}, expected at least 1", hint="omit it to use all cores")
        Rules(self.filters)  # refuses what is no filter
        if self.near_duplicates is not None:
            Banding.of(self.near_duplicates)  # refuses what is no similarity
        check_segmenter(self.segmenter)


@dataclass(frozen=True)
class Built:
    """The files that were written, and statistics of the documents."""

    splits: dict[SplitName, SplitInfo]
    token_counts: FileInfo
    statistics: Statistics
    near_duplicates: NearDuplicates | None = None
    filtered: dict[str, int] | None = None


def build_shards(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    options: BuildOptions,
    folder: Path,
    reading: CorpusProgress,
    search: ContaminationSearch | None = None,
) -> Built:
    """Tokenize the documents and write them to an existing folder.

    Args:
        documents: documents in the order in which they are written.
        tokenizer: tokenizer of the data set.
        options: how documents become shards.
        folder: existing folder for the shards and the counts.
        reading: progress of reading.
        search: search for the examples of evaluation files in the documents, if asked for.

    Raises:
        DataError: a worker died, or the documents cannot be read.
    """
    counts = np.zeros(vocab_size(tokenizer), dtype=np.int64)
    chooser = HeldoutSplit(options.heldout, options.seed)
    with ExitStack() as stack:
        counter = stack.enter_context(StatisticsCounter(special_ids(tokenizer)["unk"]))
        writers = {name: stack.enter_context(SplitWriter(folder, name, options.shard_tokens)) for name in ("train", "heldout")}

        def write(placed: Placed) -> None:
            for split, block in placed:
                writers[split].append(block)
                if split == "train":
                    np.add(counts, np.bincount(block.tokens, minlength=len(counts)), out=counts)

        for chunk in stack.enter_context(closing(encoded(documents, tokenizer, options, reading, search))):
            counter.add(chunk)
            write(chooser.place(chunk.block))
            reading.show(tokens=f"{counter.tokens:,}")
        reading.finish(tokens=f"{counter.tokens:,}")
        write(chooser.finish())
        splits: dict[SplitName, SplitInfo] = {"train": writers["train"].close(), "heldout": writers["heldout"].close()}
        raw = counts.astype("<i8").tobytes()
        write_file(folder / COUNTS_NAME, raw)
        written = FileInfo(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
        filtered = in_order(counter.filtered) if options.filters else None
        return Built(splits, written, counter.finish(reading.bytes_read), filtered=filtered)


def survey(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    options: BuildOptions,
    reading: CorpusProgress,
    search: ContaminationSearch | None = None,
) -> tuple[Statistics, Counter[str]]:
    """The statistics of the documents, and what filters leave out of them, without writing anything."""
    found = encoded(documents, tokenizer, options, reading, search)
    with StatisticsCounter(special_ids(tokenizer)["unk"]) as counter, closing(found) as chunks:
        for chunk in chunks:
            counter.add(chunk)
            reading.show(tokens=f"{counter.tokens:,}")
        reading.finish(tokens=f"{counter.tokens:,}")
        return counter.finish(reading.bytes_read), counter.filtered


def search_only(
    documents: Iterable[Document], search: ContaminationSearch, options: BuildOptions, reading: CorpusProgress
) -> Counter[str]:
    """Search the documents for the examples of evaluation files, in worker processes, without a tokenizer.

    Returns:
        What filters left out, which is not searched, by filter and reason.
    """
    filtered, before = Counter[str](), 0
    with WorkerPool(searching_service, (search.index, None, options.segmenter, options.filters), options.workers) as pool:
        for searched in pool.map(chunks_of(documents)):
            filtered += searched.filtered
            search.add(searched.located(before, reading))
            before += searched.documents
            reading.show()
    reading.finish()
    return filtered


def encoded(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    options: BuildOptions,
    reading: CorpusProgress,
    search: ContaminationSearch | None = None,
) -> Generator[EncodedChunk]:
    """The documents tokenized, and searched, in worker processes, in order. Closing the generator ends the processes."""
    arguments = (tokenizer.to_str(), options.segmenter, options.filters)
    if search is None:
        with WorkerPool(encoding_service, arguments, options.workers) as pool:
            yield from pool.map(chunks_of(documents))
    else:
        before = 0
        with WorkerPool(searching_service, (search.index, *arguments), options.workers) as both:
            for searched in both.map(chunks_of(documents)):
                assert searched.chunk is not None
                search.add(searched.located(before, reading))
                before += searched.documents
                yield searched.chunk


class _Searched(NamedTuple):
    """Some documents, with the n-grams found in them."""

    documents: int
    chunk: EncodedChunk | None
    filtered: Counter[str]
    matches: dict[int, tuple[int, str]]

    def located(self, before: int, reading: CorpusProgress) -> dict[int, tuple[str, int, str]]:
        return {ngram: (*reading.locate(before + index), begins) for ngram, (index, begins) in self.matches.items()}


def searching_service(
    index: NgramIndex, tokenizer_json: str | None, segmenter: SegmenterName, filters: Sequence[str]
) -> Callable[[list[Document]], _Searched]:
    """The service of a worker process that searches what filters keep and, with a tokenizer, encodes it."""
    rules, finder = Rules(filters), NgramFinder(index)
    encode = encoding_service(tokenizer_json, segmenter) if tokenizer_json is not None else None

    def serve(documents: list[Document]) -> _Searched:
        found, dropped = rules.in_place(documents)
        kept = [document for document in found if document is not None]
        chunk = replace(encode(kept), filtered=dropped) if encode is not None else None
        # Documents keep their numbers in the input, by which messages name them.
        return _Searched(len(documents), chunk, dropped, finder.find(found))

    return serve


def in_order(filtered: Counter[str]) -> dict[str, int]:
    """What filters left out, sorted by filter and reason."""
    return {reason: filtered[reason] for reason in sorted(filtered)}


def dtype_name(tokenizer: Tokenizer) -> str:
    """Type of the ids in the shards: `uint16` or `uint32`."""
    return str(token_dtype(vocab_size(tokenizer)))


def chunks_of(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Consecutive whole documents of about `CHUNK_CHARACTERS` together."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += sum(map(len, document))
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
