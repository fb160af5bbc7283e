"""Near-duplicates: documents that share most of their runs of five words, found by MinHash.

The similarity of two documents is the Jaccard similarity of their sets of word 5-grams. A signature of 128 minima estimates it:
the share of equal minima, with a standard error of at most 0.044. Signatures are cut into bands of some rows; documents with an
equal band are candidates, and those whose signatures agree often enough are linked. Linked documents, and what is linked to
them, are a cluster.

Every hash is fixed by constants and by BLAKE2, so that the result is the same in every process, on every machine.

Reference: Broder 1997; Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4; for text to train on, Lee et
al. 2022.
Differs: there, candidates count as duplicates, or are compared word by word; here, their whole signatures are compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int, UInt

from discern.data.curation.contamination import ngram_hashes, words_of
from discern.data.hashing import splitmix64
from discern.data.sources.documents import Document

HASHES = 128  # minima in a signature
NGRAM_WORDS = 5

Signatures = UInt[np.ndarray, "_ 128"]
_COMPARED_AT_ONCE = 1 << 14
_KEY_FACTORS = splitmix64(np.arange(1, 2 * HASHES + 1, dtype=np.uint64))
_FACTORS, _OFFSETS = np.split((_KEY_FACTORS >> 32).astype(np.uint32), 2)
_FACTORS |= 1


def banding(similarity: float) -> tuple[int, int]:
    """Numbers of bands and of rows: the longest bands with which 99% of the pairs of this similarity become candidates.

    Documents of similarity s share a band with probability 1 - (1 - s ** rows) ** bands.
    """
    rows = max(rows for rows in range(1, HASHES + 1) if 1 - (1 - similarity**rows) ** (HASHES // rows) >= 0.99)
    return HASHES // rows, rows


def sign(documents: Sequence[Document]) -> Signatures:
    """(D, 128) signatures. Words are lower-cased, without punctuation.

    A document of fewer than five words is one 5-gram; one without words has the signature 0 and is similar to none.
    """
    words, bounds, is_empty = array("Q"), array("q"), []
    for document in documents:
        begin = len(words)
        for sentence in document:
            words.extend(map(_word_hash, words_of(sentence)))
        is_empty.append(len(words) == begin)
        words.extend([0] * (begin + NGRAM_WORDS - len(words)))
        bounds.extend((begin, len(words) - NGRAM_WORDS + 1))
    (hashes,) = ngram_hashes(np.array(words, dtype=np.uint64), range(NGRAM_WORDS, NGRAM_WORDS + 1))
    grams = (splitmix64(hashes) >> 32).astype(np.uint32)
    signatures = np.empty((len(documents), HASHES), dtype=np.uint32)
    for index in range(HASHES):
        # The minima alternate between the 5-grams inside a document and those that reach across its end.
        signatures[:, index] = np.minimum.reduceat(grams * _FACTORS[index] + _OFFSETS[index], bounds[:-1])[::2]
    signatures[is_empty] = 0
    return signatures


@lru_cache(maxsize=1 << 18)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def links_of_band(signatures: Sequence[Signatures], band: int, similarity: float) -> Int[np.ndarray, "E 2"]:
    """(E, 2) pairs of documents with an equal band whose signatures agree in at least this share, the earlier document first.

    Of the documents with an equal band, the first is compared with all others; those that are not similar to it go into the next
    round, up to 16.

    Args:
        signatures: arrays, possibly mapped into memory, of the signatures of all documents, which are numbered in this order.
    """
    _, rows = banding(similarity)
    minima = slice(band * rows, (band + 1) * rows)
    keys = np.concatenate([part[:, minima].astype(np.uint64) @ _KEY_FACTORS[:rows] for part in signatures])
    (numbers,) = np.nonzero(keys)
    numbers = numbers[np.argsort(keys[numbers], kind="stable")]
    keys = keys[numbers]
    bounds = np.cumsum([0, *map(len, signatures)])
    links = []
    for _ in range(16):
        begins = np.ones(len(keys), dtype=bool)
        begins[1:] = keys[1:] != keys[:-1]
        firsts = numbers[begins][np.cumsum(begins) - 1]
        pairs = np.stack([firsts[~begins], numbers[~begins]], axis=1)
        similarities = []
        for some in np.array_split(pairs, len(pairs) // _COMPARED_AT_ONCE + 1):
            compared = np.empty((len(some), 2, HASHES), dtype=np.uint32)
            parts = np.searchsorted(bounds, some, side="right") - 1
            for part in np.unique(parts):
                compared[parts == part] = signatures[part][some[parts == part] - bounds[part]]
            similarities.append((compared[:, 0] == compared[:, 1]).mean(axis=1))
        similar = np.concatenate(similarities) >= similarity - 1e-9
        links.append(pairs[similar])
        keys, numbers = keys[~begins][~similar], numbers[~begins][~similar]
    return np.concatenate(links)


def clusters(links_of_bands: Iterable[Int[np.ndarray, "_ 2"]], num_documents: int) -> tuple[Int[np.ndarray, " R"], Counter[int]]:
    """The documents that are not the first of their cluster, ascending, and the number of clusters by number of documents.

    Args:
        links_of_bands: the links of every band, see `links_of_band`.
    """
    # Union-find, in which the root of a cluster is its first document. All links of a band are joined at once, and paths are
    # halved until nothing changes; the number of rounds grows with the logarithm of the longest chain.
    root = np.arange(num_documents)
    for links in links_of_bands:
        while len(links):
            np.minimum.at(root, root[links], root[links].min(axis=1, keepdims=True))
            while (root[root] != root).any():
                root = root[root]
            links = links[root[links[:, 0]] != root[links[:, 1]]]
    (removed,) = np.nonzero(root != np.arange(num_documents))
    _, others = np.unique(root[removed], return_counts=True)
    return removed, Counter((others + 1).tolist())
