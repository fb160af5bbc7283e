"""Verbs that encode text report how much of it the vocabulary does not know; for scores and predictions, see their tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from discern.finetuning.evaluate import evaluate_finetuned
from discern.inference.detection import detect, detect_each, load_detector
from discern.inference.filling import fill
from discern.inference.scoring.rerank import rerank
from discern.inference.texts import InputText
from tests.pretraining.commands import Notes
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.task import Finetuning, prepare_finetuning, write_csv

UNKNOWN = "ξενία ☂ ☃ ☄ ★ ☎"


def _detected(text: str, run: Path, folder: Path, notes: Notes) -> None:
    detect(run, [text], notes, notes.warn)


def _detected_each(text: str, run: Path, folder: Path, notes: Notes) -> None:
    list(detect_each(load_detector(run, notes.warn), [InputText("line 1", 1, text)], notes, notes.warn))


def _filled(text: str, run: Path, folder: Path, notes: Notes) -> None:
    fill(run, f"{text} [MASK]", 1, notes.warn, note=notes.note)


def _reranked(text: str, run: Path, folder: Path, notes: Notes) -> None:
    hypotheses = [{"text": text, "score": -1.0}, {"text": f"{text} ", "score": -2.0}]
    (folder / "lists.jsonl").write_text(json.dumps({"id": "a", "hypotheses": hypotheses}) + "\n")
    rerank(run, folder / "lists.jsonl", notes, notes.warn, out=folder / "out.jsonl", weight=0.5)


def _judged(text: str, run: Path, folder: Path, notes: Notes) -> None:
    tuned = make_finetuned(folder / "tuned", single=SINGLE)
    evaluate_finetuned(tuned, write_csv(folder / "a.csv", [(text, "good")], ("review", "stars")), progress=notes)


def _finetuned(text: str, run: Path, folder: Path, notes: Notes) -> None:
    rows = [(f"{text} " + "the " * number, label) for number in range(20) for label in ("good", "bad")]
    train = write_csv(folder / "train.csv", rows, ("review", "label"))
    files = (f"files.train='{train}'", f"files.dev='{train}'", "files.text=review", "files.label=label")
    prepare_finetuning(Finetuning(str(run), folder / "out", overrides=files), notes)


@pytest.mark.parametrize("text", ["the chef cooked the meal", UNKNOWN])
@pytest.mark.parametrize("verb", [_detected, _detected_each, _filled, _reranked, _judged, _finetuned])
def test_the_share_is_reported(verb: Callable[..., None], text: str, small_model: Path, tmp_path: Path) -> None:
    verb(text, small_model, tmp_path, notes := Notes())
    lines = [line for line in notes.lines if "unknown" in line]
    assert [line.startswith("warning: ") for line in lines] == [True] * (text == UNKNOWN), "only if there are some"
    assert all("are unknown to the vocabulary ([UNK])" in line for line in lines)


def test_few_examples_to_judge_by_are_told(small_model: Path, tmp_path: Path) -> None:
    _finetuned("a", small_model, tmp_path, notes := Notes())
    (line,) = (line for line in notes.lines if "unreliable" in line)
    assert line.startswith("warning: ")
    assert line.endswith("40 examples (dev), so they are unreliable; evaluate on more examples with --dev FILE")
