"""The stages of near-duplicates: signatures (with the pieces), buckets of equal bands, clusters. Each result is a file.

A task of the buckets reads one band of all documents, or a slice of it if there are many, and nothing else, so that memory and
reading are bounded. Only clusters need all links at once: 16 bytes for each near-duplicate and band.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt

from discern.data.curation.near_duplicates import HASHES, NGRAM_WORDS, Banding, clusters, distinct_pairs, links
from discern.data.dataset.manifest import NearDuplicates
from discern.data.stages.pieces import Pieces
from discern.data.stages.plan import PrepareJob
from discern.data.stages.results import Aside, read_array, result_of, values_of
from discern.data.stages.signatures import checked_rows, read_signatures, read_slice

DOCUMENTS_PER_BUCKET = 1 << 25
"""A task takes about 50 bytes of memory per document while it sorts."""
_OPEN_FILES = 128


def num_slices(pieces: Pieces) -> int:
    """Number of slices of a band, a power of two."""
    needed = -(-pieces.num_documents // DOCUMENTS_PER_BUCKET)
    return 1 << max(0, needed - 1).bit_length()


def num_buckets(job: PrepareJob) -> int:
    """Number of tasks of the buckets."""
    assert job.plan.build.near_duplicates is not None
    return Banding.of(job.plan.build.near_duplicates).bands * num_slices(Pieces(job))


def make_bucket(job: PrepareJob, index: int, aside: Aside) -> None:
    """Find the links of documents with an equal band."""
    similarity, pieces = job.plan.build.near_duplicates, Pieces(job)
    assert similarity is not None
    keys, numbers = _slice_of_all(pieces, *divmod(index, num_slices(pieces)))
    pairs = links(keys, numbers, _Signatures(pieces).of, similarity)
    aside.write("links", pairs.astype("<i8"))
    aside.values = {"links": len(pairs)}


def _slice_of_all(pieces: Pieces, band: int, part: int) -> tuple[UInt[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The keys of a slice of a band of all pieces, and the documents that have them, those of a key ascending."""
    parts, keys, numbers = num_slices(pieces), [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
    for piece, first in enumerate(pieces.firsts[:-1]):
        if first < pieces.firsts[piece + 1]:
            found, documents = read_slice(pieces.folders[piece], band, part, parts)
            keys.append(found)
            numbers.append(documents + first)
    return np.concatenate(keys), np.concatenate(numbers)


def make_clusters(job: PrepareJob, aside: Aside) -> None:
    """Join the links of all bands to clusters."""
    distinct, more = np.zeros((0, 2), dtype=np.int64), [np.zeros((0, 2), dtype=np.int64)]
    for index in range(num_buckets(job)):
        more.append(read_array(result_of(job.folder, "buckets", index), "links", "<i8", 2))
        # Most pairs share several bands. Sorting all of them after each bucket would take longer than everything else.
        if sum(map(len, more)) > len(distinct):
            distinct, more = distinct_pairs([distinct, *more]), []
    found = clusters(distinct_pairs([distinct, *more]))
    aside.write("removed", found.removed.astype("<i8"))
    sizes = Counter(map(int, found.sizes))
    aside.values = {
        "removed": len(found.removed),
        "clusters": len(found.sizes),
        "sizes": {str(size): sizes[size] for size in sorted(sizes)},
    }


def removed(job: PrepareJob) -> Int[np.ndarray, " R"]:
    """The documents that are left out, ascending."""
    if job.plan.build.near_duplicates is None:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(read_array(result_of(job.folder, "clusters"), "removed", "<i8"))


def summary(work: Path, similarity: float) -> NearDuplicates:
    """The near-duplicates for the manifest."""
    found, banding = values_of(result_of(work, "clusters")), Banding.of(similarity)
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
                found[some] = checked_rows(self._pieces.folders[owner], rows)
        return found

    def _piece(self, index: int) -> np.ndarray:
        if index not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
            self._open[index] = read_signatures(self._pieces.folders[index], int(np.diff(self._pieces.firsts)[index]))
        self._open.move_to_end(index)
        return self._open[index]
