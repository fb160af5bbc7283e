"""Exact match and F1 of answers, as the official scripts of SQuAD 1.1, SQuAD 2.0, MRQA and CMRC 2018 compute them.

All metrics are fractions, where the scripts print percentages. A question without a prediction counts as wrong, as in the
scripts, except for SQuAD 2.0, whose script scores predicted questions only: callers pass a prediction for every question.
Reference: Rajpurkar et al. 2016, 2018; Fisch et al. 2019; Cui et al. 2019; the scripts evaluate-v1.1.py, evaluate-v2.0.py,
mrqa_official_eval.py, cmrc2018_evaluate.py.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from discern.errors import DataError
from discern.tasks.examples import QuestionExample
from discern.tasks.metrics import Scores

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE = re.compile(r"[\u4e00-\u9fa5]")
_CHINESE_MARKS = set("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")


def normalized(text: str) -> str:
    """The text in lower case, without ASCII punctuation, English articles and superfluous white space, as in SQuAD."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if the two are equal once normalized, else 0."""
    return float(normalized(prediction) == normalized(gold))


def word_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the words of both, normalized; 0 if they share none. SQuAD 1.1 and MRQA."""
    predicted, expected = normalized(prediction).split(), normalized(gold).split()
    return _harmonic(sum((Counter(predicted) & Counter(expected)).values()), len(predicted), len(expected))


def word_f1_or_nothing(prediction: str, gold: str) -> float:
    """Like `word_f1`, but 1 if both are empty once normalized. SQuAD 2.0."""
    return word_f1(prediction, gold) or float(not normalized(prediction) and not normalized(gold))


def squad1_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, str]) -> Scores:
    """`exact_match` and `f1` of SQuAD 1.1: the best over the golds. Questions without a prediction count as wrong.

    Raises:
        DataError: there are no questions, or one has no golds.
    """
    return _mean_best(examples, predictions, exact_match, word_f1)


def mrqa_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, str]) -> Scores:
    """`exact_match` and `f1` of MRQA: those of SQuAD 1.1, as the script computes them by default.

    Differs: the released ELECTRA code leaves out questions without a prediction.

    Raises:
        DataError: there are no questions, or one has no golds.
    """
    return _mean_best(examples, predictions, exact_match, word_f1)


def cmrc_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, str]) -> Scores:
    """`exact_match` and `f1` of CMRC 2018: over characters, with the longest common substring instead of common characters.

    Differs: the script splits Latin text with NLTK's word tokenizer, this function at white space. The results differ where
    words touch punctuation.

    Raises:
        DataError: there are no questions, or one has no golds.
    """

    def exact(prediction: str, gold: str) -> float:
        return float(_without_marks(prediction) == _without_marks(gold))

    return _mean_best(examples, predictions, exact, common_piece_f1)


def common_piece_f1(prediction: str, gold: str) -> float:
    """F1 of CMRC: from the longest contiguous sequence of characters and Latin words that both have in common."""
    predicted, expected = _mixed_words(prediction), _mixed_words(gold)
    longest = 0
    lengths = [0] * (len(expected) + 1)
    for one in predicted:
        row = [0] * (len(expected) + 1)
        for place, other in enumerate(expected):
            if one == other:
                row[place + 1] = lengths[place] + 1
                longest = max(longest, row[place + 1])
        lengths = row
    return _harmonic(longest, len(predicted), len(expected))


@dataclass(frozen=True, slots=True)
class SquadPrediction:
    """Prediction for a question that may have no answer.

    Attributes:
        text: best answer, before any threshold.
        no_answer: score for having no answer: a probability, a logit or a difference of logits.
    """

    text: str
    no_answer: float


def squad2_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, SquadPrediction], threshold: float) -> Scores:
    """All metrics of the script of SQuAD 2.0, with the given threshold and with the best one.

    For `exact_match` and `f1` the answer is empty where `no_answer` exceeds `threshold`. `HasAns_` and `NoAns_` are the same
    metrics over the questions with and without an answer, if there are any. `best_exact_match` and `best_f1` use the thresholds
    `best_exact_match_threshold` and `best_f1_threshold`, which are selected on these same questions: an upper bound, not a
    result.

    Differs: the script uses 0 as the threshold below which nothing is answered, which is right for probabilities only; here
    that threshold is below every `no_answer`.

    Raises:
        DataError: no question has a prediction.
    """
    texts = {example.id: example for example in examples if example.id in predictions}
    if not texts:
        raise DataError("no question has a prediction", hint="predictions are matched by the id of the question")
    answerable = {identity: not _is_impossible(example) for identity, example in texts.items()}
    values: dict[str, float] = {}
    for name, compare in (("exact_match", exact_match), ("f1", word_f1_or_nothing)):
        raw = {key: _best_of_golds(predictions[key].text, example, compare) for key, example in texts.items()}
        applied = {
            key: float(not answerable[key]) if predictions[key].no_answer > threshold else score for key, score in raw.items()
        }
        values[name] = math.fsum(applied.values()) / len(applied)
        for group, wanted in (("HasAns", True), ("NoAns", False)):
            scores = [score for key, score in applied.items() if answerable[key] is wanted]
            if scores:
                values[f"{group}_{name}"] = math.fsum(scores) / len(scores)
        best, place = _best_threshold(raw, predictions, answerable)
        values[f"best_{name}"], values[f"best_{name}_threshold"] = best, place
    return Scores(values)


def _best_threshold(
    scores: Mapping[str, float], predictions: Mapping[str, SquadPrediction], answerable: Mapping[str, bool]
) -> tuple[float, float]:
    """The best mean over all thresholds, and the threshold. Questions are answered one by one, the most certain first."""
    order = sorted(scores, key=lambda key: predictions[key].no_answer)
    current = best = float(sum(not has for has in answerable.values()))
    lowest = predictions[order[0]].no_answer
    place = 0.0 if lowest > 0 else math.nextafter(lowest, -math.inf)
    for key in order:
        current += scores[key] if answerable[key] else (-1 if predictions[key].text else 0)
        if current > best:
            best, place = current, predictions[key].no_answer
    return best / len(scores), place


def _is_impossible(example: QuestionExample) -> bool:
    return not example.golds


def _best_of_golds(prediction: str, example: QuestionExample, compare: Callable[[str, str], float]) -> float:
    """The best score over the golds that are not empty once normalized; without any, the gold is the empty answer."""
    golds = [gold for gold in example.golds if normalized(gold)] or [""]
    return max(compare(prediction, gold) for gold in golds)


def _mean_best(
    examples: Iterable[QuestionExample],
    predictions: Mapping[str, str],
    exact: Callable[[str, str], float],
    f1: Callable[[str, str], float],
) -> Scores:
    exacts: list[float] = []
    overlaps: list[float] = []
    for example in examples:
        if not example.golds:
            raise DataError(
                f"question {example.id} has no gold answer",
                hint="use --task squad2 for questions without an answer, which are scored as in SQuAD 2.0",
            )
        prediction = predictions.get(example.id)
        exacts.append(0.0 if prediction is None else max(exact(prediction, gold) for gold in example.golds))
        overlaps.append(0.0 if prediction is None else max(f1(prediction, gold) for gold in example.golds))
    if not exacts:
        raise DataError("no question to score", hint="predictions are matched by the id of the question")
    return Scores({"exact_match": math.fsum(exacts) / len(exacts), "f1": math.fsum(overlaps) / len(overlaps)})


def _harmonic(common: int, predicted: int, expected: int) -> float:
    if not common:
        return 0.0
    precision, recall = common / predicted, common / expected
    return 2 * precision * recall / (precision + recall)


def _without_marks(text: str) -> str:
    return "".join(character for character in text.lower().strip() if character not in _CHINESE_MARKS)


def _mixed_words(text: str) -> Sequence[str]:
    """Chinese characters, and words of other characters without punctuation, in order."""
    words: list[str] = []
    run = ""
    for character in text.lower().strip():
        if character in _CHINESE_MARKS:
            continue
        if _CHINESE.match(character):
            words += run.split()
            words.append(character)
            run = ""
        else:
            run += character
    return words + run.split()
