"""Re-rank n-best lists: the score of the system plus lambda times the score of a text encoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int
from pydantic import AfterValidator, AliasChoices, Field

from discern.data.tables import parsed_json, whole_text
from discern.errors import ConfigError, DataError
from discern.inference import PREFERRED_TO_RERANK
from discern.inference.scoring.scorers import TextScorer, load_scorer
from discern.inference.texts import InputText
from discern.parsing import json_value
from discern.progress import Progress
from discern.storage.checksums import Record, understood
from discern.storage.files import check_output, whole_file

# N-best lists of speech recognizers and translators, in the JSON formats that such tools write

_FORMS = (
    'expected JSON lines {"id": ..., "reference": "...", "hypotheses": [{"text": "...", "score": -1.5}, ...]}, or the JSON of '
    "ESPnet, of mlm-scoring, or of Vosk; leave out inputs without hypotheses, and give 0 as the score of a system that has none"
)

# Without the tokens of ESPnet for space and end.
_Text = Annotated[str, AfterValidator(lambda text: re.sub("<eos>|\u2581", " ", text).strip())]


class Hypothesis(Record):
    """One hypothesis.

    Attributes:
        score: score of the system that proposed it, such as a log-probability; higher is better.
    """

    text: _Text = Field(validation_alias=AliasChoices("rec_text", "text", "transcript"))
    score: float = Field(validation_alias=AliasChoices("score", "confidence"))


class NBest(Record):
    """The hypotheses for one input.

    Attributes:
        id: id in the file; without one, the number of the list, from 1.
        hypotheses: hypotheses in the order of the file, at least one.
        reference: the correct text; None if the file has none.
    """

    id: Any
    reference: _Text | None = Field(None, validation_alias=AliasChoices("reference", "ref"))
    hypotheses: list[Hypothesis] = Field(min_length=1, validation_alias=AliasChoices("hypotheses", "alternatives", "output"))


def read_nbest(path: Path) -> list[NBest]:
    """The lists of a file, compressed or not, in their order.

    These formats are recognized by content:

    - JSON lines, or an array, of `{"id", "reference", "hypotheses": [{"text", "score"}]}`; id and reference are optional;
    - the answers of Vosk and other Kaldi servers, one per line: `{"alternatives": [{"text", "confidence"}]}`;
    - the object of mlm-scoring (Shin et al. 2019, Salazar et al. 2020): `{ID: {"ref", "hyp_1": {"text", "score"}, ...}}`;
    - data.json of ESPnet 1: `{"utts": {ID: {"output": [{"rec_text", "score", "text"}, ...]}}}`, where "text" is the reference.

    Raises:
        DataError: the file is missing or empty, has another format, or has an empty or invalid list; the message names it.
    """
    text = whole_text(path)
    try:
        value = json_value(text)
    except ValueError:  # one value per line
        lines = enumerate(text.split("\n"), 1)
        value = [parsed_json(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    lists = []
    with understood(path, hint=_FORMS):
        if isinstance(value, dict) and not {"hypotheses", "alternatives"} & value.keys():
            records = value.get("utts", value)
        else:
            records = dict(enumerate(value if isinstance(value, list) else [value], 1))
        for name, record in records.items():
            with understood(f"{path}, list {name}", hint=_FORMS):
                if not isinstance(record, dict):
                    raise ValueError("expected a JSON object")
                lists.append(NBest.model_validate({"id": name} | _with_standard_keys(record)))
    if not lists:
        raise DataError(f"{path} has no lists", hint=_FORMS)
    return lists


def _with_standard_keys(record: dict[str, Any]) -> dict[str, Any]:
    """A list of ESPnet, whose hypotheses repeat the reference, or of mlm-scoring, whose hypotheses have numbers."""
    if "output" in record:
        return {"reference": next((each["text"] for each in record["output"] if each.get("text")), None)} | record
    # In the order of the numbers: JSON objects often have hyp_10 before hyp_2.
    names = sorted((name for name in record if re.fullmatch(r"hyp_\d+", name)), key=lambda name: int(name[4:]))
    return {"hypotheses": [record[name] for name in names]} | record if names else record


# Metrics of a corpus that are functions of sums over its texts, so that resampling and tuning need only the sums


@lru_cache(maxsize=2**16)
def word_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Substitutions, deletions and insertions, and the number of words of the reference; words are separated by white space."""
    from jiwer import process_words

    # jiwer splits only at U+0020: a tab, a no-break space or the ideographic U+3000 would stay inside a word.
    result = process_words(" ".join(reference.split()), " ".join(hypothesis.split()))
    return result.substitutions + result.deletions + result.insertions, len(reference.split())


def character_errors(reference: str, hypothesis: str) -> tuple[int, int]:
    """Errors in characters, without white space: as words of one character, so that the units are defined here."""
    return word_errors(*(" ".join("".join(text.split())) for text in (reference, hypothesis)))


def error_rate(sums: Float[np.ndarray, "2"]) -> float:
    """Errors per unit of the reference. If all references are empty, any hypothesis that is not empty is an error."""
    errors, units = sums.tolist()
    return errors / units if units else float(errors > 0)


@lru_cache(maxsize=2**16)
def bleu_statistics(reference: str, hypothesis: str) -> tuple[int, ...]:
    """Matches and n-grams of 1 to 4 words, and the lengths of both texts."""
    from sacrebleu.metrics.bleu import BLEU

    result = BLEU().corpus_score([hypothesis], [[reference]])
    return (*result.counts, *result.totals, result.sys_len, result.ref_len)


def bleu(sums: Float[np.ndarray, "10"]) -> float:
    """Papineni et al. 2002, as sacrebleu computes it by default (tokenization 13a, exponential smoothing), in 0-1."""
    from sacrebleu.metrics.bleu import BLEU

    *counts, length, reference_length = map(int, sums)
    return float(BLEU.compute_bleu(counts[:4], counts[4:], length, reference_length, smooth_method="exp").score) / 100


class CorpusMetric(NamedTuple):
    """A metric of a corpus.

    Attributes:
        statistics: contribution of a reference and a hypothesis to the sums; always the same number of values.
        value: the metric, from the sums (K,) over the corpus.
        sign: 1 if higher is better, -1 for an error rate.
    """

    statistics: Callable[[str, str], tuple[int, ...]]
    value: Callable[[Float[np.ndarray, "K"]], float]
    sign: int

    def of(self, lists: Sequence[NBest], winners: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N K"]:
        """Statistics of one hypothesis of each list, chosen by index."""
        pairs = zip(lists, winners, strict=True)
        return np.array([self.statistics(str(nbest.reference), nbest.hypotheses[index].text) for nbest, index in pairs], float)


METRICS = {
    "wer": CorpusMetric(word_errors, error_rate, -1),
    "cer": CorpusMetric(character_errors, error_rate, -1),
    "bleu": CorpusMetric(bleu_statistics, bleu, 1),
}
"""Metrics by the names in options and results."""

_RESAMPLES, _SEED = 1000, 0
_MEASURED = ("before", "after", "change_interval", "better_fraction", "best_possible")


def measure(
    lists: Sequence[NBest], before: Int[np.ndarray, "N"], after: Int[np.ndarray, "N"], metric: CorpusMetric
) -> dict[str, Any]:
    """The metric of two choices of hypotheses from the same lists, with a paired bootstrap of the change.

    The random draws are always the same.

    Args:
        lists: lists with references, at least one.
        before, after: index of the chosen hypothesis of each list.

    Returns:
        The metric `before` and `after`; with several lists, the 95% confidence interval of the change (`change_interval`) and
        the fraction of the resamples in which after is better (`better_fraction`); and for error rates, that of the best
        hypothesis of each list (`best_possible`).

    Reference: Bisani and Ney 2004; Koehn 2004.
    """
    first, second, number = metric.of(lists, before), metric.of(lists, after), len(lists)
    rng, changes = np.random.default_rng(_SEED), np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        times = np.bincount(rng.integers(number, size=number), minlength=number).astype(float)
        changes[index] = metric.value(times @ second) - metric.value(times @ first)
    values: dict[str, Any] = {"before": metric.value(first.sum(0)), "after": metric.value(second.sum(0))}
    if number > 1:
        values |= {
            "change_interval": np.percentile(changes, [2.5, 97.5]).tolist(),
            "better_fraction": float((metric.sign * changes > 0).mean()),
        }
    if metric.sign < 0:
        best = [min(metric.statistics(str(nbest.reference), each.text) for each in nbest.hypotheses) for nbest in lists]
        values["best_possible"] = metric.value(np.array(best, float).sum(0))
    return values


# Re-ranking

LAMBDA_STEPS = 20
"""Number of steps of the grid of lambdas from 0 to the largest. Electric, section 4.2: 0.05, 0.1, ... 1.0; here also 0."""
LENGTH_GRID = tuple(number / 4 for number in range(-8, 9))
"""Weights per token that are tried, in units of the lists' scores; a coarse grid, as a fine one would overfit."""
UNTUNED_LAMBDA = 0.5
"""Lambda if it is not tuned: the middle of the range in the Electric paper."""

Weights: TypeAlias = tuple[float, float]
"""Lambda, and the weight of each token of the model's tokenizer; if it is positive, it favors longer texts."""
Candidates: TypeAlias = Float[np.ndarray, "3 N H"]
"""Of each hypothesis of N lists, padded to H: the score of the system, that of the model in nats, and its number of tokens."""


def totals(candidates: Candidates, weights: Weights) -> Float[np.ndarray, "N H"]:
    """The sums by which hypotheses are ranked. The winner of a list is the first hypothesis with the highest sum."""
    scores, model_scores, lengths = candidates
    sums: np.ndarray = scores + weights[0] * model_scores + weights[1] * lengths
    return sums


def score_lists(
    lists: Sequence[NBest], scorer: TextScorer, as_read: Callable[[str], str], progress: Progress, warn: Callable[[str], None]
) -> Candidates:
    """Score the hypotheses of the lists; each distinct text is scored once. Padding never wins.

    Args:
        as_read: maps a hypothesis to the text that the model reads.
        warn: called as by `read_blocks`.
    """
    texts = dict.fromkeys(as_read(each.text) for nbest in lists for each in nbest.hypotheses)
    inputs = (InputText(f"{text!r:.40}", number, text) for number, text in enumerate(texts, 1))
    scores = {score.text: score for block in scorer.score_blocks(inputs, progress, warn) for _, score in block}
    candidates = np.zeros((3, len(lists), max(len(nbest.hypotheses) for nbest in lists)))
    candidates[0] = -np.inf
    for row, nbest in enumerate(lists):
        for place, each in enumerate(nbest.hypotheses):
            score = scores[as_read(each.text)]
            candidates[:, row, place] = each.score, score.total, len(score.tokens)
    return candidates


def tune(
    candidates: Candidates, lists: Sequence[NBest], metric: CorpusMetric, lambdas: Sequence[float], lengths: Sequence[float]
) -> Weights:
    """The weights whose winners are best by the metric; of equally good ones, those closest to zero.

    Args:
        lists: the lists of the candidates, with references.
        lambdas: values of lambda to try.
        lengths: weights per token to try.
    """

    def quality(weights: Weights) -> float:
        return metric.sign * metric.value(metric.of(lists, totals(candidates, weights).argmax(1)).sum(0))

    # The first of the best: of two with the same distance from zero, the negative one.
    return max(sorted(product(lambdas, lengths), key=lambda pair: (abs(pair[1]), abs(pair[0]), pair)), key=quality)


def rerank(
    model: Path,
    input: Path,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    out: Path,
    dev: Path | None = None,
    weight: float | None = None,
    max_weight: float = 1.0,
    length_weight: float = 0.0,
    tune_length: bool = False,
    metric: Literal["wer", "cer", "bleu"] = "wer",
    scorer: str | None = None,
    lowercase: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Re-rank n-best lists, write them, and measure the change.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA.
        input: n-best lists, see `read_nbest`.
        warn: called with messages about weights that were not tuned or are at the edge of the grid, texts that are read in
            several windows, metrics that are not installed, and damaged checkpoints that were skipped.
        out: JSON lines file to write, complete or not at all.
        dev: n-best lists with references to tune the weights on; None: use the given or default weights.
        weight: lambda, instead of tuning it.
        max_weight: largest lambda to try.
        length_weight: weight of each token.
        tune_length: also tune the weight of each token.
        metric: metric to optimize.
        scorer: name of the scorer; None: the first of `PREFERRED_TO_RERANK` that the model supports.
        lowercase: pass the hypotheses to the model in lower case.

    Returns:
        The numbers of `lists`, of `hypotheses`, of lists with `references` and of lists with a new best hypothesis (`changed`);
        the `scorer` and the weights; the values of `measure` for each metric over the lists with references, None if they
        were not measured; and, with `dev`, the same for the lists that the weights were tuned on.

    Raises:
        ConfigError: the model does not support the scorer, or the extra `rerank` is missing.
        DataError: a file is missing or is not a list of n-best lists, or the lists to tune on have no references.
        CheckpointError: the weights are missing or damaged.
    """
    install, can_measure = "pip install 'discern-nlp[rerank]'", all(map(find_spec, ("jiwer", "sacrebleu")))
    if dev is not None and not can_measure:
        raise ConfigError("tuning needs the packages jiwer and sacrebleu, which are not installed", hint=install)
    check_output("--out", out, "reranked.jsonl", model, input, dev)
    lists = read_nbest(input)
    dev_lists = [] if dev is None else [nbest for nbest in read_nbest(dev) if nbest.reference is not None]
    if dev is not None and not dev_lists:
        raise DataError(f"{dev}: no list has a reference, so there is nothing to tune on", hint='add "reference": "..." to each')
    chosen = load_scorer(model, scorer, device, warn=warn, preferred=PREFERRED_TO_RERANK)
    if not can_measure:
        warn(f"no metric is measured: {install}")
    as_read = str.lower if lowercase else str

    def measured(lists: Sequence[NBest], candidates: Candidates, weights: Weights) -> dict[str, Any]:
        rows = [row for row, nbest in enumerate(lists) if nbest.reference is not None]
        before, after = (ranked.argmax(1)[rows] for ranked in (candidates[0], totals(candidates, weights)))
        values: dict[str, Any] = {}
        for name, each in METRICS.items():
            found = measure([lists[row] for row in rows], before, after, each) if rows and can_measure else {}
            values |= {f"{name}_{key}": found.get(key) for key in _MEASURED}
        return values

    weights, on_dev = (UNTUNED_LAMBDA if weight is None else weight, length_weight), {}
    if dev is not None:
        if str(input) != "-" and dev.samefile(input):
            warn(f"the weights are tuned on {input} itself, so the improvement there is larger than elsewhere")
        tuned_on = score_lists(dev_lists, chosen, as_read, progress, warn)
        lambdas = [max_weight * step / LAMBDA_STEPS for step in range(LAMBDA_STEPS + 1)] if weight is None else [weight]
        weights = tune(tuned_on, dev_lists, METRICS[metric], lambdas, LENGTH_GRID if tune_length else weights[1:])
        if weight is None and weights[0] == max_weight:
            warn(f"the best lambda is the largest one tried; to try larger ones: --max-lambda {4 * max_weight:g}")
        on_dev = {"dev": {"file": dev} | measured(dev_lists, tuned_on, weights)}
    elif weight is None:
        warn(
            f"lambda is {UNTUNED_LAMBDA:g}, a guess: the right one depends on the scale of the scores; tune it on other lists "
            "with references (--dev FILE), or set it (--lambda VALUE)"
        )
    candidates, changed = score_lists(lists, chosen, as_read, progress, warn), 0
    with whole_file(out) as file:
        for nbest, *scores in zip(lists, candidates[1].tolist(), totals(candidates, weights).tolist(), strict=True):
            hypotheses = [
                {"text": each.text, "score": each.score, "model_score": model_score, "total": total}
                for each, model_score, total in zip(nbest.hypotheses, *scores, strict=False)  # without the padding
            ]
            first, ranked = max(hypotheses, key=itemgetter("score")), sorted(hypotheses, key=itemgetter("total"), reverse=True)
            changed += first["text"] != ranked[0]["text"]
            record = {"id": nbest.id, "reference": nbest.reference, "hypotheses": ranked}
            file.write(json.dumps({key: value for key, value in record.items() if value is not None}, ensure_ascii=False) + "\n")
    return {
        "lists": len(lists),
        "hypotheses": sum(len(nbest.hypotheses) for nbest in lists),
        "references": sum(nbest.reference is not None for nbest in lists),
        "changed": changed,
        "scorer": chosen.name,
        "lambda": weights[0],
        "length_weight": weights[1],
        **measured(lists, candidates, weights),
        **on_dev,
    }
