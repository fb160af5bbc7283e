"""The stages of near-duplicates: signatures (with the pieces), buckets of equal bands, clusters. Each result is a file.

A task of the buckets reads one band of all documents, or a slice of it if there are many, and nothing else, so that memory and
reading are bounded. Only clusters need all links at once: 16 bytes for each near-duplicate and band.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt
from tokenizers import Tokenizer

from discern.data.dataset.manifest import NearDuplicates
from discern.data.near_duplicates import HASHES, NGRAM_WORDS, Banding, clusters, distinct_pairs, links
from discern.data.stages.pieces import Pieces
from discern.data.stages.plan import Plan
from discern.data.stages.results import read_array, result_folder, values_of
from discern.data.stages.signatures import checked_rows, read_signatures, read_slice

DOCUMENTS_PER_BUCKET = 1 << 25
"""A task takes about 50 bytes of memory per document while it sorts."""
_OPEN_FILES = 128


def bucket_folder(work: Path, index: int) -> Path:
    """The links of one band, or a slice of it."""
    return work / "buckets" / f"{index:06d}"


def clusters_folder(work: Path) -> Path:
    """The clusters."""
    return work / "clusters"


def num_slices(pieces: Pieces) -> int:
    """Number of slices of a band, a power of two."""
    needed = -(-pieces.num_documents // DOCUMENTS_PER_BUCKET)
    return 1 << max(0, needed - 1).bit_length()


def num_buckets(work: Path, plan: Plan, tokenizer: Tokenizer) -> int:
    """Number of tasks of the buckets."""
    assert plan.build.near_duplicates is not None
    return Banding.of(plan.build.near_duplicates).bands * num_slices(Pieces(work, plan, tokenizer))


def make_bucket(work: Path, plan: Plan, tokenizer: Tokenizer, index: int) -> None:
    """Find the links of documents with an equal band."""
    assert plan.build.near_duplicates is not None
    pieces = Pieces(work, plan, tokenizer)
    banding = Banding.of(plan.build.near_duplicates)
    keys, numbers = _slice_of_all(pieces, banding, *divmod(index, num_slices(pieces)))
    with result_folder(bucket_folder(work, index)) as aside:
        pairs = links(keys, numbers, _Signatures(pieces).of, plan.build.near_duplicates)
        aside.write("links", pairs.astype("<i8"))
        aside.values = {"links": len(pairs)}


def _slice_of_all(pieces: Pieces, banding: Banding, band: int, part: int) -> tuple[UInt[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The keys of a slice of a band of all pieces, and the documents that have them, those of a key ascending."""
    parts, keys, numbers = num_slices(pieces), [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
    for piece, first in enumerate(pieces.firsts[:-1]):
        if first < pieces.firsts[piece + 1]:
            found, documents = read_slice(pieces.folder(piece), banding, band, part, parts)
            keys.append(found)
            numbers.append(documents + first)
    return np.concatenate(keys), np.concatenate(numbers)


def make_clusters(work: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Join the links of all bands to clusters."""
    distinct, more = np.zeros((0, 2), dtype=np.int64), [np.zeros((0, 2), dtype=np.int64)]
    for index in range(num_buckets(work, plan, tokenizer)):
        more.append(read_array(bucket_folder(work, index), "links", "<i8", 2))
        # Most pairs share several bands. Sorting all of them after each bucket would take longer than everything else.
        if sum(map(len, more)) > len(distinct):
            distinct, more = distinct_pairs([distinct, *more]), []
    with result_folder(clusters_folder(work)) as aside:
        found = clusters(distinct_pairs([distinct, *more]))
        aside.write("removed", found.removed.astype("<i8"))
        sizes = Counter(map(int, found.sizes))
        aside.values = {
            "removed": len(found.removed),
            "clusters": len(found.sizes),
            "sizes": {str(size): sizes[size] for size in sorted(sizes)},
        }


def removed(work: Path, plan: Plan) -> Int[np.ndarray, " R"]:
    """The documents that are left out, ascending."""
    if plan.build.near_duplicates is None:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(read_array(clusters_folder(work), "removed", "<i8"))


def summary(work: Path, similarity: float) -> NearDuplicates:
    """The near-duplicates for the manifest."""
    found, banding = values_of(clusters_folder(work)), Banding.of(similarity)
    return NearDuplicates(
        similarity=similarity,
        ngram_words=NGRAM_WORDS,
        hashes=HASHES,
        bands=banding.bands,
        rows=banding.rows,
        clusters=found["clusters"],
        removed=found["removed"],
        cluster_sizes=found["sizes"],
    )


class _Signatures:
    """The signatures of documents of all pieces, read where they are needed."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()

    def of(self, numbers: Int[np.ndarray, " n"]) -> UInt[np.ndarray, "n 128"]:
        """(n, 128) signatures of documents in the order given."""
        found = np.empty((len(numbers), HASHES), dtype=np.uint32)
        owners = np.searchsorted(self._pieces.firsts, numbers, side="right") - 1
        order = np.argsort(owners, kind="stable")
        bounds = np.searchsorted(owners[order], np.unique(owners))
        for some in np.split(order, bounds[1:]):
            if len(some):
                owner = int(owners[some[0]])
                rows = self._piece(owner)[numbers[some] - self._pieces.firsts[owner]]
                found[some] = checked_rows(self._pieces.folder(owner), rows)
        return found

    def _piece(self, index: int) -> np.ndarray:
        if index not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
            self._open[index] = read_signatures(self._pieces.folder(index), int(np.diff(self._pieces.firsts)[index]))
        self._open.move_to_end(index)
        return self._open[index]
