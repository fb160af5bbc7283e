"""MinHash: the estimate against the Jaccard similarity itself, bands against their formula, clusters against a walk."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from discern.data.curation.near_duplicates import HASHES, NGRAM_WORDS, Banding, Signer, clusters, distinct_pairs, links
from discern.errors import ConfigError


def document(words: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [f"w{draw.randrange(10_000)}" for _ in range(words)]


def edited(words: list[str], share: float, seed: int) -> list[str]:
    """The words with a share of them replaced."""
    draw = random.Random(seed)
    places = set(draw.sample(range(len(words)), round(share * len(words))))
    return [f"x{seed}n{place}" if place in places else word for place, word in enumerate(words)]


def jaccard(one: list[str], other: list[str]) -> float:
    grams = [{tuple(text[i : i + NGRAM_WORDS]) for i in range(len(text) - NGRAM_WORDS + 1)} for text in (one, other)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def signatures(*documents: list[str]) -> np.ndarray:
    return Signer().sign([[" ".join(words)] for words in documents])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.03, 0.1, 0.3])
def test_the_estimate_is_the_jaccard_similarity(share: float) -> None:
    originals = [document(300, seed) for seed in range(60)]
    copies = [edited(words, share, seed) for seed, words in enumerate(originals)]
    found = (signatures(*originals) == signatures(*copies)).mean(axis=1)
    expected = np.array([jaccard(*pair) for pair in zip(originals, copies, strict=True)])
    # 60 x 128 minima: the mean has a standard error of at most 0.006.
    assert abs((found - expected).mean()) < 0.025
    assert (found - expected).std() < 0.06
    if not share:
        assert (found == 1).all()


def test_case_punctuation_and_lines_do_not_matter() -> None:
    one, other = Signer().sign([["The cat sat, on the mat.", "It slept!"], ["the cat SAT on the", "mat it slept"]])
    assert (one == other).all()


def test_short_documents_are_similar_only_if_equal() -> None:
    found = Signer().sign([["a b"], ["A, b"], ["b a"], ["..."], ["!!"]])
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).all()
    keys = Banding.of(0.8).keys(found, 0)
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4] == 0  # no words: similar to nothing


def test_the_documents_around_do_not_matter() -> None:
    texts = [document(size, size) for size in (3, 300, 5, 6, 0, 40)]
    together = signatures(*texts)
    for index, words in enumerate(texts):
        assert (signatures(words)[0] == together[index]).all()


@pytest.mark.parametrize(
    ("similarity", "bands", "rows"), [(0.5, 42, 3), (0.7, 32, 4), (0.8, 21, 6), (0.9, 12, 10), (1.0, 1, 128)]
)
def test_the_bands(similarity: float, bands: int, rows: int) -> None:
    found = Banding.of(similarity)
    assert (found.bands, found.rows) == (bands, rows)
    assert bands * rows <= HASHES


@pytest.mark.parametrize("similarity", [0.0, 0.49, 1.01, -1, float("nan")])
def test_no_similarity(similarity: float) -> None:
    with pytest.raises(ConfigError, match="expected a similarity from"):
        Banding.of(similarity)


def test_links_of_a_bucket_with_two_groups_that_are_not_similar() -> None:
    """All five have one key; two pairs are similar, and the fifth document is alone."""
    one, other, alone = document(200, 1), document(200, 2), document(200, 3)
    signed = signatures(one, other, one, other, alone)
    found = links(np.full(5, 7, dtype=np.uint64), np.arange(5), lambda numbers: signed[numbers], 0.8)
    assert sorted(map(tuple, found.tolist())) == [(0, 2), (1, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_connected_components(seed: int) -> None:
    draw = np.random.default_rng(seed)
    pairs = np.sort(draw.integers(0, 500, size=(200, 2)), axis=1)
    pairs = np.concatenate([pairs, np.stack([np.arange(600, 700), np.arange(601, 701)], axis=1)])  # and a long chain
    neighbors: dict[int, set[int]] = {}
    for a, b in pairs.tolist():
        neighbors.setdefault(a, set()).add(b)
        neighbors.setdefault(b, set()).add(a)
    seen: set[int] = set()
    removed, sizes = [], []
    for start in sorted(neighbors):
        if start in seen:
            continue
        group, todo = {start}, [start]
        while todo:
            new = neighbors[todo.pop()] - group
            group |= new
            todo += new
        seen |= group
        removed += sorted(group)[1:]
        sizes.append(len(group))
    found = clusters(pairs)
    assert found.removed.tolist() == sorted(removed)
    assert found.sizes.tolist() == sizes


@pytest.mark.parametrize("largest", [50, 1 << 31, 1 << 40])
def test_pairs_of_several_bands_are_counted_once(largest: int) -> None:
    draw = np.random.default_rng(0)
    found = [draw.integers(largest - 50, largest, size=(count, 2)) for count in (0, 900, 500)]
    np.testing.assert_array_equal(distinct_pairs(found), np.unique(np.concatenate(found), axis=0))


def test_no_links() -> None:
    found = clusters(np.zeros((0, 2), dtype=np.int64))
    assert (len(found.removed), len(found.sizes)) == (0, 0)


def test_signatures_are_the_same_in_every_process() -> None:
    program = (
        "from discern.data.curation.near_duplicates import Signer; "
        "print(Signer().sign([['the cat sat on the mat today']]).tolist())"
    )
    printed = {
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(printed) == 1
    assert printed.pop().strip() == str(Signer().sign([["the cat sat on the mat today"]]).tolist())
