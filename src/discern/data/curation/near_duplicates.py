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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt

from discern.data.curation.contamination import words_of
from discern.data.sources.documents import Document
from discern.errors import ConfigError

HASHES = 128
"""Number of minima in a signature."""
NGRAM_WORDS = 5
LEAST_SIMILARITY = 0.5
"""Below this, so many documents become candidates that every pair of a large corpus would be compared."""

_CANDIDATE_PROBABILITY = 0.99
_REMEMBERED_WORDS = 1 << 20
_COMPARED_AT_ONCE = 1 << 14
# Of documents with an equal band that are not similar to each other, this many are compared with all others.
_ROUNDS = 16
_NO_WORDS = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Banding:
    """How signatures are cut: `bands` bands of `rows` minima each. Documents of similarity s share a band with probability
    1 - (1 - s ** rows) ** bands."""

    bands: int
    rows: int

    @classmethod
    def of(cls, similarity: float) -> Banding:
        """The longest bands with which 99% of the pairs of this similarity become candidates.

        Raises:
            ConfigError: the similarity is not between 0.5 and 1.
        """
        if not LEAST_SIMILARITY <= similarity <= 1:
            raise ConfigError(
                f"--near-duplicates is {similarity:g}, expected a similarity from {LEAST_SIMILARITY:g} to 1",
                hint="0.8 removes documents that share at least 80% of their runs of five words",
            )
        for rows in range(HASHES, 0, -1):
            bands = HASHES // rows
            if 1 - (1 - similarity**rows) ** bands >= _CANDIDATE_PROBABILITY:
                return cls(bands, rows)
        raise AssertionError("one row suffices for every similarity in the range")

    def keys(self, signatures: UInt[np.ndarray, "D 128"], band: int) -> UInt[np.ndarray, " D"]:
        """(D,) hash of one band of each signature; 0 for a document without words."""
        found = np.full(len(signatures), 0x9E3779B97F4A7C15, dtype=np.uint64)
        for row in range(band * self.rows, (band + 1) * self.rows):
            found = (found ^ signatures[:, row].astype(np.uint64)) * np.uint64(0xD6E8FEB86659FD93)
            found ^= found >> np.uint64(32)
        found[found == 0] = 1
        found[(signatures == _NO_WORDS).all(axis=1)] = 0
        return found


class Signer:
    """Computes the signatures of documents. Words are lower-cased, without punctuation."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        mixed = _mixed(np.arange(1, 2 * HASHES + 1, dtype=np.uint64))
        self._factors = (mixed[:HASHES] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        self._offsets = (mixed[HASHES:] >> np.uint64(32)).astype(np.uint32)

    def sign(self, documents: Sequence[Document]) -> UInt[np.ndarray, "D 128"]:
        """(D, 128) signatures. A document of fewer than five words is one 5-gram; one without words is similar to none."""
        signatures = np.empty((len(documents), HASHES), dtype=np.uint32)
        if not documents:
            return signatures
        grams, starts, counts = self.grams(documents)
        buffer = np.empty_like(grams)
        for index in range(HASHES):
            np.multiply(grams, self._factors[index], out=buffer)
            np.add(buffer, self._offsets[index], out=buffer)
            signatures[:, index] = np.minimum.reduceat(buffer, starts)
        signatures[counts == 0] = _NO_WORDS
        return signatures

    def grams(self, documents: Sequence[Document]) -> tuple[UInt[np.ndarray, " G"], Int[np.ndarray, " D"], Int[np.ndarray, " D"]]:
        """A 32-bit hash of each 5-gram, where those of each document start, and the number of words of each document."""
        words, lengths = array("Q"), []
        for document in documents:
            before = len(words)
            for sentence in document:
                words.extend(self._of(words_of(sentence)))
            found = len(words) - before
            words.extend([0] * max(0, NGRAM_WORDS - found))
            lengths.append(found)
        counts = np.array(lengths, dtype=np.int64)
        return (*_ngrams(np.array(words, dtype=np.uint64), np.maximum(counts, NGRAM_WORDS)), counts)

    def _of(self, words: list[str]) -> list[int]:
        """A number for each word."""
        values = self._values
        if len(values) > _REMEMBERED_WORDS:
            values.clear()
        for word in words:
            if word not in values:
                values[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return [values[word] for word in words]


def _ngrams(
    words: UInt[np.ndarray, " W"], lengths: Int[np.ndarray, " D"]
) -> tuple[UInt[np.ndarray, " G"], Int[np.ndarray, " D"]]:
    """A 32-bit hash of every n-gram inside a document, and where those of each document start."""
    total = words
    for place in range(1, NGRAM_WORDS):
        total = total[:-1] * np.uint64(0xD6E8FEB86659FD93) + words[place:]
    inside = np.ones(len(words), dtype=bool)
    ends = np.cumsum(lengths)
    for back in range(1, NGRAM_WORDS):
        inside[ends - back] = False
    grams = _mixed(total[inside[: len(total)]]) >> np.uint64(32)
    counts = lengths - (NGRAM_WORDS - 1)
    return grams.astype(np.uint32), np.cumsum(counts) - counts


def _mixed(values: UInt[np.ndarray, " n"]) -> UInt[np.ndarray, " n"]:
    """Splitmix64: neighboring numbers get unrelated ones."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


SignaturesOf = Callable[[Int[np.ndarray, " n"]], UInt[np.ndarray, "n 128"]]


def links(
    keys: UInt[np.ndarray, " n"], numbers: Int[np.ndarray, " n"], signatures_of: SignaturesOf, similarity: float
) -> Int[np.ndarray, "E 2"]:
    """Pairs of documents with an equal key whose signatures agree in at least this share, the earlier document first.

    Of the documents with one key, the first is compared with all others; those that are not similar to it go into the next
    round, up to 16.

    Args:
        keys: hashes of one band.
        numbers: the documents, ascending.
        signatures_of: gives the signatures of documents.
    """
    order = np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    found = [np.zeros((0, 2), dtype=np.int64)]
    for _ in range(_ROUNDS):
        begins = np.ones(len(keys), dtype=bool)
        begins[1:] = keys[1:] != keys[:-1]
        firsts = np.nonzero(begins)[0][np.cumsum(begins) - 1]
        pairs = np.stack([numbers[firsts[~begins]], numbers[~begins]], axis=1)
        similar = _similar(pairs, signatures_of, similarity)
        found.append(pairs[similar])
        keys, numbers = keys[~begins][~similar], numbers[~begins][~similar]
        if not len(keys):
            break
    return np.concatenate(found)


def _similar(pairs: Int[np.ndarray, "P 2"], signatures_of: SignaturesOf, similarity: float) -> Bool[np.ndarray, " P"]:
    least = int(np.ceil(similarity * HASHES - 1e-9))
    equal = [
        (signatures_of(some[:, 0]) == signatures_of(some[:, 1])).sum(axis=1) >= least
        for some in (pairs[first : first + _COMPARED_AT_ONCE] for first in range(0, len(pairs), _COMPARED_AT_ONCE))
    ]
    return np.concatenate(equal) if equal else np.zeros(0, dtype=bool)


def distinct_pairs(found: Sequence[np.ndarray]) -> Int[np.ndarray, "E 2"]:
    """The pairs of several (n, 2) arrays, each once, in order."""
    pairs = np.concatenate(found)
    if pairs.max(initial=0) >= 1 << 31:
        return np.unique(pairs, axis=0)
    packed = np.sort(pairs[:, 0] << 32 | pairs[:, 1])  # ten times faster than np.unique, which hashes
    new = np.ones(len(packed), dtype=bool)
    new[1:] = packed[1:] != packed[:-1]
    packed = packed[new]
    return np.stack([packed >> 32, packed & 0xFFFFFFFF], axis=1)


@dataclass(frozen=True)
class Clusters:
    """Clusters of near-duplicates.

    Attributes:
        removed: the documents that are not the first of their cluster, ascending.
        sizes: number of documents of each cluster, in the order of their first documents.
    """

    removed: Int[np.ndarray, " R"]
    sizes: Int[np.ndarray, " C"]


def clusters(pairs: Int[np.ndarray, "E 2"]) -> Clusters:
    """The clusters that linked documents form: union-find, in which the root of a cluster is its first document.

    All pairs are joined at once, and paths are halved until nothing changes; the number of rounds grows with the logarithm of
    the longest chain.
    """
    documents, ends = np.unique(pairs, return_inverse=True)
    one, other = ends.reshape(-1, 2).T
    root = np.arange(len(documents))
    while len(one):
        smaller = np.minimum(root[one], root[other])
        np.minimum.at(root, root[one], smaller)
        np.minimum.at(root, root[other], smaller)
        while (root[root] != root).any():
            root = root[root]
        apart = root[one] != root[other]
        one, other = one[apart], other[apart]
    counts = np.bincount(root, minlength=len(documents))
    return Clusters(documents[root != np.arange(len(documents))], counts[counts > 0])
