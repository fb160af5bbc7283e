"""Documents through the worker processes into shards: the part of preparing that takes the time."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from discern.artifacts.files import write_file
from discern.data.encoder import Document, EncodedChunk, encoding_service, token_dtype
from discern.data.manifest import COUNTS_NAME, FileInfo, SplitInfo, SplitName, Statistics
from discern.data.meter import Meter
from discern.data.processes import WorkerPool
from discern.data.shard_writer import SplitWriter
from discern.data.split import HeldoutSplit, Placed
from discern.data.statistics import StatisticsCounter
from discern.data.tokenizer import special_ids, vocab_size
from discern.data.words import SegmenterName

CHUNK_CHARACTERS = 1 << 19
"""What a worker gets at a time. It does not depend on the number of workers, nor does anything else that is written."""

SHARD_TOKENS = 1 << 27
"""256 MiB of uint16."""


@dataclass(frozen=True)
class BuildOptions:
    """How documents become shards.

    Attributes:
        segmenter: where word boundaries come from.
        heldout: expected share of documents held out.
        seed: key of the choice of held-out documents.
        shard_tokens: tokens that a shard holds at most, unless one document is longer.
        workers: processes that tokenise; no output depends on it.
    """

    segmenter: SegmenterName = "none"
    heldout: float = 0.01
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS
    workers: int = 1


@dataclass(frozen=True)
class Built:
    """What was written: the splits, the file of counts, and the statistics of all."""

    splits: dict[SplitName, SplitInfo]
    token_counts: FileInfo
    statistics: Statistics


def build(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    options: BuildOptions,
    folder: Path,
    meter: Meter,
) -> Built:
    """Tokenise the documents and write them to an existing folder.

    Args:
        documents: in the order in which they are written.
        tokenizer: makes the ids.
        options: see there.
        folder: takes the shards and the counts.
        meter: shows the advance, and knows the bytes read.

    Raises:
        DataError: a worker died; or what reading the documents raises.
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

        for chunk in stack.enter_context(closing(encoded(documents, tokenizer, options))):
            counter.add(chunk)
            write(chooser.place(chunk.block))
            meter.show(tokens=f"{counter.tokens:,}")
        meter.finish(tokens=f"{counter.tokens:,}")
        write(chooser.finish())
        splits: dict[SplitName, SplitInfo] = {"train": writers["train"].close(), "heldout": writers["heldout"].close()}
        raw = counts.astype("<i8").tobytes()
        write_file(folder / COUNTS_NAME, raw)
        written = FileInfo(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
        return Built(splits, written, counter.finish(meter.bytes_read))


def survey(documents: Iterable[Document], tokenizer: Tokenizer, options: BuildOptions, meter: Meter) -> Statistics:
    """The statistics that `build` would give, without writing anything."""
    with StatisticsCounter(special_ids(tokenizer)["unk"]) as counter, closing(encoded(documents, tokenizer, options)) as chunks:
        for chunk in chunks:
            counter.add(chunk)
            meter.show(tokens=f"{counter.tokens:,}")
        meter.finish(tokens=f"{counter.tokens:,}")
        return counter.finish(meter.bytes_read)


def encoded(documents: Iterable[Document], tokenizer: Tokenizer, options: BuildOptions) -> Generator[EncodedChunk]:
    """The documents tokenised in worker processes, in order. Close it: that ends the processes."""
    with WorkerPool(encoding_service, (tokenizer.to_str(), options.segmenter), options.workers) as pool:
        yield from pool.map(_chunks(documents))


def dtype_name(tokenizer: Tokenizer) -> str:
    """`uint16` or `uint32`: what the shards hold for this tokenizer."""
    return str(token_dtype(vocab_size(tokenizer)))


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Runs of whole documents of about `CHUNK_CHARACTERS`."""
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
