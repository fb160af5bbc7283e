"""Simple predictors to compare a network with, models of scikit-learn and rules, and their evaluation on its examples.

scikit-learn takes a second to import, so it is imported when baselines are measured.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import numpy as np

from discern.data.batching.stream import derive_key, permute
from discern.data.tokenizer.words import UNSPACED
from discern.errors import counted
from discern.tasks.base import ClassificationExample, Labels, Prediction, QuestionExample, TaggingExample, Task
from discern.tasks.tags import Scheme, convert

E = TypeVar("E")

# With more, baselines take too long for a side result: 20 seconds and 1 GB of memory for these characters on one core. The
# limits leave out whole examples: what decides the label may be at the end of a text.
TRAINING_EXAMPLES = 20_000
TRAINING_CHARACTERS = 20_000_000
EVALUATED_EXAMPLES = 50_000
EVALUATED_CHARACTERS = 100_000_000
# Metrics that are published together, by headline metric: a model beats a baseline if the first is higher and the second is not
# lower. One exactly right answer of a thousand is more than the exact match of whole sentences.
_PUBLISHED_TOGETHER = {
    "exact_match": ("f1", "exact_match"),
    "f1": ("f1", "exact_match"),
    "accuracy": ("accuracy", "f1"),
    "spearman": ("spearman", "pearson"),
}


@dataclass(frozen=True)
class Baseline(Generic[E]):
    """A simple predictor, trained and applied in seconds. The same examples give the same predictions.

    Attributes:
        name: key in results.
        title: description within a sentence: "TF-IDF with logistic regression".
        predict: trains on labeled examples, its first argument, and predicts others. A ValueError says that they are unusable:
            texts without a single word.
    """

    name: str
    title: str
    predict: Callable[[Sequence[E], Sequence[E]], list[Prediction]]


@dataclass(frozen=True)
class BaselineScore:
    """Scores and predictions of a baseline.

    Attributes:
        metrics: metrics by name, the headline metric first.
        train_examples: number of training examples.
        predictions: predictions for the evaluated examples.
    """

    name: str
    title: str
    metrics: dict[str, float]
    train_examples: int
    predictions: list[Prediction]

    def record(self) -> dict[str, Any]:
        """The score as JSON values."""
        return {"title": self.title, "metrics": self.metrics, "train_examples": self.train_examples}


def measure_baselines(
    task: Task[Any], train: Sequence[Any], examples: Sequence[Any], warn: Callable[[str], None]
) -> Iterator[BaselineScore]:
    """Yield the score of each baseline of a task, the simplest first.

    Baselines are trained on a random sample of at most `TRAINING_EXAMPLES` examples and about `TRAINING_CHARACTERS` characters.
    There are none if the examples to evaluate on exceed `EVALUATED_EXAMPLES` or `EVALUATED_CHARACTERS`.

    Args:
        train: training examples of the network.
        examples: examples that the network is evaluated on.
        warn: receives a message about each of these limits, and about each baseline that fails, which does not end the
            fine-tuning.
    """
    if len(examples) > EVALUATED_EXAMPLES or _characters(examples) > EVALUATED_CHARACTERS:
        limits = f"{EVALUATED_EXAMPLES:,} examples or {EVALUATED_CHARACTERS:,} characters"
        warn(f"{task.name}: no baselines: there are more than {limits} to evaluate on")
        return
    total = len(train)
    train = sample(train, TRAINING_EXAMPLES)
    train = sample(train, len(train) * TRAINING_CHARACTERS // max(_characters(train), 1))
    if len(train) < total:
        warn(f"{task.name}: baselines are trained on {len(train):,} of the {total:,} training examples")
    for baseline in task.baselines():
        try:
            predictions = baseline.predict(train, examples)
        except (ValueError, MemoryError) as error:
            warn(f"baseline left out: {baseline.title}: {error}")
            continue
        metrics = dict(task.score(examples, predictions).values)
        yield BaselineScore(baseline.name, baseline.title, metrics, len(train), predictions)


def sample(examples: Sequence[E], count: int, purpose: str = "baseline rows") -> Sequence[E]:
    """A random sample of `count` examples, at least one, in their order; all of them if there are no more.

    Samples for one purpose are reproducible.
    """
    size = len(examples)
    if size <= count:
        return examples
    rows = np.sort(permute(np.arange(max(1, count)), size, derive_key(purpose, size)))
    return [examples[row] for row in rows]


def _characters(examples: Sequence[object]) -> int:
    """Number of characters of the examples, with their ids and labels."""
    return sum(len(repr(example)) for example in examples)


def deciding_metrics(metric: str, metrics: Mapping[str, float]) -> list[str]:
    """The metrics by which a model and a baseline are compared, the decisive one first.

    Args:
        metric: headline metric of the task.
        metrics: its metrics by name.
    """
    return [name for name in _PUBLISHED_TOGETHER.get(metric, (metric,)) if name in metrics]


def best_baseline(metric: str, baselines: Sequence[BaselineScore]) -> BaselineScore | None:
    """The baseline with the highest decisive metric; None without baselines.

    Args:
        metric: headline metric of the task.
    """
    return max(
        baselines, key=lambda score: [score.metrics[name] for name in deciding_metrics(metric, score.metrics)], default=None
    )


def comparison_sentence(entry: Mapping[str, Any]) -> str | None:
    """A sentence about the model and its best baseline; None without one.

    Args:
        entry: results of a task, with `comparison`, `baselines`, `best_baseline` and `examples`.
    """
    comparison = entry.get("comparison")
    if comparison is None:
        return None
    best, metric = entry["baselines"][entry["best_baseline"]], comparison["metric"]
    name = f"{best['title']} ({metric} {best['metrics'][metric]:.4f})"
    if comparison["verdict"] == "undecided":
        return f"Compared to {name}: no difference that {counted(entry['examples'], 'example')} can show."
    low, high = comparison["interval"]
    verb = "beats" if comparison["verdict"] == "better" else "does not reach"
    return f"The model {verb} {name}: the difference is {comparison['difference']:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}."


Texts = Sequence[ClassificationExample]
Sentences = Sequence[TaggingExample]
Questions = Sequence[QuestionExample]
# In text that is written without spaces, each character is a word.
_WORD = re.compile(rf"{UNSPACED.pattern}|[^\W{UNSPACED.pattern[1:]}+")
_FEATURES = 100_000
# Features x classes: a larger multinomial model takes minutes.
_WEIGHTS = 3_000_000
# Better than scikit-learn's default of 1 on single texts, and hardly worse on pairs (benchmarks/records,
# "finetune-defaults").
_INVERSE_REGULARIZATION = 10.0
# Of the perceptron: features x tags, some 100 MB of memory, and words x tags, some 15 seconds on one core.
_TAG_WEIGHTS = 20_000_000
_WORD_TAGS = 10_000_000
# A sentence ends at its punctuation mark, including quotation marks and brackets after it, or at the end of a line.
_SENTENCE = re.compile("[^\n]+?(?:[.!?](?=[\"')\\]]*(?:\\s|$))[\"')\\]]*|[。！？；][”’」』）]*|(?=\n)|$)")


def text_baselines(labels: Labels) -> list[Baseline[ClassificationExample]]:
    """The most frequent label, or the median of numbers; and TF-IDF with a linear model."""
    titles = {"number": "the median of the training labels", "multi": "the most frequent set of labels"}
    linear = "ridge" if labels.kind == "number" else "logistic"
    return [
        Baseline("majority", titles.get(labels.kind, "the most frequent class"), partial(_most_frequent_label, labels)),
        Baseline("tfidf", f"TF-IDF with {linear} regression", partial(_tfidf, labels)),
    ]


def tag_baselines(labels: Labels) -> list[Baseline[TaggingExample]]:
    """The most frequent tag of each word, and an averaged perceptron."""
    return [
        Baseline("majority", "the most frequent tag of each word", partial(_most_frequent_tags, labels)),
        Baseline("perceptron", "an averaged perceptron", partial(_perceptron, labels)),
    ]


def answer_baselines(*, threshold: float, has_impossible: bool) -> list[Baseline[QuestionExample]]:
    """No answer, if questions may have none; and the sentence of the context most similar to the question.

    Args:
        threshold: the answer is empty if `no_answer` exceeds it.
    """
    no_answer = Baseline("no-answer", "leaving every question unanswered", partial(_no_answer, threshold))
    title = "the sentence that shares the most words with the question"
    sentence = Baseline("overlap-sentence", title, partial(_overlap_sentence, threshold))
    return [no_answer, sentence] if has_impossible else [sentence]


def _most_frequent_label(labels: Labels, train: Texts, examples: Texts) -> list[Prediction]:
    gold: list[Any] = [example.label for example in train]
    prediction: Prediction
    if labels.kind == "number":
        prediction = {"score": float(np.median(gold))}
    elif labels.kind == "multi":
        prediction = {"labels": list(_most_frequent([tuple(sorted(names)) for names in gold]))}
    else:
        prediction = {"label": _most_frequent(gold)}
    return [{"id": example.id, **prediction} for example in examples]


def _most_frequent(values: Sequence[Any]) -> Any:
    """The most frequent value; of several, the first in their order."""
    return Counter(sorted(values)).most_common(1)[0][0]


def _tfidf(labels: Labels, train: Texts, examples: Texts) -> list[Prediction]:
    """TF-IDF of words and pairs of words with logistic regression, or ridge regression for numbers."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import MultiLabelBinarizer

    max_features = min(_FEATURES, _WEIGHTS // max(1, len(labels.names)))
    vectorizer = TfidfVectorizer(token_pattern=_WORD.pattern, ngram_range=(1, 2), max_features=max_features, sublinear_tf=True)
    vectorizer.fit([text for example in train for text in (example.text, example.pair) if text is not None])
    train_features, features = (_features(vectorizer, rows) for rows in (train, examples))
    gold: list[Any] = [example.label for example in train]
    with warnings.catch_warnings():
        # A model that has not converged is still a baseline, and a label of all examples is still a label.
        warnings.simplefilter("ignore")
        if labels.kind == "number":
            key, predicted = "score", Ridge().fit(train_features, gold).predict(features).tolist()
        elif labels.kind == "multi":
            binarizer = MultiLabelBinarizer(classes=list(labels.names))
            model = OneVsRestClassifier(LogisticRegression(C=_INVERSE_REGULARIZATION, solver="liblinear", random_state=0))
            indicators = model.fit(train_features, binarizer.fit_transform(gold)).predict(features)
            # With a single label, one number for each text.
            sets = binarizer.inverse_transform(indicators.reshape(len(examples), -1))
            key, predicted = "labels", [list(names) for names in sets]
        else:
            classifier = LogisticRegression(C=_INVERSE_REGULARIZATION).fit(train_features, gold)
            key, predicted = "label", classifier.predict(features).tolist()
    return [{"id": example.id, key: value} for example, value in zip(examples, predicted, strict=True)]


def _features(vectorizer: Any, examples: Texts) -> Any:
    """The features of single texts; or of pairs: those of the second text, products and distances, and the overlap."""
    from scipy import sparse
    from sklearn.feature_extraction.text import CountVectorizer

    # Words separated by spaces, so that trigrams of characters tell where words begin and end.
    texts = [f" {' '.join(_WORD.findall(text.lower()))} " for example in examples for text in (example.text, example.pair or "")]
    first = vectorizer.transform(texts[::2])
    if examples[0].pair is None:
        return first
    second = vectorizer.transform(texts[1::2])
    products = first.multiply(second)
    # The fraction of the words, and of the trigrams of characters, of each text that the other contains. It is more telling than
    # n-grams, and works for unseen words too.
    overlaps = [products.sum(1)]
    for counter in (CountVectorizer(token_pattern=_WORD.pattern), CountVectorizer(analyzer="char", ngram_range=(3, 3))):
        counts = counter.set_params(binary=True).fit_transform(texts)
        one, other = counts[::2], counts[1::2]
        common = one.multiply(other).sum(1)
        overlaps += [common / np.maximum(one.sum(1), 1), common / np.maximum(other.sum(1), 1)]
    return sparse.hstack([second, products, abs(first - second), np.hstack(overlaps)], format="csr")


def _most_frequent_tags(labels: Labels, train: Sentences, examples: Sentences) -> list[Prediction]:
    """The most frequent tag of each word in the training examples; for unknown words the most frequent tag overall."""
    words = [word for example in train for word in example.words]
    tags = [tag for example in train for tag in example.tags or ()]
    tag_of_word: dict[str, str] = {}
    for (word, tag), _ in Counter(sorted(zip(words, tags, strict=True))).most_common():
        tag_of_word.setdefault(word, tag)
    default = _most_frequent(tags)
    return _tagged(labels, examples, [[tag_of_word.get(word, default) for word in example.words] for example in examples])


def _perceptron(labels: Labels, train: Sentences, examples: Sentences) -> list[Prediction]:
    """An averaged perceptron per tag over the words, affixes and shapes around a word, and the tag before it.

    Sentences are tagged from left to right, each word with the tag that scores best.
    """
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import SGDClassifier

    # Train on as many sentences as there is time for, with the gold tag of the word before
    words = sum(len(example.words) for example in train)
    train = sample(train, len(train) * _WORD_TAGS // (words * len(labels.names)))
    hasher = FeatureHasher(_TAG_WEIGHTS // len(labels.names), input_type="string", dtype=np.float32)
    tags = [tag for example in train for tag in example.tags or ()]
    features = hasher.transform(
        _word_features(example.words, position, (example.tags or ())[position - 1] if position else "")
        for example in train
        for position in range(len(example.words))
    )
    model = SGDClassifier(
        loss="perceptron", penalty=None, learning_rate="constant", eta0=1.0, average=True, max_iter=5, tol=None, random_state=0
    )
    model.fit(features, tags)

    # Tag the words of all sentences at the same position together
    predicted = [[""] for _ in examples]
    for position in range(max(len(example.words) for example in examples)):
        rows = [row for row, example in enumerate(examples) if position < len(example.words)]
        features = hasher.transform(_word_features(examples[row].words, position, predicted[row][-1]) for row in rows)
        for row, tag in zip(rows, model.predict(features).tolist(), strict=True):
            predicted[row].append(tag)
    return _tagged(labels, examples, [tags[1:] for tags in predicted])


def _word_features(words: Sequence[str], position: int, previous_tag: str) -> list[str]:
    """The words around a word with their endings and shapes, pairs of them, its affixes, and the tag before it."""
    word, window = words[position].lower(), ["", "", *words, "", ""][position : position + 5]
    features = [f"previous={previous_tag}"]
    for offset, near in enumerate(window):
        shape = f"{near.istitle()}{near.isupper()}{near.isalpha()}"
        features += [f"{offset}={near}", f"{offset} shape={shape}", f"{offset} end={near[-3:].lower()}"]
    for offset, pair in enumerate(pairwise(window)):
        features.append(f"{offset} pair={' '.join(pair).lower()}")
    for length in range(1, 5):
        features += [f"prefix={word[:length]}", f"suffix={word[-length:]}"]
    return features


def _tagged(labels: Labels, examples: Sentences, tags_of_examples: Sequence[list[str]]) -> list[Prediction]:
    """The predictions of these tags, made valid in the scheme of the training file if they mark spans."""
    scheme = cast(Scheme, labels.scheme)
    return [{"id": example.id, "tags": convert(tags, scheme)} for example, tags in zip(examples, tags_of_examples, strict=True)]


def _no_answer(threshold: float, train: Questions, examples: Questions) -> list[Prediction]:
    return [{"id": example.id, "answer": "", "best_answer": "", "no_answer": threshold + 1} for example in examples]


def _overlap_sentence(threshold: float, train: Questions, examples: Questions) -> list[Prediction]:
    """The sentence that shares most words with the question, weighted by rarity; ties go to shorter, then earlier sentences."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = {text for example in (*train, *examples) for text in (example.context, example.question)}
    vectorizer = TfidfVectorizer(token_pattern=_WORD.pattern, binary=True, norm=None).fit(texts)
    predictions = []
    for example in examples:
        sentences = sorted((match.group().strip() for match in _SENTENCE.finditer(example.context)), key=len)
        overlaps = vectorizer.transform(sentences) @ vectorizer.transform([example.question]).T
        best = sentences[overlaps.toarray().argmax()]
        # Below the threshold, so that a question is always answered.
        predictions.append({"id": example.id, "answer": best, "best_answer": best, "no_answer": threshold - 1})
    return predictions
