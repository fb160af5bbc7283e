"""Assigns documents to splits and writes the shards of a split, with only the current block in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Float

from discern.data.dataset.manifest import FileInfo, ShardInfo, SplitInfo, SplitName
from discern.data.tokenizer.encoding import TokenBlock
from discern.storage.files import sync_file


class _ChecksummedFile:
    """A new file that is hashed while it is written."""

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
        """Sync and close the file; returns its size and hash."""
        sync_file(self._file)
        self._file.close()
        return FileInfo(size=self._size, sha256=self._hash.hexdigest())

    def abandon(self) -> None:
        self._file.close()


class ShardFiles:
    """The four files of the shard being written.

    Args:
        folder: existing folder for the files.
        name: their name, to which a suffix is added.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.num_tokens = self.num_documents = self.num_sentences = 0
        self.files = {
            suffix: _ChecksummedFile(folder / f"{name}.{suffix}") for suffix in ("tokens", "documents", "sentences", "words")
        }
        self._bits = np.zeros(0, dtype=bool)  # word starts that do not fill a byte yet

    def append(self, block: TokenBlock) -> None:
        """Add documents."""
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
        """Finish the files and flush them to the disk; returns the entry of the shard in the manifest."""
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
        """Close the files without finishing them."""
        for file in self.files.values():
            file.abandon()


class SplitWriter:
    """Writes a split as `train-00000.*`, `train-00001.*`, ... Shard boundaries depend only on the documents.

    Args:
        folder: existing folder for the files.
        split: name of the split.
        shard_tokens: maximum number of tokens per shard; a longer document has a shard of its own.
    """

    def __init__(self, folder: Path, split: SplitName, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._done: list[ShardInfo] = []
        self._open: ShardFiles | None = None

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
        """Close the last shard; returns the entry of the split in the manifest."""
        self._close_shard()
        return SplitInfo.of(self._done)

    def _shard(self) -> ShardFiles:
        if self._open is None:
            self._open = ShardFiles(self._folder, f"{self._split}-{len(self._done):05d}")
        return self._open

    def _close_shard(self) -> None:
        if self._open is not None:
            self._done.append(self._open.close())
            self._open = None


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
        if first < block.num_documents:
            rest = block.documents(first, block.num_documents)
            held = self._ranks(rest) < self._fraction
            for split, chosen in (("train", ~held), ("heldout", held)):
                if chosen.any():
                    placed.append((split, rest.select(chosen)))  # type: ignore[arg-type]
        return placed

    def finish(self) -> Placed:
        """The document that is still kept back at the end of the input."""
        if self._kept is None:
            return []
        kept, copies, self._kept = self._kept, self._copies, None
        side = self._side(kept)
        other: SplitName = "train" if side == "heldout" else "heldout"
        # A single document is trained on. Otherwise all others are in its own split, so it goes to the empty one.
        return [(other if self._several else "train", kept)] * copies

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

    def _side(self, document: TokenBlock) -> SplitName:
        return "heldout" if self._ranks(document)[0] < self._fraction else "train"

    def _distance(self, document: TokenBlock) -> tuple[float, bytes]:
        return abs(float(self._ranks(document)[0]) - self._fraction), document.digests.tobytes()

    def _ranks(self, block: TokenBlock) -> Float[np.ndarray, " D"]:
        """(D,) uniform in [0, 1), from the digest of the content and the seed."""
        hashes = (hashlib.blake2b(digest, digest_size=8, key=self._key).digest() for digest in block.digests)
        return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.float64) / 2.0**64
