"""`discern rerank` end to end: the sum that decides, what is written and measured, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from discern.cli.rerank import rerank as rerank_command
from discern.errors import ConfigError, DataError
from discern.inference import corpus_metrics
from discern.inference.rerank import Reranked, Weights, rerank
from discern.inference.scoring import load_scorer
from discern.progress import Silent
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


def ranked(model: Path, nbest: Path, warn: Callable[[str], None] = pytest.fail, **options: Any) -> tuple[Reranked, list[Any]]:
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
    lengths = {text: len(load_scorer(model, None, "cpu", warn=pytest.fail).score([text])[0].tokens) for text in (RIGHT, WRONG)}
    best = lines[0]["hypotheses"][0]
    assert best["model_score"] == pytest.approx(right, abs=1e-5)
    for text in lines[0]["hypotheses"]:
        sum_by_hand = text["score"] + weight * text["model_score"] + 0.001 * lengths[text["text"]]
        assert text["total"] == pytest.approx(sum_by_hand, abs=1e-5)
    assert lines[0]["reference"] == RIGHT
    assert "reference" not in lines[1]
    assert (done.lists, done.hypotheses, done.references) == (3, 5, 2)
    assert (done.scorer, done.weights) == ("electric", Weights(weight, 0.001))
    assert lines[2]["hypotheses"] == [{"text": "", "score": -1.0, "model_score": 0.0, "total": -1.0}]


def test_what_it_is_worth_is_counted_over_the_lists_with_references(model: Path, nbest: Path) -> None:
    right, wrong = preferred(model)
    done, _ = ranked(model, nbest, weight=0.2 / (right - wrong))
    wer = done.metrics["wer"]
    assert wer is not None
    # An edit in 5 words and a missing word of 1, then the missing word alone.
    assert (wer.before, wer.after, wer.best_possible) == (pytest.approx(2 / 6), pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert wer.interval is not None
    assert wer.interval[0] <= wer.after - wer.before <= wer.interval[1] <= 0
    assert done.metrics["cer"] is not None
    assert done.metrics["bleu"] is not None
    assert done.dev_metrics == {}


def test_lambda_is_tuned_on_other_lists(model: Path, nbest: Path, tmp_path: Path) -> None:
    right, wrong = preferred(model)
    better, worse = (RIGHT, WRONG) if right > wrong else (WRONG, RIGHT)
    gap = abs(right - wrong)
    record = {"reference": better, "hypotheses": [{"text": worse, "score": 0.0}, {"text": better, "score": -0.52 * gap}]}
    dev = written(tmp_path / "dev.jsonl", [record] * 3 + [LISTS[1]])
    done, _ = ranked(model, nbest, dev=dev)
    assert (done.weights.model, done.weights.length) == (pytest.approx(0.55), 0)
    measured = done.dev_metrics["wer"]
    assert measured is not None
    assert (measured.before, measured.after) == (pytest.approx(1 / 5), 0)
    by_bleu, _ = ranked(model, nbest, dev=dev, metric="bleu")
    assert by_bleu.weights == done.weights

    record["hypotheses"][1]["score"] = -0.97 * gap  # type: ignore[index]
    said: list[str] = []
    done, _ = ranked(model, nbest, dev=written(tmp_path / "dev.jsonl", [record]), warn=said.append)
    assert done.weights.model == 1.0
    assert said == ["the best lambda is the largest one tried; to try larger ones: --max-lambda 4"]


def test_the_length_term_is_tuned_when_asked(model: Path, nbest: Path, tmp_path: Path) -> None:
    record = {"reference": "hello world", "hypotheses": [{"text": "hello", "score": 0.0}, {"text": "hello world", "score": -0.1}]}
    dev = written(tmp_path / "dev.jsonl", [record] * 2)
    tokens = [len(score.tokens) for score in load_scorer(model, None, "cpu", warn=pytest.fail).score(["hello", "hello world"])]
    assert tokens[1] > tokens[0]
    done, _ = ranked(model, nbest, dev=dev, weight=0.0, tune_length=True)
    assert done.weights == Weights(0.0, 0.25)


def test_an_untuned_lambda_and_lists_tuned_on_themselves_are_told(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    lists = written(tmp_path / "a.jsonl", [LISTS[0]])
    done, _ = ranked(model, lists, warn=said.append)
    assert done.weights == Weights(0.5)
    assert "lambda is 0.5, a guess" in said[0]
    said.clear()
    ranked(model, lists, dev=lists, warn=said.append)
    assert "tuned on" in said[0]
    assert "itself" in said[0]


def test_without_references_nothing_is_measured(model: Path, tmp_path: Path) -> None:
    done, lines = ranked(model, written(tmp_path / "a.jsonl", [LISTS[1]]), weight=1.0)
    assert set(done.metrics.values()) == {None}
    assert len(lines) == 1


def test_without_the_extra_it_ranks_and_cannot_tune(model: Path, nbest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_metrics, "find_spec", lambda name: None)
    said: list[str] = []
    done, lines = ranked(model, nbest, weight=1.0, warn=said.append)
    assert set(done.metrics.values()) == {None}
    assert len(lines) == 3
    assert said == ["bleu and cer and wer are not measured: pip install 'discern-nlp[rerank]'"]
    with pytest.raises(ConfigError, match="needs the package jiwer"):
        ranked(model, nbest, dev=nbest)


def test_lower_case_is_for_the_model_alone(model: Path, tmp_path: Path) -> None:
    record = {"hypotheses": [{"text": "THE CHEF", "score": 0.0}, {"text": "the chef", "score": -1.0}]}
    _, lines = ranked(model, written(tmp_path / "a.jsonl", [record]), weight=1.0, lowercase=True)
    assert [text["text"] for text in lines[0]["hypotheses"]] == ["THE CHEF", "the chef"]
    assert len({text["model_score"] for text in lines[0]["hypotheses"]}) == 1


def test_long_texts_are_told(model: Path, tmp_path: Path) -> None:
    record = {"hypotheses": [{"text": f"{RIGHT} " * 9, "score": 0.0}]}
    said: list[str] = []
    ranked(model, written(tmp_path / "a.jsonl", [record]), weight=1.0, warn=said.append)
    assert len(said) == 1
    assert re.fullmatch(r"'.{39}: \d+ tokens, and the model was trained on 30 at a time: read in .* most context", said[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tune_length": True}, "--tune-length is for tuning, which needs --dev"),
        ({"dev": "nbest.jsonl", "tune_length": True, "length_weight": 1.0}, "both given"),
        ({"dev": "nbest.jsonl", "weight": 1.0}, "--dev and --lambda are both given"),
        ({"dev": "nbest.jsonl", "metric": "wed"}, "unknown metric 'wed'"),
        ({"max_weight": 0.0}, "--max-lambda is 0"),
        ({"weight": float("nan")}, "--lambda is nan, expected a finite number"),
        ({"weight": float("-inf")}, "--lambda is -inf, expected a finite number"),
        ({"max_weight": float("nan")}, "--max-lambda is nan, expected a finite number"),
        ({"max_weight": float("inf")}, "--max-lambda is inf, expected a finite number"),
        ({"length_weight": float("inf")}, "--length-weight is inf, expected a finite number"),
        ({"scorer": "elctric"}, "elctric"),
        ({"out": "."}, "is a folder"),
        ({"out": "nbest.jsonl"}, "is the input"),
        ({"metric": "cer", "weight": 0.1}, "--metric is for tuning, which needs --dev"),
        ({"max_weight": 2.0}, "--max-lambda is for tuning, which needs --dev"),
        (
            {"max_weight": 2.0, "weight": 0.1, "dev": "nbest.jsonl", "tune_length": True},
            "--max-lambda and --lambda are both given",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: dict[str, Any], said: str, model: Path, nbest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nbest.parent)
    paths = {name: Path(value) for name, value in options.items() if name in ("dev", "out")}
    with pytest.raises(ConfigError, match=said):
        rerank(model, nbest, Silent(), pytest.fail, **{"out": Path("o.jsonl"), **options, **paths})
    assert not Path("o.jsonl").exists()


def test_lists_to_tune_on_need_references(model: Path, nbest: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dev\.jsonl: no list has a reference"):
        ranked(model, nbest, dev=written(tmp_path / "dev.jsonl", [LISTS[1]]))


def test_json_and_what_people_see(model: Path, nbest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, dev = tmp_path / "out.jsonl", written(tmp_path / "dev.jsonl", [LISTS[0]])
    rerank_command(model, nbest, out=out, dev=dev, json_output=True)
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {
        "lists",
        "changed",
        "scorer",
        "lambda",
        "length_weight",
        "wer_before",
        "wer_after",
        "bleu_after",
        "dev",
    }
    assert found["wer_before"] == pytest.approx(2 / 6)
    assert len(found["wer_change_interval"]) == 2
    assert found["dev"]["wer_before"] == pytest.approx(1 / 5)
    assert (found["dev"]["wer_change_interval"], found["dev"]["wer_better_fraction"]) == (None, None)  # one list
    rerank_command(model, nbest, out=out, weight=0.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{out}: 3 lists with 5 hypotheses in total, 0 with a new best hypothesis; scorer electric, lambda 0,"
    )
    assert [line.split()[:3] for line in lines[2:4]] == [["wer", "0.3333", "0.3333"], ["cer", "0.2800", "0.2800"]]
    rerank_command(model, written(tmp_path / "a.jsonl", [LISTS[1]]), out=out, weight=0.0)
    assert "no metric was measured" in capsys.readouterr().out


def test_pll_is_preferred_to_the_odds_of_a_discriminator(tmp_path: Path, nbest: Path) -> None:
    """`score` asks for a cheap scorer, `rerank` for a likelihood; a name given decides."""
    make_run(tmp_path / "rtd")
    assert load_scorer(tmp_path / "rtd", None, "cpu", warn=pytest.fail).name == "rtd"
    assert ranked(tmp_path / "rtd", nbest, weight=0.1)[0].scorer == "pll"
    assert ranked(tmp_path / "rtd", nbest, weight=0.1, scorer="rtd")[0].scorer == "rtd"
