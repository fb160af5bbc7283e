"""Writes the shards of a split, document after document, without holding more than the block at hand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np

from discern.artifacts.files import sync_file
from discern.data.blocks import TokenBlock
from discern.data.manifest import FileInfo, ShardInfo, SplitInfo, SplitName


class _ChecksummedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def close(self) -> FileInfo:
        """On disk for good, then its size and hash."""
        sync_file(self._file)
        self._file.close()
        return FileInfo(size=self._size, sha256=self._hash.hexdigest())

    def abandon(self) -> None:
        self._file.close()


class _ShardFiles:
    """The four files of the shard being written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.num_tokens = self.num_documents = self.num_sentences = 0
        self.files = {
            suffix: _ChecksummedFile(folder / f"{name}.{suffix}") for suffix in ("tokens", "documents", "sentences", "words")
        }
        self._bits = np.zeros(0, dtype=bool)  # word starts that don't fill a byte yet

    def append(self, block: TokenBlock) -> None:
        for suffix, lengths in (("documents", block.document_lengths), ("sentences", block.sentence_lengths)):
            starts = self.num_tokens + np.cumsum(lengths) - lengths
            self.files[suffix].write(starts.astype("<i8"))
        self.files["tokens"].write(block.tokens.astype(block.tokens.dtype.newbyteorder("<"), copy=False))
        bits = np.concatenate([self._bits, block.word_starts])
        whole = len(bits) // 8 * 8
        self.files["words"].write(np.packbits(bits[:whole]))
        self._bits = bits[whole:]
        self.num_tokens += len(block.tokens)
        self.num_documents += block.num_documents
        self.num_sentences += len(block.sentence_lengths)

    def close(self) -> ShardInfo:
        end = np.array([self.num_tokens], dtype="<i8")
        self.files["documents"].write(end)
        self.files["sentences"].write(end)
        self.files["words"].write(np.packbits(self._bits))
        return ShardInfo(
            name=self.name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_sentences=self.num_sentences,
            files={suffix: file.close() for suffix, file in self.files.items()},
        )

    def abandon(self) -> None:
        for file in self.files.values():
            file.abandon()


class SplitWriter:
    """Writes one split as `train-00000.*`, `train-00001.*`, ...; where it cuts depends on the documents alone.

    Args:
        folder: existing folder for the files.
        split: name of the split.
        shard_tokens: a shard is closed before it would exceed this many tokens; a longer document has one to itself.
    """

    def __init__(self, folder: Path, split: SplitName, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._done: list[ShardInfo] = []
        self._open: _ShardFiles | None = None

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open is not None:
            self._open.abandon()

    def append(self, block: TokenBlock) -> None:
        """Add whole documents."""
        ends = np.cumsum(block.document_lengths)
        first = 0
        while first < block.num_documents:
            before = int(ends[first - 1]) if first else 0
            room = self._shard_tokens - (self._open.num_tokens if self._open else 0)
            stop = int(np.searchsorted(ends, before + room, side="right"))
            if stop <= first and self._open is not None:
                self._close_shard()
                continue
            stop = max(stop, first + 1)
            self._shard().append(block.documents(first, stop))
            first = stop

    def close(self) -> SplitInfo:
        """Close the last shard; what the manifest says of the split."""
        self._close_shard()
        return SplitInfo(
            num_tokens=sum(shard.num_tokens for shard in self._done),
            num_documents=sum(shard.num_documents for shard in self._done),
            num_sentences=sum(shard.num_sentences for shard in self._done),
            shards=tuple(self._done),
        )

    def _shard(self) -> _ShardFiles:
        if self._open is None:
            self._open = _ShardFiles(self._folder, f"{self._split}-{len(self._done):05d}")
        return self._open

    def _close_shard(self) -> None:
        if self._open is not None:
            self._done.append(self._open.close())
            self._open = None
