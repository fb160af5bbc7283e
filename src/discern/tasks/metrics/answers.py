"""Exact match and F1 of answers, as the official scripts of SQuAD 1.1, SQuAD 2.0, MRQA and CMRC 2018 compute them.

All give fractions, where the scripts print percent. A question without a prediction counts as wrong, as in the scripts; that of
SQuAD 2.0 scores predicted questions only, so callers give one for each.
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
from discern.tasks.metrics.scores import Scores

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE = re.compile(r"[\u4e00-\u9fa5]")
_CHINESE_MARKS = set("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")


def normalised(text: str) -> str:
    """The text in lower case, without ASCII punctuation, English articles and superfluous white space, as in SQuAD."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if the two are equal once normalised, else 0."""
    return float(normalised(prediction) == normalised(gold))


def word_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the words of both, normalised; 0 if they share none. SQuAD 1.1 and MRQA."""
    said, wanted = normalised(prediction).split(), normalised(gold).split()
    return _harmonic(sum((Counter(said) & Counter(wanted)).values()), len(said), len(wanted))


def word_f1_or_nothing(prediction: str, gold: str) -> float:
    """As `word_f1`, but 1 if both are empty once normalised. SQuAD 2.0."""
    return word_f1(prediction, gold) or float(not normalised(prediction) and not normalised(gold))


def squad1_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, str]) -> Scores:
    """`exact_match` and `f1` of SQuAD 1.1: the best over the golds, questions without a prediction count as wrong.

    Raises:
        DataError: no question, or one without golds.
    """
    return _mean_best(examples, predictions, exact_match, word_f1)


def mrqa_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, str]) -> Scores:
    """`exact_match` and `f1` of MRQA: SQuAD's, a question without a prediction counting as wrong, as the script's default is.

    Differs: the released ELECTRA code leaves questions without a prediction out.

    Raises:
        DataError: no question, or one without golds.
    """
    return _mean_best(examples, predictions, exact_match, word_f1)


def cmrc_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, str]) -> Scores:
    """`exact_match` and `f1` of CMRC 2018: by characters, and by their longest common piece instead of their number.

    Differs: the script cuts Latin text with NLTK's word tokenizer, we at white space: they part where words touch punctuation.

    Raises:
        DataError: no question, or one without golds.
    """

    def exact(prediction: str, gold: str) -> float:
        return float(_without_marks(prediction) == _without_marks(gold))

    return _mean_best(examples, predictions, exact, common_piece_f1)


def common_piece_f1(prediction: str, gold: str) -> float:
    """CMRC's F1: from the longest piece (in a row) that the characters and Latin words of both have in common."""
    said, wanted = _mixed_words(prediction), _mixed_words(gold)
    longest = 0
    lengths = [0] * (len(wanted) + 1)
    for one in said:
        row = [0] * (len(wanted) + 1)
        for place, other in enumerate(wanted):
            if one == other:
                row[place + 1] = lengths[place] + 1
                longest = max(longest, row[place + 1])
        lengths = row
    return _harmonic(longest, len(said), len(wanted))


@dataclass(frozen=True, slots=True)
class SquadPrediction:
    """What a network says to a question that may have no answer.

    Attributes:
        text: the best answer, never thresholded.
        no_answer: how much speaks for there being none; a probability, a logit or a difference of logits.
    """

    text: str
    no_answer: float


def squad2_scores(examples: Iterable[QuestionExample], predictions: Mapping[str, SquadPrediction], threshold: float) -> Scores:
    """Everything that the script of SQuAD 2.0 reports: with the threshold applied, and with the best one.

    `exact_match` and `f1` answer nothing where `no_answer` exceeds `threshold`; `HasAns_` and `NoAns_` are the same over the
    questions with and without an answer, left out where there are none. `best_exact_match` and `best_f1` are with the thresholds
    `best_exact_match_threshold` and `best_f1_threshold` chosen on these very questions: an upper bound, not a result.

    Differs: the script takes 0 as the threshold that answers nothing, which is right for probabilities only; ours then lies
    below every `no_answer`.

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
    """The best mean over all thresholds, and the threshold: questions are answered one more at a time, the surest first."""
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
    """The best over the golds that are not empty once normalised; the empty answer where there are none."""
    golds = [gold for gold in example.golds if normalised(gold)] or [""]
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
                hint="questions without an answer are scored as SQuAD 2.0: --task squad2",
            )
        prediction = predictions.get(example.id)
        exacts.append(0.0 if prediction is None else max(exact(prediction, gold) for gold in example.golds))
        overlaps.append(0.0 if prediction is None else max(f1(prediction, gold) for gold in example.golds))
    if not exacts:
        raise DataError("no question to score", hint="predictions are matched by the id of the question")
    return Scores({"exact_match": math.fsum(exacts) / len(exacts), "f1": math.fsum(overlaps) / len(overlaps)})


def _harmonic(common: int, said: int, wanted: int) -> float:
    if not common:
        return 0.0
    precision, recall = common / said, common / wanted
    return 2 * precision * recall / (precision + recall)


def _without_marks(text: str) -> str:
    return "".join(character for character in text.lower().strip() if character not in _CHINESE_MARKS)


def _mixed_words(text: str) -> Sequence[str]:
    """Chinese characters and marks-free runs of others, in order."""
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
