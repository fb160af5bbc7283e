"""MinHash: the estimate against the Jaccard similarity itself, bands against their formula, clusters against a walk."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from discern.data.curation.near_duplicates import NGRAM_WORDS, banding, clusters, links_of_band, sign


def document(words: int, seed: int) -> list[str]:
    return [f"w{number}" for number in random.Random(seed).choices(range(10_000), k=words)]


def edited(words: list[str], share: float, seed: int) -> list[str]:
    """The words with a share of them replaced."""
    places = random.Random(seed).sample(range(len(words)), round(share * len(words)))
    return [f"x{seed}n{place}" if place in places else word for place, word in enumerate(words)]


def signatures(*documents: list[str]) -> np.ndarray:
    return sign([[" ".join(words)] for words in documents])


def jaccard(one: list[str], other: list[str]) -> float:
    grams = [{tuple(text[i : i + NGRAM_WORDS]) for i in range(len(text) - NGRAM_WORDS + 1)} for text in (one, other)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1])
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


def test_case_punctuation_lines_and_other_documents_do_not_matter() -> None:
    texts = [["The cat sat, on the mat.", "It slept!"], ["a b"], ["the cat SAT on the", "mat it slept"], [], ["b a"], ["A, b"]]
    found = sign(texts)
    for index, text in enumerate(texts):
        assert (sign([text])[0] == found[index]).all()
    assert (found[0] == found[2]).all()
    assert (found[1] == found[5]).all()
    assert (found[1] != found[4]).all(), "short documents are similar only if they are equal"


def test_signatures_are_the_same_in_every_process_and_version() -> None:
    (found,) = sign([["the cat sat on the mat today"]])
    assert found[:3].tolist() == [524_890_208, 60_605_560, 1_985_014_628]


@pytest.mark.parametrize(("similarity", "bands", "rows"), [(0.5, 42, 3), (0.8, 21, 6)])
def test_the_bands(similarity: float, bands: int, rows: int) -> None:
    assert banding(similarity) == (bands, rows)


def test_an_equal_band_with_two_groups_that_are_not_similar() -> None:
    """All five have an equal first band; two pairs are similar, and the fifth document is alone. Two have no words."""
    one, other, alone = document(200, 1), document(200, 2), document(200, 3)
    signed = np.concatenate([signatures(one, other, one, other, alone), sign([["..."], ["!!"]])])
    signed[:5, :6] = 7
    parts = [signed[:1], signed[1:1], signed[1:4], signed[4:]]
    assert sorted(map(tuple, links_of_band(parts, 0, 0.8).tolist())) == [(0, 2), (1, 3)]


def test_the_first_of_similar_documents_is_kept() -> None:
    originals = [document(300, seed) for seed in range(60)]
    copies = [edited(words, 0.3 * (seed % 2), seed) for seed, words in enumerate(originals)]
    signed = signatures(*originals, *copies, *originals[:10])
    for parts in ([signed], np.array_split(signed, 7)):
        removed, sizes = clusters((links_of_band(parts, band, 0.8) for band in range(21)), len(signed))
        assert removed.tolist() == [*range(60, 120, 2), *range(120, 130)]
        assert sizes == {2: 30, 3: 5}


def test_clusters_of_documents_that_are_linked_by_others() -> None:
    draw = random.Random(0)
    chain, tree = draw.sample(range(100), k=100), [(draw.randrange(100, number), number) for number in range(101, 200)]
    pairs = [*map(sorted, itertools.pairwise(chain)), *tree, (300, 301)]
    bands = np.array_split(np.array(draw.sample(pairs, k=199)), 3)
    removed, sizes = clusters(bands, 302)
    assert removed.tolist() == [*range(1, 100), *range(101, 200), 301]
    assert sizes == {100: 2, 2: 1}
