"""Assigns documents to splits and writes the shards of a split, with only the current block in memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Bool, Float, UInt

from discern.data.dataset.manifest import FileInfo, ShardInfo, SplitInfo, SplitName, Statistics
from discern.data.tokenizer.encoding import TokenBlock
from discern.storage.checksums import checksum
from discern.storage.files import sync_file

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_SUFFIXES = ("tokens", "documents", "sentences", "words")
_TOTALS = ("num_tokens", "num_documents", "num_sentences")


class StatisticsCounter:
    """Counts blocks. Memory does not grow with the data set, except for 20 bytes per document.

    Args:
        unknown_id: id of [UNK].

    Attributes:
        digests: (D, 16) digests of the documents of each block.
        filtered: number of documents that filters left out, by filter and reason.
    """

    def __init__(self, unknown_id: int) -> None:
        self._unknown_id = unknown_id
        self._totals, self._unknown_causes, self.filtered = Counter[str](), Counter[str](), Counter[str]()
        self._lengths, self.digests = [np.zeros(0, np.int32)], [np.zeros((0, 16), np.uint8)]

    def add(self, block: TokenBlock, counts: dict[str, Any]) -> None:
        """Count the documents of a block, and what is known of those that were left out; see `ChunkResult.counts`."""
        self._totals.update(
            documents=block.num_documents,
            sentences=len(block.sentence_lengths),
            tokens=len(block.tokens),
            words=int(block.word_starts.sum()),
            unknown_tokens=int((block.tokens == self._unknown_id).sum()),
            empty_documents=counts["empty"],
            characters=int(block.characters.sum()),
        )
        self._unknown_causes.update(counts["unknown"])
        self.filtered.update(counts["filtered"])
        self._lengths.append(block.document_lengths.astype(np.int32))
        self.digests.append(block.digests)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self._totals["documents"]

    @property
    def duplicates(self) -> int:
        """Number of documents whose digest occurred before."""
        ordered = np.concatenate(self.digests).view("S16").ravel()
        ordered.sort()
        return int((ordered[1:] == ordered[:-1]).sum())

    def finish(self, bytes_read: int) -> Statistics:
        """The statistics of all blocks, of which at least one has a document."""
        lengths = np.quantile(np.concatenate(self._lengths), QUANTILES, method="inverted_cdf").tolist()
        totals = self._totals
        return Statistics(
            **totals,
            unknown_fraction=totals["unknown_tokens"] / totals["tokens"],
            unknown_causes=self._unknown_causes,
            tokens_per_word=totals["tokens"] / max(totals["words"], 1),
            duplicates=self.duplicates,
            bytes_read=bytes_read,
            document_lengths={f"{level:g}": length for level, length in zip(QUANTILES, lengths, strict=True)},
        )


class _Shard:
    """The shard being written: four files."""

    def __init__(self, folder: Path, name: str, stack: ExitStack) -> None:
        self.name = name
        self.num_tokens = self.num_documents = self.num_sentences = 0
        self._files: dict[str, BinaryIO] = {
            suffix: stack.enter_context((folder / f"{name}.{suffix}").open("xb")) for suffix in _SUFFIXES
        }
        self._bits = np.zeros(0, dtype=bool)  # word starts that do not fill a byte yet

    def append(self, block: TokenBlock) -> None:
        """Add documents."""
        for suffix, lengths in (("documents", block.document_lengths), ("sentences", block.sentence_lengths)):
            self._write(suffix, (self.num_tokens + np.cumsum(lengths) - lengths).astype("<i8"))
        self._write("tokens", block.tokens.astype(block.tokens.dtype.newbyteorder("<"), copy=False))
        bits = np.concatenate([self._bits, block.word_starts])
        whole = len(bits) // 8 * 8
        self._write("words", np.packbits(bits[:whole]))
        self._bits = bits[whole:]
        self.num_tokens += len(block.tokens)
        self.num_documents += block.num_documents
        self.num_sentences += len(block.sentence_lengths)

    def close(self) -> ShardInfo:
        """Finish the files and flush them to the disk; returns the entry of the shard in the manifest."""
        end = np.array([self.num_tokens], dtype="<i8")
        for suffix, last in (("documents", end), ("sentences", end), ("words", np.packbits(self._bits))):
            self._write(suffix, last)
        files = {}
        for suffix, file in self._files.items():
            sync_file(file)
            files[suffix] = FileInfo(size=file.tell(), sha256=checksum(Path(file.name)))
            file.close()
        return ShardInfo(name=self.name, files=files, **{name: getattr(self, name) for name in _TOTALS})

    def _write(self, suffix: str, array: np.ndarray) -> None:
        self._files[suffix].write(array.tobytes())


class SplitWriter(ExitStack):
    """Writes a split as `train-00000.*`, `train-00001.*`, ... Shard boundaries depend only on the documents.

    Args:
        folder: existing folder for the files.
        split: name of the split.
        shard_tokens: maximum number of tokens per shard; a longer document has a shard of its own.
    """

    def __init__(self, folder: Path, split: SplitName, shard_tokens: int) -> None:
        super().__init__()
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._done: list[ShardInfo] = []
        self._shard: _Shard | None = None

    def append(self, block: TokenBlock) -> None:
        """Add whole documents."""
        ends = np.cumsum(block.document_lengths)
        first = 0
        while first < block.num_documents:
            before = int(ends[first - 1]) if first else 0
            room = self._shard_tokens - (self._shard.num_tokens if self._shard else 0)
            stop = int(np.searchsorted(ends, before + room, side="right"))
            if stop <= first and self._shard is not None:
                self._close_shard()
                continue
            stop = max(stop, first + 1)
            if self._shard is None:
                self._shard = _Shard(self._folder, f"{self._split}-{len(self._done):05d}", self)
            self._shard.append(block.documents(first, stop))
            first = stop

    def finish(self) -> SplitInfo:
        """Close the last shard; returns the entry of the split in the manifest."""
        self._close_shard()
        totals = {name: sum(getattr(shard, name) for shard in self._done) for name in _TOTALS}
        return SplitInfo(shards=tuple(self._done), **totals)

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._done.append(self._shard.close())
            self._shard = None


Placed = list[tuple[SplitName, TokenBlock]]


class HeldoutSplit:
    """Assigns each document to `train` or `heldout` by a keyed hash of its content, so that exact duplicates are in one split.

    With two or more distinct documents neither split is empty: until both have a document, the one nearest to the threshold is
    kept back and moved to the other split if that would be empty. Only one document is held in memory.

    Args:
        fraction: expected fraction of held-out documents; with 0, none are.
        seed: key of the hash.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction = fraction
        self._key = seed.to_bytes(16, "little", signed=True)
        self._resolved = fraction == 0
        self._kept: TokenBlock | None = None
        self._copies = 0
        self._several = False

    def place(self, block: TokenBlock) -> Placed:
        """The parts of a block that can be written now, in order, with their splits."""
        placed: Placed = []
        first = 0
        while not self._resolved and first < block.num_documents:
            placed += self._place_one(block.documents(first, first + 1))
            first += 1
        rest = block.documents(first, block.num_documents)
        held = self.is_heldout(rest.digests)
        return [*placed, ("train", rest.select(~held)), ("heldout", rest.select(held))]

    def finish(self) -> Placed:
        """The document that is still kept back at the end of the input."""
        if self._kept is None:
            return []
        side = self._side(self._kept)
        other: SplitName = "train" if side == "heldout" else "heldout"
        # A single document is trained on. Otherwise all others are in its own split, so it goes to the empty one.
        return [(other if self._several else "train", self._kept)] * self._copies

    def _place_one(self, document: TokenBlock) -> Placed:
        """Place a document while a split is empty: keep back the one nearest to the threshold."""
        kept = self._kept
        if kept is None:
            self._kept, self._copies = document, 1
            return []
        if (document.digests == kept.digests).all():
            self._copies += 1
            return []
        self._several = True
        side, copies = self._side(kept), self._copies
        if self._side(document) != side:
            self._resolved, self._kept = True, None
            return [(side, kept)] * copies + [(self._side(document), document)]
        if self._distance(document) < self._distance(kept):
            self._kept, self._copies = document, 1
            return [(side, kept)] * copies
        return [(side, document)]

    def is_heldout(self, digests: UInt[np.ndarray, "D 16"]) -> Bool[np.ndarray, " D"]:
        """Whether documents are held out, if neither split is empty then."""
        held: np.ndarray = self._ranks(digests) < self._fraction
        return held

    def _side(self, document: TokenBlock) -> SplitName:
        return "heldout" if self.is_heldout(document.digests)[0] else "train"

    def _distance(self, document: TokenBlock) -> tuple[float, bytes]:
        return abs(float(self._ranks(document.digests)[0]) - self._fraction), document.digests.tobytes()

    def _ranks(self, digests: UInt[np.ndarray, "D 16"]) -> Float[np.ndarray, " D"]:
        """(D,) uniform in [0, 1), from the digest of the content and the seed."""
        hashes = (hashlib.blake2b(digest, digest_size=8, key=self._key).digest() for digest in digests)
        return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.float64) / 2.0**64
