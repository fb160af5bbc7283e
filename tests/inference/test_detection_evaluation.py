"""Thresholds by hand, on corrupted text and beside a model; precision and recall by word on marked sentences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discern.corruption.masking import quota
from discern.data.batching.segments import ExampleStream, PackedRows
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.inference import detection as module
from discern.inference.detection import (
    THRESHOLDS,
    Detection,
    Detector,
    MarkedText,
    calibrate,
    chosen_threshold,
    detect_corrupted,
    distinct_thresholds,
    evaluate_detection,
    load_detector,
    rates_at,
    read_checked,
)
from discern.model_files.export import export
from discern.model_files.hub import CALIBRATION_NAME
from discern.progress import Silent
from tests.inference.test_detection import SHIPPED, V, network, small_detector
from tests.small.run import make_run
from tests.support import SPECIAL, MemorySplit, random_documents

# From the highest: wrong, wrong, right, wrong, right, right, wrong, right; two pairs of equal scores.
SCORES = [0.9, 0.8, 0.7, 0.7, 0.5, 0.4, 0.2, 0.2]
WRONG = [True, True, False, True, False, False, True, False]


def arrays(scores: list[float], wrong: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(0).permutation(len(scores))
    return np.array(scores)[order], np.array(wrong, np.bool_)[order]


@pytest.mark.parametrize(
    ("threshold", "marked", "hits"),
    [(1.0, 0, 0), (0.9, 1, 1), (0.85, 1, 1), (0.7, 4, 3), (0.71, 2, 2), (0.5, 5, 3), (0.0, 8, 4)],
)
def test_a_score_that_equals_the_threshold_is_marked(threshold: float, marked: int, hits: int) -> None:
    (found,) = rates_at(*arrays(SCORES, WRONG), [threshold])
    precision = hits / marked if marked else 0
    assert found == {
        "threshold": threshold,
        "precision": precision,
        "recall": hits / 4,
        "f1": pytest.approx(2 * hits / (marked + 4)),
        "marked": marked,
        "hits": hits,
    }


def test_every_threshold_is_midway_and_equal_scores_are_not_parted() -> None:
    scores, wrong = arrays(SCORES, WRONG)
    found = rates_at(scores, wrong, distinct_thresholds(scores))
    assert [(each["marked"], each["hits"]) for each in found] == [(1, 1), (2, 2), (4, 3), (5, 3), (6, 3), (8, 4)]
    assert [each["threshold"] for each in found] == pytest.approx([0.85, 0.75, 0.6, 0.45, 0.3, 0.2])
    assert (found[2]["precision"], found[2]["recall"], found[2]["f1"]) == (0.75, 0.75, 0.75)


# Calibration


def corrupted(kind: str, **options: Any) -> tuple[ExampleStream, np.ndarray, np.ndarray]:
    split = MemorySplit(random_documents(6, V, sentences=(2, 4), words=(3, 12)))
    stream = ExampleStream(PackedRows(split, SPECIAL, 16, 0, rotate=False), 0, shuffle=False)
    return stream, *detect_corrupted(small_detector(kind), network(kind), stream, progress=Silent(), **options)


@pytest.mark.parametrize("kind", ["masked", "two-tower"])
def test_every_token_that_is_not_special_is_judged_once(kind: str) -> None:
    rows, probability, is_replaced = corrupted(kind, corruption=0.3, sequences=0)
    batch = rows.batch(np.arange(rows.num_rows), np.arange(rows.num_rows))
    assert len(probability) == int(batch.maskable.sum())
    # Never more are replaced than were chosen; nearly all that were.
    chosen = int(quota(batch.maskable, 0.3).sum())
    assert 0.5 * chosen < is_replaced.sum() <= chosen


@pytest.mark.parametrize("tokens", [1, 40])
def test_batches_and_other_rows_change_nothing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, expected_replaced = corrupted("masked", corruption=0.2, sequences=5)
    monkeypatch.setattr(module, "TOKENS_PER_BATCH", tokens)
    _, probability, is_replaced = corrupted("masked", corruption=0.2, sequences=5)
    assert is_replaced.tolist() == expected_replaced.tolist()
    assert probability == pytest.approx(expected, abs=1e-6)


SENTENCES = """The river rises in the hills north of the town and flows south to the sea.
It was built in the early nineteenth century by the railway company.
He was elected to the council in 1921 and served for three years.
The film was released in the United States and received mixed reviews.
She studied law at the university before she moved to the capital.
The species is found in forests and is threatened by the loss of habitat.
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "a.txt").write_text("\n".join(f"{line}\n" for line in SENTENCES.splitlines() * 4))
    return prepared(folder / "a.txt", folder / "data", 0.9)


def prepared(text: Path, out: Path, heldout: float) -> Path:
    build = PrepareOptions(heldout=heldout, workers=1)
    prepare([str(text)], out=out, tokenizer=TokenizerChoice(path=SHIPPED), options=build, progress=Silent())
    return out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(SHIPPED, tmp_path / "model")
    return tmp_path / "model"


def calibrated(model: Path, data: Path, warn: Callable[[str], None] = pytest.fail, **options: Any) -> dict[str, Any]:
    return calibrate(model, data, Silent(), warn, **{"precision": 0.5, "corruption": 0.3, **options})


def test_the_threshold_has_the_precision_that_it_says(model: Path, data: Path) -> None:
    values = calibrated(model, data)
    assert values["reached"]
    assert values["precision"] == values["hits"] / values["marked"] >= 0.5
    assert values["recall"] == values["hits"] / values["replaced"]
    assert values["marked"] >= 20
    low, high = values["precision_interval"]
    assert 0 < low < values["precision"] < high < 1


def test_it_is_kept_beside_the_model_and_gone_by(model: Path, data: Path) -> None:
    detector = load_detector(model, pytest.fail)
    assert chosen_threshold(model, detector, None, pytest.fail) == (0.5, "default")
    values = calibrated(model, data)
    assert values["kept"] == model / CALIBRATION_NAME
    assert chosen_threshold(model, detector, None, pytest.fail) == (values["threshold"], "calibrated for precision 0.5")
    assert chosen_threshold(model, detector, 0.25, pytest.fail) == (0.25, "given")
    assert calibrated(model, data) == values
    with torch.no_grad():
        detector.network.head.output.bias += 0.01
    said: list[str] = []
    assert chosen_threshold(model, detector, None, said.append)[0] == 0.5
    assert "was calibrated for other weights" in said[0]


def test_a_precision_out_of_reach_is_said_and_nothing_is_kept(model: Path, data: Path) -> None:
    values = calibrated(model, data, precision=1.0, corruption=0.05)
    assert (values["reached"], values["kept"]) == (False, None)
    assert not (model / CALIBRATION_NAME).exists()


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("content", ["", '{"format": 1, "threshold": 7}', '{"format": 2}'])
def test_a_damaged_calibration_is_named(content: str, model: Path) -> None:
    (model / CALIBRATION_NAME).write_text(content)
    with pytest.raises(DataError, match=r"detection\.json (is damaged|has format 2)") as caught:
        chosen_threshold(model, load_detector(model, pytest.fail), None, pytest.fail)
    assert "--threshold" in str(caught.value.hint)


def test_what_cannot_be_calibrated_is_refused(model: Path, tmp_path: Path, data: Path) -> None:
    make_run(tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "alone", progress=Silent(), warn=pytest.fail)
    with pytest.raises(ConfigError, match="has no generator") as caught:
        calibrated(tmp_path / "alone", data)
    assert "--all-networks" in str(caught.value.hint)
    with pytest.raises(DataError, match="a different tokenizer") as other:
        calibrated(tmp_path / "run", data)
    assert "--tokenizer" in str(other.value.hint)
    (tmp_path / "a.txt").write_text("The river rises.\n\nIt was built in the town.\n")
    for heldout, said in ((0.5, "has too little held-out text"), (0.0, "has no held-out split")):
        with pytest.raises(DataError, match=said):
            calibrated(model, prepared(tmp_path / "a.txt", tmp_path / f"data{heldout}", heldout))


# Marked sentences


def test_brackets_stand_around_wrong_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The [[eight]] it [a].\n\nAll right.\n[[a b]][[c]]\n")
    found = list(read_checked(tmp_path / "a.txt"))
    assert [text.text for text in found] == ["The eight it [a].", "All right.", "a bc"]
    assert [text.number for text in found] == [1, 3, 4]
    assert [text.wrong for text in found] == [((4, 9, ""),), (), ((0, 3, ""), (3, 4, ""))]


def test_spans_of_json_lines(tmp_path: Path) -> None:
    spans = '[{"start": 8, "end": 10, "kind": "random"}, [0, 3]]'
    (tmp_path / "a.jsonl").write_text(f'{{"text": "The dog it.", "wrong": {spans}}}\n{{"text": "Fine.", "wrong": []}}\n')
    assert [text.wrong for text in read_checked(tmp_path / "a.jsonl")] == [((0, 3, ""), (8, 10, "random")), ()]


@pytest.mark.parametrize("line", ["The [[eight it.", "The [[ ]] it.", "The [[a [[b]] it."])
def test_wrong_brackets_are_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"fine\n{line}")
    with pytest.raises(DataError, match=r"a\.txt:2: expected one wrong word in each \[\[pair") as caught:
        list(read_checked(tmp_path / "a.txt"))
    assert "JSON lines" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('"wrong": [[0, 30]]', "span 0 to 30 has no word of the text of 11 characters"),
        ('"wrong": [[3, 4]]', "span 3 to 4 has no word"),
        ('"wrong": [["3", 4]]', "is damaged"),
        ('"wrong": [{"start": 4}]', "it has no 'end'"),
        ('"right": []', "it has no 'wrong'"),
    ],
)
def test_wrong_spans_are_named(wrong: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'\n{{"text": "The dog it.", {wrong}}}\n')
    with pytest.raises(DataError) as caught:
        list(read_checked(tmp_path / "a.jsonl"))
    assert "a.jsonl:2" in caught.value.message
    assert said in caught.value.message


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Probabilities by text; every two characters are a token."""
    known: dict[str, list[float]] = {}

    def said(
        detector: Detector, texts: Iterable[MarkedText], progress: Silent, warn: Callable[[str], None]
    ) -> Iterator[tuple[MarkedText, Detection]]:
        for each in texts:
            offsets = [(2 * n, 2 * n + 2) for n in range(len(known[each.text]))]
            yield each, Detection(each.text, ["?"] * len(offsets), offsets, known[each.text])

    monkeypatch.setattr(module, "detect_each", said)
    return known


def evaluated(file: Path, threshold: float | None = None) -> dict[str, Any]:
    return evaluate_detection(SHIPPED, file, Silent(), pytest.fail, threshold=threshold)


def test_a_word_is_judged_by_its_worst_token(by_hand: dict[str, list[float]], tmp_path: Path) -> None:
    # Words "abcd" 0.7, "x" 0.1, "efgh" 0.3 and "ij" 0.6, "klm" 0.2; wrong are "abcd", "efgh" and "klm".
    by_hand |= {"abcd x efgh": [0.1, 0.7, 0.1, 0.0, 0.3, 0.2], "ij klm": [0.6, 0.2, 0.1]}
    (tmp_path / "a.txt").write_text("[[abcd]] x [[efgh]]\nij [[klm]]\n")
    found = evaluated(tmp_path / "a.txt", threshold=0.65)
    assert (found["sentences"], found["words"], found["wrong"]) == (2, 5, 3)
    # Of the pairs of a wrong and a right word, 0.7 beats both, 0.3 and 0.2 beat 0.1 and lose to 0.6.
    assert found["auc"] == pytest.approx(4 / 6)
    rates = {each["threshold"]: each for each in found["thresholds"]}
    assert list(rates) == list(THRESHOLDS)
    assert (rates[0.5]["marked"], rates[0.5]["precision"], rates[0.5]["recall"]) == (2, 0.5, pytest.approx(1 / 3))
    assert (rates[0.2]["marked"], rates[0.2]["precision"], rates[0.2]["recall"]) == (4, 0.75, 1.0)
    assert rates[0.9]["precision"] == rates[0.9]["f1"] == 0
    assert (found["threshold"], found["threshold_origin"], found["at_threshold"]["precision"]) == (0.65, "given", 1.0)
    assert found["best_f1"]["f1"] == pytest.approx(6 / 7)
    assert found["by_kind"] == {}


def test_recall_by_kind_and_spans_of_several_words(by_hand: dict[str, list[float]], tmp_path: Path) -> None:
    by_hand |= {"ab cd ef": [0.9, 0.0, 0.8, 0.3]}
    kinds = [[0, 2, "hand"], [3, 5, "hand"], [6, 8, "drawn"]]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ab cd ef", "wrong": kinds}))
    found = evaluated(tmp_path / "a.jsonl", threshold=0.85)
    assert found["by_kind"] == {"drawn": {"wrong": 1, "recall": 0.0}, "hand": {"wrong": 2, "recall": 0.5}}
    assert found["auc"] is None, "every word is wrong"
    (tmp_path / "a.txt").write_text("[[ab cd]] ef")
    assert evaluated(tmp_path / "a.txt")["wrong"] == 2


@pytest.mark.parametrize(("content", "said"), [("", "has no sentences"), ("All is right.\n", "1 sentence but no wrong words")])
def test_a_file_without_wrong_words_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        evaluated(tmp_path / "a.txt")
    assert "[[" in str(caught.value.hint)
