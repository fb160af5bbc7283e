"""The stages of near-duplicates: signatures (with the pieces), buckets of equal bands, clusters. Each result is a file.

A task of the buckets reads one band of all documents, or a slice of it if there are many, so its memory is bounded. Only
clusters need all links at once: 16 bytes for each near-duplicate and band.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt
from tokenizers import Tokenizer

from discern.data.dataset.manifest import NearDuplicates
from discern.data.near_duplicates import HASHES, NGRAM_WORDS, Banding, clusters, links
from discern.data.stages.pieces import Pieces
from discern.data.stages.plan import Plan
from discern.data.stages.results import read_array, result_folder, values_of

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
    """Number of slices of a band."""
    return max(1, -(-pieces.num_documents // DOCUMENTS_PER_BUCKET))


def num_buckets(work: Path, plan: Plan, tokenizer: Tokenizer) -> int:
    """Number of tasks of the buckets."""
    assert plan.near_duplicates is not None
    return Banding.of(plan.near_duplicates).bands * num_slices(Pieces(work, plan, tokenizer))


def make_bucket(work: Path, plan: Plan, tokenizer: Tokenizer, index: int) -> None:
    """Find the links of documents with an equal band."""
    assert plan.near_duplicates is not None
    pieces = Pieces(work, plan, tokenizer)
    banding = Banding.of(plan.near_duplicates)
    band, part = divmod(index, num_slices(pieces))
    keys, numbers = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
    for piece in range(len(plan.pieces)):
        found = pieces.array(piece, "bands", "<u8")
        count = len(found) // banding.bands
        ours = found[band * count : (band + 1) * count]
        # The low bits of a key are as good as random.
        (chosen,) = np.nonzero((ours != 0) & (ours % np.uint64(num_slices(pieces)) == part))
        keys.append(ours[chosen])
        numbers.append(chosen + pieces.firsts[piece])
    with result_folder(bucket_folder(work, index)) as aside:
        pairs = links(np.concatenate(keys), np.concatenate(numbers), _Signatures(pieces).of, plan.near_duplicates)
        aside.write("links", pairs.astype("<i8"))
        aside.values = {"links": len(pairs)}


def make_clusters(work: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Join the links of all bands to clusters."""
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for index in range(num_buckets(work, plan, tokenizer)):
        # Most pairs share several bands.
        pairs = [np.unique(np.concatenate([*pairs, read_array(bucket_folder(work, index), "links", "<i8", 2)]), axis=0)]
    with result_folder(clusters_folder(work)) as aside:
        found = clusters(pairs[0])
        aside.write("removed", found.removed.astype("<i8"))
        sizes = Counter(map(int, found.sizes))
        aside.values = {
            "removed": len(found.removed),
            "clusters": len(found.sizes),
            "sizes": {str(size): sizes[size] for size in sorted(sizes)},
        }


def removed(work: Path, plan: Plan) -> Int[np.ndarray, " R"]:
    """The documents that are left out, ascending."""
    if plan.near_duplicates is None:
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
                found[some] = self._piece(owner)[numbers[some] - self._pieces.firsts[owner]]
        return found

    def _piece(self, index: int) -> np.ndarray:
        if index not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
            self._open[index] = self._pieces.array(index, "signatures", "<u4", HASHES)
        self._open.move_to_end(index)
        return self._open[index]
