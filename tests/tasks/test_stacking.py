from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from torch import nn

from discern.models.heads import NGrams
from discern.tasks.features import Features, Ragged
from discern.tasks.supervised import fit_few_shot, fit_ngrams, fit_scales

rng = np.random.default_rng(0)
# No n-gram occurs twice in a text.
TEXTS = [rng.permutation(35)[: rng.integers(3, 9)].tolist() for _ in range(60)]
LABELS = rng.integers(0, 3, 60)
FEATURES = Features(Ragged.of(TEXTS), Ragged.of([[0] * len(text) for text in TEXTS]), np.arange(60), {"class": LABELS})


def logits_of(ngrams: NGrams) -> torch.Tensor:
    rows = [torch.tensor([text]) for text in TEXTS]
    return torch.cat([ngrams(row, row >= 0, torch.zeros_like(row)) for row in rows])


@torch.no_grad()
def test_n_grams_are_tf_idf_with_logistic_regression() -> None:
    ngrams = NGrams(3)
    fit_ngrams(ngrams, FEATURES)
    matrix = TfidfVectorizer(analyzer=lambda text: map(str, [*text, *pairwise(text)])).fit_transform(TEXTS)
    expected = LogisticRegression(C=10, tol=1e-6).fit(matrix, LABELS).predict_proba(matrix)
    np.testing.assert_allclose(logits_of(ngrams).softmax(-1), expected, atol=2e-3)


@torch.no_grad()
def test_n_grams_predict_scores_by_ridge_regression() -> None:
    ngrams, scores = NGrams(1), rng.normal(size=60)
    fit_ngrams(ngrams, replace(FEATURES, targets={"score": scores}))
    matrix = TfidfVectorizer(analyzer=lambda text: map(str, [*text, *pairwise(text)])).fit_transform(TEXTS)
    expected = Ridge(alpha=scores.var() / 10, tol=1e-6).fit(matrix, scores).predict(matrix)
    np.testing.assert_allclose(logits_of(ngrams)[:, 0], expected, atol=2e-3)


@pytest.mark.parametrize(("count", "expected"), [(10_000, (0.25, 0.75)), (1, (0.5, 0.5))])
def test_the_shares_of_two_predictions_of_a_score(count: int, expected: tuple[float, float]) -> None:
    """Independent errors, with variances 3 and 1; with a single row, the mean."""
    scores = rng.normal(size=count)
    outputs = [torch.from_numpy(scores + deviation * rng.normal(size=count))[:, None] for deviation in (0.03**0.5, 0.1)]
    assert fit_scales(outputs, {"score": scores}) == pytest.approx(expected, abs=0.05)


@torch.no_grad()
def test_two_texts_share_fractions_of_their_tokens_and_pairs() -> None:
    """Texts 5 6 7 and 5 6 8 9, where 5 is three times as informative; the pair 7 5 counts for the second text."""
    ngrams = NGrams(2, pairs=True)
    ids, segments = torch.tensor([[5, 6, 7, 5, 6, 8, 9, 0]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]])
    ngrams.frequencies[ngrams.hashes(ids, ids > 0)[0][0, 0]] = 3.0
    expected = [2 / 3, 2 / 4, 1 / 2, 1 / 4, 4 / 5, 4 / 6, 1 / 2, 1 / 4]
    torch.testing.assert_close(ngrams.features(ids, ids > 0, segments)[2], torch.tensor([expected]))


@torch.no_grad()
def test_what_two_texts_share_decides_for_words_that_were_never_seen() -> None:
    def rows(first_word: int) -> Features:
        words = [(rng.permutation(30)[:8] + first_word).tolist() for _ in range(40)]
        texts = [[*each[:4], *(each[2:6] if same else each[4:])] for each, same in zip(words, [0, 1] * 20, strict=True)]
        return Features(Ragged.of(texts), Ragged.of([[0] * 4 + [1] * 4] * 40), np.arange(40), {"class": np.array([0, 1] * 20)})

    ngrams, unseen = NGrams(2, pairs=True), rows(100)
    fit_ngrams(ngrams, rows(10))
    ids, segments = (
        torch.from_numpy(column.values.reshape(40, 8).astype(np.int64)) for column in (unseen.input_ids, unseen.token_types)
    )
    np.testing.assert_array_equal(ngrams(ids, ids > 0, segments).argmax(1), unseen.targets["class"])


@pytest.mark.parametrize(("count", "expected"), [(4000, np.log(3) / 2), (0, 0.3)])
def test_the_temperature_follows_from_the_frequencies_or_the_prior(count: int, expected: float) -> None:
    """Logits (2, 0) that are right in 3 of 4 cases: probability 3/4 at the scale ln(3) / 2."""
    labels = np.array([0, 0, 0, 1] * (count // 4), np.int64)
    assert fit_scales([torch.tensor([[2.0, 0.0]]).expand(count, 2)], {"class": labels}) == pytest.approx([expected], abs=2e-3)


@torch.no_grad()
def test_the_better_predictor_decides() -> None:
    output, ngrams = nn.Linear(3, 3), NGrams(3)
    fit_few_shot(output, ngrams, torch.eye(3)[LABELS], FEATURES)
    unseen = np.roll(LABELS, 1)
    np.testing.assert_array_equal((output(torch.eye(3)[unseen]) + logits_of(ngrams)).argmax(1), unseen)
