"""`discern detect --evaluate`: precision and recall by word, with probabilities made by hand and with the shipped model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from discern.cli.detect import detect as detect_command
from discern.errors import DataError
from discern.inference import detection_evaluation
from discern.inference.detection import Detection, Detector
from discern.inference.detection_evaluation import THRESHOLDS, evaluate_detection
from discern.inference.texts import CheckedText
from discern.progress import Silent

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "modern-cpu"


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Probabilities by text; every two characters are a token."""
    known: dict[str, list[float]] = {}

    def said(
        detector: Detector, texts: Iterable[CheckedText], progress: Silent, warn: Callable[[str], None]
    ) -> Iterator[tuple[CheckedText, Detection]]:
        for each in texts:
            probabilities = known[each.text]
            offsets = [(2 * n, 2 * n + 2) for n in range(len(probabilities))]
            yield each, Detection(each.text, ["?"] * len(offsets), offsets, probabilities)

    monkeypatch.setattr(detection_evaluation, "detect_each", said)
    return known


def evaluated(file: Path, threshold: float | None = None, warn: Callable[[str], None] = pytest.fail) -> dict[str, Any]:
    return evaluate_detection(SHIPPED, file, Silent(), warn, threshold=threshold)


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
    assert rates[0.2]["f1"] == pytest.approx(6 / 7)
    assert rates[0.9]["precision"] == rates[0.9]["f1"] == 0
    assert (found["threshold"], found["threshold_origin"], found["at_threshold"]["precision"]) == (0.65, "given", 1.0)
    assert found["best_f1"]["f1"] == pytest.approx(6 / 7)
    assert found["by_kind"] == {}


def test_recall_by_kind(by_hand: dict[str, list[float]], tmp_path: Path) -> None:
    by_hand |= {"ab cd ef": [0.9, 0.0, 0.8, 0.3]}
    kinds = [
        {"start": 0, "end": 2, "kind": "hand"},
        {"start": 3, "end": 5, "kind": "hand"},
        {"start": 6, "end": 8, "kind": "drawn"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ab cd ef", "wrong": kinds}))
    assert evaluated(tmp_path / "a.jsonl", threshold=0.85)["by_kind"] == {
        "drawn": {"wrong": 1, "recall": 0.0},
        "hand": {"wrong": 2, "recall": 0.5},
    }


def test_a_span_of_several_words_makes_all_of_them_wrong(by_hand: dict[str, list[float]], tmp_path: Path) -> None:
    by_hand |= {"ab cd ef": [0.9, 0.0, 0.8, 0.3]}
    (tmp_path / "a.txt").write_text("[[ab cd]] ef")
    assert evaluated(tmp_path / "a.txt")["wrong"] == 2


def test_where_every_word_is_wrong_there_is_no_area(
    by_hand: dict[str, list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand |= {"ab cd": [0.9, 0.0, 0.8]}
    (tmp_path / "a.txt").write_text("[[ab cd]]")
    assert evaluated(tmp_path / "a.txt")["auc"] is None
    detect_command(SHIPPED, evaluate=tmp_path / "a.txt")
    assert capsys.readouterr().out.splitlines()[0] == "1 sentence, 2 words, 2 of them wrong; AUC -"


@pytest.mark.parametrize(("content", "said"), [("", "has no sentences"), ("All is right.\n", "1 sentence but no wrong words")])
def test_a_file_without_wrong_words_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        evaluated(tmp_path / "a.txt")
    assert "[[" in str(caught.value.hint)


def test_with_the_shipped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("He was [[because]] in the city of London.\nThe river [[an]] to the sea.\n")
    detect_command(SHIPPED, evaluate=tmp_path / "a.txt", json_output=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["sentences"], found["words"], found["wrong"]) == (2, 16, 2)
    assert 0.5 < found["auc"] <= 1
    detect_command(SHIPPED, evaluate=tmp_path / "a.txt")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("2 sentences, 16 words, 2 of them wrong; AUC ")
    assert printed[1].split() == ["threshold", "precision", "recall", "F1", "marked"]
    assert len(printed) == 2 + len(THRESHOLDS) + 2
    assert any(" default " in line for line in printed)
