"""Baselines of classification and regression: the most frequent label, and n-grams with a linear model."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast, final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import MultiLabelBinarizer

from discern.data.tokenizer.words import UNSPACED
from discern.tasks.base import Labels, Prediction
from discern.tasks.baselines.base import Baseline
from discern.tasks.examples import ClassificationExample, label_counts

_WORD = re.compile(r"\w+")
_LETTER = re.compile(r"[^\W\d_]")
_FEATURES = 100_000
# Features x classes: a larger multinomial model takes minutes.
_WEIGHTS = 3_000_000
# Better than scikit-learn's default of 1 on single texts, and hardly worse on pairs (benchmarks/records,
# "finetune-defaults").
_INVERSE_REGULARIZATION = 10.0


def text_baselines(labels: Labels) -> list[Baseline[ClassificationExample]]:
    """Baselines of a classification task with these labels."""
    return [MostFrequent(labels), TfIdf(labels)]


@final
class MostFrequent(Baseline[ClassificationExample]):
    """The most frequent class of the training examples, the most frequent set of classes, or the median of numbers."""

    name: ClassVar[str] = "majority"

    def __init__(self, labels: Labels) -> None:
        self._kind = labels.kind
        self.title = {"number": "the median of the training labels", "multi": "the most frequent set of labels"}.get(
            labels.kind, "the most frequent class"
        )

    def predict(
        self, train: Sequence[ClassificationExample], examples: Sequence[ClassificationExample]
    ) -> list[Prediction] | None:
        prediction: Prediction
        if self._kind == "number":
            prediction = {"score": float(np.median([cast(float, example.label) for example in train]))}
        elif self._kind == "multi":
            sets = Counter(tuple(sorted(cast(tuple[str, ...], example.label))) for example in train)
            most = max(sets.values())
            prediction = {"labels": list(min(chosen for chosen, count in sets.items() if count == most))}
        else:
            prediction = {"label": next(iter(label_counts(train)))}
        return [{"id": example.id, **prediction} for example in examples]


@final
class TfIdf(Baseline[ClassificationExample]):
    """TF-IDF of words and pairs of words with logistic regression, or ridge regression for numbers.

    Text without spaces between words has n-grams of characters instead. The features of a pair are those of the second text, the
    products and distances of both, and their overlap.
    """

    name: ClassVar[str] = "tfidf"

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self.title = f"TF-IDF with {'ridge' if labels.kind == 'number' else 'logistic'} regression"

    def predict(
        self, train: Sequence[ClassificationExample], examples: Sequence[ClassificationExample]
    ) -> list[Prediction] | None:
        if self._labels.kind == "single" and len(label_counts(train)) < 2:
            return None
        features = _NGrams(self._labels, train)
        seen = features.learned(train)
        if seen is None:
            return None
        with warnings.catch_warnings():
            # A model that has not converged is still a baseline, and a label of all examples is still a label.
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.filterwarnings("ignore", "Label .* is present in all training examples", UserWarning)
            return self._fitted(seen, train, features.of(examples), examples)

    def _fitted(
        self,
        seen: sparse.csr_matrix,
        train: Sequence[ClassificationExample],
        unseen: sparse.csr_matrix,
        examples: Sequence[ClassificationExample],
    ) -> list[Prediction]:
        gold: list[Any] = [example.label for example in train]
        if self._labels.kind == "number":
            scores = Ridge(alpha=1.0).fit(seen, np.array(gold, np.float64)).predict(unseen)
            return [{"id": each.id, "score": float(score)} for each, score in zip(examples, scores, strict=True)]
        if self._labels.kind == "multi":
            names = MultiLabelBinarizer(classes=list(self._labels.names))
            each_alone = LogisticRegression(C=_INVERSE_REGULARIZATION, solver="liblinear", random_state=0)
            predicted = OneVsRestClassifier(each_alone).fit(seen, names.fit_transform(gold)).predict(unseen)
            # With a single label, one number for each text.
            chosen = names.inverse_transform(np.asarray(predicted).reshape(len(examples), -1))
            return [{"id": each.id, "labels": list(labels)} for each, labels in zip(examples, chosen, strict=True)]
        model = LogisticRegression(C=_INVERSE_REGULARIZATION, max_iter=100).fit(seen, np.array(gold, dtype=str))
        classes = model.predict(unseen)
        return [{"id": each.id, "label": str(label)} for each, label in zip(examples, classes, strict=True)]


class _NGrams:
    """TF-IDF features of single texts or of pairs."""

    def __init__(self, labels: Labels, train: Sequence[ClassificationExample]) -> None:
        most = min(_FEATURES, _WEIGHTS // max(1, len(labels.names)))
        self._unspaced = _is_unspaced(each.text for each in train)
        of_words: dict[str, Any] = {"ngram_range": (1, 2), "token_pattern": r"(?u)\b\w+\b"}
        n_grams: dict[str, Any] = {"analyzer": "char", "ngram_range": (1, 3)} if self._unspaced else of_words
        self._vectorizer = TfidfVectorizer(**n_grams, max_features=most, sublinear_tf=True)

    def learned(self, train: Sequence[ClassificationExample]) -> sparse.csr_matrix | None:
        """Fit the n-grams, and return the features of the training examples; None if there are no n-grams."""
        try:
            self._vectorizer.fit([*(each.text for each in train), *(each.pair for each in train if each.pair is not None)])
        except ValueError:  # "empty vocabulary": texts of punctuation only have no words
            return None
        return self.of(train)

    def of(self, examples: Sequence[ClassificationExample]) -> sparse.csr_matrix:
        """The features, one row per example."""
        first = self._vectorizer.transform(each.text for each in examples)
        if not examples or examples[0].pair is None:
            return first
        second = self._vectorizer.transform(each.pair or "" for each in examples)
        products = first.multiply(second)
        # The overlap of two texts is more telling than their n-grams, and works for unseen words too.
        shared = np.array([_shared(each.text, each.pair or "", unspaced=self._unspaced) for each in examples])
        likeness = sparse.csr_matrix(np.column_stack([np.asarray(products.sum(1)), shared]))
        return sparse.hstack([second, products, abs(first - second), likeness], format="csr")


def _shared(first: str, second: str, *, unspaced: bool) -> list[float]:
    """Fraction of the words, and of the trigrams of characters, of each text that the other contains.

    Text without spaces has characters instead of words.
    """
    shares = []
    words = [list(text.lower()) if unspaced else _WORD.findall(text.lower()) for text in (first, second)]
    lines = [f" {' '.join(each)} " for each in words]
    trigrams = [[line[start : start + 3] for start in range(len(line) - 2)] for line in lines]
    for one, other in (map(set, words), map(set, trigrams)):
        common = len(one & other)
        shares += [common / max(len(one), 1), common / max(len(other), 1)]
    return shares


def _is_unspaced(texts: Iterable[str]) -> bool:
    """Whether most letters belong to a script without spaces between words."""
    counts: NDArray[np.int64] = np.zeros(2, np.int64)
    for text in texts:
        counts += (len(UNSPACED.findall(text)), len(_LETTER.findall(text)))
        if counts[1] > 100_000:
            break
    return bool(2 * counts[0] > counts[1])
