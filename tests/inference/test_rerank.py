"""Re-ranking of n-best lists: their forms, metrics by hand, weights and intervals, and what is written."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from discern.api import use
from discern.errors import ConfigError, DataError
from discern.inference.scoring import rerank as module
from discern.inference.scoring.rerank import (
    LENGTH_GRID,
    METRICS,
    CorpusMetric,
    NBest,
    measure,
    read_nbest,
    rerank,
    score_lists,
    totals,
    tune,
)
from discern.inference.scoring.scorers import load_scorer
from discern.progress import Silent
from tests.inference.small_scorers import make_objective, make_scorer
from tests.small.run import make_run

RIGHT, WRONG = "the chef cooked the meal", "the chef cooked the mat"
LISTS = [
    {"id": 7, "reference": RIGHT, "hypotheses": [{"text": WRONG, "score": -1.0}, {"text": RIGHT, "score": -1.1}]},
    {"id": "no reference", "hypotheses": [{"text": "purple", "score": -1.0}, {"text": "elephants", "score": -3.0}]},
    {"reference": "hello", "hypotheses": [{"text": "", "score": -1.0}]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerank") / "run"
    make_run(folder, overrides=["objective.name=electric", "data.sequence_length=32"])
    return folder


@pytest.fixture
def nbest(tmp_path: Path) -> Path:
    return written(tmp_path / "nbest.jsonl", LISTS)


def written(path: Path, lists: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in lists), encoding="utf-8")
    return path


def ranked(
    model: Path, nbest: Path, warn: Callable[[str], None] = pytest.fail, **options: Any
) -> tuple[dict[str, Any], list[Any]]:
    out = nbest.with_name("out.jsonl")
    done = rerank(model, nbest, Silent(), warn, out=out, **options)
    return done, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def preferred(model: Path) -> tuple[float, float]:
    """Scores of the model for RIGHT and WRONG, the weights being noise."""
    scores = load_scorer(model, None, "cpu", warn=pytest.fail).score([RIGHT, WRONG])
    return scores[0].total, scores[1].total


def test_the_sum_decides_and_all_of_it_is_written(model: Path, nbest: Path) -> None:
    right, wrong = preferred(model)
    weight = 2 * 0.1 / (right - wrong)  # twice what makes them equal; negative where the noise prefers the other
    done, lines = ranked(model, nbest, weight=weight, length_weight=0.001)
    assert [line["id"] for line in lines] == [7, "no reference", 3]
    assert [text["text"] for text in lines[0]["hypotheses"]] == [RIGHT, WRONG]
    length = len(load_scorer(model, None, "cpu", warn=pytest.fail).score([RIGHT])[0].tokens)
    best = lines[0]["hypotheses"][0]
    assert best["model_score"] == pytest.approx(right, abs=1e-5)
    sum_by_hand = best["score"] + weight * best["model_score"] + 0.001 * length
    assert best["total"] == pytest.approx(sum_by_hand, abs=1e-5)
    assert lines[0]["reference"] == RIGHT
    assert "reference" not in lines[1]
    assert [done[key] for key in ("lists", "hypotheses", "references", "changed")] == [3, 5, 2, 1]
    assert [done[key] for key in ("scorer", "lambda", "length_weight")] == ["electric", weight, 0.001]
    assert lines[2]["hypotheses"] == [{"text": "", "score": -1.0, "model_score": 0.0, "total": -1.0}]


def test_what_it_is_worth_is_counted_over_the_lists_with_references(model: Path, nbest: Path) -> None:
    right, wrong = preferred(model)
    done, _ = ranked(model, nbest, weight=0.2 / (right - wrong))
    # An edit in 5 words and a missing word of 1, then the missing word alone.
    values = [done[f"wer_{key}"] for key in ("before", "after", "best_possible")]
    assert values == pytest.approx([2 / 6, 1 / 6, 1 / 6])
    low, high = done["wer_change_interval"]
    assert low <= values[1] - values[0] <= high <= 0
    assert done["cer_before"] > done["cer_after"]
    assert done["bleu_before"] < done["bleu_after"]


def test_lambda_is_tuned_on_other_lists(model: Path, nbest: Path, tmp_path: Path) -> None:
    right, wrong = preferred(model)
    better, worse = (RIGHT, WRONG) if right > wrong else (WRONG, RIGHT)
    gap = abs(right - wrong)
    record = {"reference": better, "hypotheses": [{"text": worse, "score": 0.0}, {"text": better, "score": -0.52 * gap}]}
    dev = written(tmp_path / "dev.jsonl", [record] * 3 + [LISTS[1]])
    done, _ = ranked(model, nbest, dev=dev)
    assert (done["lambda"], done["length_weight"]) == (pytest.approx(0.55), 0)
    assert (done["dev"]["wer_before"], done["dev"]["wer_after"]) == (pytest.approx(1 / 5), 0)
    record["hypotheses"][1]["score"] = -0.97 * gap  # type: ignore[index]
    said: list[str] = []
    assert ranked(model, nbest, dev=written(dev, [record]), warn=said.append)[0]["lambda"] == 1.0
    assert said == ["the best lambda is the largest one tried; to try larger ones: --max-lambda 4"]
    with pytest.raises(DataError, match=r"dev\.jsonl: no list has a reference"):
        ranked(model, nbest, dev=written(dev, [LISTS[1]]))


def test_an_untuned_lambda_and_lists_tuned_on_themselves_are_told(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    lists = written(tmp_path / "a.jsonl", [LISTS[0]])
    assert ranked(model, lists, warn=said.append)[0]["lambda"] == 0.5
    ranked(model, lists, dev=lists, warn=said.append)
    assert said[0].startswith("lambda is 0.5, a guess")
    assert said[1].startswith(f"the weights are tuned on {lists} itself")


def test_without_the_extra_it_ranks_and_cannot_tune(model: Path, nbest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    said: list[str] = []
    done, lines = ranked(model, nbest, weight=1.0, warn=said.append)
    assert {done[f"{name}_after"] for name in METRICS} == {None}
    assert len(lines) == 3
    assert said == ["no metric is measured: pip install 'discern-nlp[rerank]'"]
    with pytest.raises(ConfigError, match="needs the packages jiwer and sacrebleu"):
        ranked(model, nbest, dev=nbest)


def test_lower_case_is_for_the_model_alone(model: Path, tmp_path: Path) -> None:
    record = {"hypotheses": [{"text": "THE CHEF", "score": 0.0}, {"text": "the chef", "score": -1.0}]}
    _, lines = ranked(model, written(tmp_path / "a.jsonl", [record]), weight=1.0, lowercase=True)
    assert [text["text"] for text in lines[0]["hypotheses"]] == ["THE CHEF", "the chef"]
    assert lines[0]["hypotheses"][0]["model_score"] == lines[0]["hypotheses"][1]["model_score"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tune_length": True, "max_lambda": 2.0}, "tune_length and max_lambda cannot be combined with a re-ranking without dev"),
        ({"dev": "nbest.jsonl", "lambda_": 1.0}, "lambda_ cannot be combined with dev"),
        ({"dev": "nbest.jsonl", "metric": "wed"}, "expected 'wer', 'cer' or 'bleu'"),
        ({"out": "nbest.jsonl"}, "is the input"),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: dict[str, Any], said: str, model: Path, nbest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nbest.parent)
    with pytest.raises(ConfigError, match=said):
        use.rerank(model, nbest, **{"out": "o.jsonl", **options})
    assert not Path("o.jsonl").exists()


def test_pll_is_preferred_to_the_odds_of_a_discriminator(tmp_path: Path, nbest: Path) -> None:
    """`score` asks for a cheap scorer, `rerank` for a likelihood; a name given decides."""
    make_run(tmp_path / "rtd")
    assert load_scorer(tmp_path / "rtd", None, "cpu", warn=pytest.fail).name == "rtd"
    for name, chosen in ((None, "pll"), ("rtd", "rtd")):
        assert ranked(tmp_path / "rtd", nbest, weight=0.1, scorer=name)[0]["scorer"] == chosen


# N-best lists

OWN = [
    {"id": "a", "reference": "the cat", "hypotheses": [{"text": "the cat", "score": -1.5}, {"text": " the cad ", "score": -2}]},
    {"id": 1.5, "hypotheses": [{"text": "", "score": -3.0}]},
    {"hypotheses": [{"text": "猫", "score": 0}]},
]
EXPECTED = [("a", "the cat", [("the cat", -1.5), ("the cad", -2)]), (1.5, None, [("", -3)]), (3, None, [("猫", 0)])]
VOSK = {"alternatives": [{"confidence": 212.5, "text": "one"}, {"confidence": 211, "text": "won"}]}
NUMBERED = {f"hyp_{number}": {"score": -number, "text": f" text {number} "} for number in (10, 2, 1)}
OUTPUT = [
    {"name": "target1[1]", "rec_text": "▁the▁cat<eos>", "score": -0.5, "text": None, "rec_token": "x"},
    {"name": "target1[2]", "rec_text": "the cad <eos>", "score": -0.75, "text": "THE CAT"},
]


def lines_of(records: list[Any]) -> str:
    return "\n".join(map(json.dumps, records)) + "\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lines_of(OWN), EXPECTED),
        (json.dumps(OWN, indent=1), EXPECTED),
        (json.dumps(OWN[0], indent=1), EXPECTED[:1]),
        (lines_of([VOSK, VOSK]), [(number, None, [("one", 212.5), ("won", 211)]) for number in (1, 2)]),
        (
            json.dumps({"1272-0": {**NUMBERED, "ref": "mister "}}),
            [("1272-0", "mister", [("text 1", -1), ("text 2", -2), ("text 10", -10)])],
        ),
        (
            json.dumps({"utts": {"u1": {"input": [], "output": OUTPUT, "utt2spk": "s"}}}),
            [("u1", "THE CAT", [("the cat", -0.5), ("the cad", -0.75)])],
        ),
    ],
    ids=["json-lines", "array", "object", "vosk", "mlm-scoring", "espnet"],
)
def test_formats_are_recognized_by_content(content: str, expected: list[Any], tmp_path: Path) -> None:
    (tmp_path / "lists").write_bytes(gzip.compress(content.encode()))
    found = read_nbest(tmp_path / "lists")
    assert [(each.id, each.reference, [(one.text, one.score) for one in each.hypotheses]) for each in found] == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no lists"),
        ("[]", "has no lists"),
        ("the cat sat\n", "line 1: not JSON: Expecting value"),
        ('{"id": 1}\n{"id": 2, "hypot', "line 2: not JSON"),
        ('{"a": 1}', "list a is damaged: expected a JSON object"),
        ('{"hypotheses": []}', "list 1 is damaged: 'hypotheses': list should have at least 1 item"),
        ('{"hypotheses": [{"text": "x", "score": 1}, {"text": "x"}]}', r"'hypotheses\.1\.score' is missing"),
        ('{"hypotheses": [{"text": "x", "score": NaN}]}', r"'hypotheses\.0\.score': input should be a finite number"),
        ('{"hypotheses": [{"text": "x", "score": 1}]}\n{"id": 2}', "list 2 is damaged: 'hypotheses' is missing"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "lists.jsonl").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        read_nbest(tmp_path / "lists.jsonl")
    assert "lists.jsonl" in caught.value.message


# Metrics, winners and weights by hand

WER, CER, BLEU_ = METRICS["wer"], METRICS["cer"], METRICS["bleu"]
GRID = [step / 20 for step in range(21)]


def value(metric: CorpusMetric, *pairs: tuple[str, str]) -> float:
    """Of (reference, hypothesis) pairs."""
    return metric.value(np.array([metric.statistics(*pair) for pair in pairs], dtype=np.float64).sum(0))


def test_error_rates_by_hand() -> None:
    assert value(WER, ("the cat sat", "the cat sad")) == pytest.approx(1 / 3)
    # One substitution of 3 words and two insertions at 1: 3 edits for 4 words, not the mean of the two rates.
    assert value(WER, ("the cat sat", "the cat sad"), ("x", "a x b")) == pytest.approx(3 / 4)
    assert value(CER, ("ab cd", "abcx")) == pytest.approx(1 / 4), "blanks are no characters"
    assert value(CER, ("今天天气", "今天天器")) == pytest.approx(1 / 4)
    for blank in ("\t", "\u3000", "\u00a0", "\n"):
        assert value(WER, (f"the{blank}cat{blank}sat", "the cat sad")) == pytest.approx(1 / 3)


@pytest.mark.parametrize("metric", [WER, CER])
def test_empty_texts(metric: CorpusMetric) -> None:
    assert (value(metric, ("a b", "")), value(metric, ("", "")), value(metric, ("", "a"))) == (1, 0, 1)
    assert value(metric, ("", "a b"), ("a b", "a b")) == pytest.approx(1), "two are inserted where two are expected in all"


def test_error_rates_are_jiwers_and_bleu_is_sacrebleus() -> None:
    rng = random.Random(0)
    draws = [" ".join(rng.choices("the a cat dog sat ran on under mat tree".split(), k=rng.randint(1, 9))) for _ in range(80)]
    references, hypotheses = draws[:40], draws[40:]
    pairs = list(zip(references, hypotheses, strict=True))
    assert value(WER, *pairs) == pytest.approx(jiwer.wer(references, hypotheses))
    assert value(BLEU_, *pairs) == pytest.approx(BLEU().corpus_score(hypotheses, [references]).score / 100)


def make_list(reference: str, *texts: str) -> NBest:
    hypotheses = [{"text": text, "score": 0} for text in texts]
    return NBest.model_validate({"id": 1, "reference": reference, "hypotheses": hypotheses})


# The system prefers the first of each list. Of the first list, the second wins from lambda > 1/2 on; of the second, for
# lambda > 1/4; of the third, never.
CANDIDATES = np.array([[[0, -1], [0, -1], [0, -9]], [[-4, -2], [-8, -4], [-1, -1]], [[1, 2], [1, 2], [1, 1]]], np.float64)


def test_tuning_takes_the_smallest_weight_that_is_best() -> None:
    second = [make_list("b", "a", "b"), make_list("b", "a", "b"), make_list("a", "a", "b")]
    assert tune(CANDIDATES, second, WER, GRID, [0.0]) == pytest.approx((0.55, 0)), "the first of 0, 0.05, ... beyond 1/2"
    assert tune(CANDIDATES, second, WER, [0.0], LENGTH_GRID) == (0.0, 1.25)
    long, wrong = "the cat sat on the mat", "the dog ran on the tree"
    lists = [make_list(long, wrong, long)] * 2 + [make_list(long, long, wrong)]
    assert tune(CANDIDATES, lists, BLEU_, GRID, [0.0]) == pytest.approx((0.55, 0)), "BLEU goes upwards"


def test_the_interval_is_that_of_the_binomial_and_always_the_same() -> None:
    """Half of 400 lists of one word get better by an edit: the mean of 400 draws, of standard deviation 0.5 / 20."""
    lists, before = [make_list("a", "b", "a")] * 400, np.zeros(400, np.int64)
    found = measure(lists, before, np.arange(400) % 2, WER)
    assert found == measure(lists, before, np.arange(400) % 2, WER)
    assert found.pop("change_interval") == pytest.approx([-0.549, -0.451], abs=0.006)
    assert found == {"before": 1, "after": 0.5, "better_fraction": 1, "best_possible": 0}
    assert measure(lists, before, before, WER)["change_interval"] == [0, 0]
    assert measure(lists[:1], before[:1], before[:1] + 1, WER) == {"before": 1, "after": 0, "best_possible": 0}
    assert "best_possible" not in measure(lists[:1], before[:1], before[:1], BLEU_)


def test_each_text_is_scored_once_in_its_place() -> None:
    scorer = make_scorer(make_objective("electric"), "electric")
    lists = [make_list("", "the chef", "hello", "the chef"), make_list("", "hello")]
    scores, model_scores, lengths = found = score_lists(lists, scorer, str, Silent(), pytest.fail)
    chef, hello = (score.total for score in scorer.score(["the chef", "hello"]))
    assert model_scores == pytest.approx(np.array([[chef, hello, chef], [hello, 0, 0]]))
    assert scores.tolist() == [[0, 0, 0], [0, -np.inf, -np.inf]]
    assert lengths[0, 0] == lengths[0, 2] == len(scorer.tokenizer.encode("the chef", add_special_tokens=False))
    assert totals(found, (-10.0, 0.0)).argmax(1)[1] == 0, "what lies beyond the end never wins"
