"""Every verb that encodes text reports how much of it the vocabulary does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from discern.finetuning.evaluate import evaluate_finetuned
from discern.inference.detection import detect, detect_each, load_detector
from discern.inference.fill import fill
from discern.inference.predict import predict
from discern.inference.rerank import rerank
from discern.inference.score_file import score_lines
from discern.inference.scoring import load_scorer
from discern.inference.texts import InputText
from discern.progress import Silent
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run
from tests.small.task import Finetuning, prepare_finetuning, write_csv

KNOWN, UNKNOWN = "the chef cooked the meal", "ξενία ☂ ☃ ☄ ★ ☎"


class Listener(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, message: str) -> None:
        self.lines.append(f"warning: {message}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    make_run(folder / "run")
    return folder / "run", make_finetuned(folder / "tuned", single=SINGLE)


def _scored(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    (folder / "a.txt").write_text(text + "\n")
    list(score_lines(load_scorer(run, warn=heard.warn), folder / "a.txt", heard, heard.warn))


def _detected(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    detect(run, [text], heard, heard.warn)


def _detected_each(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    list(detect_each(load_detector(run, heard.warn), [InputText("line 1", 1, text)], heard, heard.warn))


def _filled(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    fill(run, f"{text} [MASK]", 1, heard.warn, note=heard.note)


def _reranked(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    hypotheses = [{"text": text, "score": -1.0}, {"text": f"{text} ", "score": -2.0}]
    (folder / "lists.jsonl").write_text(json.dumps({"id": "a", "hypotheses": hypotheses}) + "\n")
    rerank(run, folder / "lists.jsonl", heard, heard.warn, out=folder / "out.jsonl", weight=0.5)


def _predicted(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    predict(tuned, write_csv(folder / "a.csv", [(text,)], ("review",)), lambda _: None, heard)


def _judged(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    evaluate_finetuned(tuned, write_csv(folder / "a.csv", [(text, "good")], ("review", "stars")), progress=heard)


def _finetuned(text: str, run: Path, tuned: Path, folder: Path, heard: Listener) -> None:
    rows = [(f"{text} " + "the " * number, label) for number in range(20) for label in ("good", "bad")]
    train = write_csv(folder / "train.csv", rows, ("review", "label"))
    files = (f"files.train='{train}'", f"files.dev='{train}'", "files.text=review", "files.label=label")
    prepare_finetuning(Finetuning(str(run), folder / "out", overrides=files), heard)


@pytest.mark.parametrize(
    "verb",
    [_scored, _detected, _detected_each, _filled, _reranked, _predicted, _judged, _finetuned],
    ids=lambda verb: verb.__name__,
)
def test_the_share_is_reported(verb: Callable[..., None], models: tuple[Path, Path], tmp_path: Path) -> None:
    for text, expected in ((KNOWN, "unknown tokens: "), (UNKNOWN, "are unknown to the vocabulary ([UNK])")):
        heard = Listener()
        folder = tmp_path / expected[:3]
        folder.mkdir()
        verb(text, *models, folder, heard)
        (line,) = (line for line in heard.lines if "unknown" in line)
        assert expected in line
        assert line.startswith("warning: ") == (text == UNKNOWN)


def test_few_examples_to_judge_by_are_told(models: tuple[Path, Path], tmp_path: Path) -> None:
    heard = Listener()
    _finetuned(KNOWN, *models, tmp_path, heard)
    (line,) = (line for line in heard.lines if "unreliable" in line)
    assert line.startswith("warning: ")
    assert line.endswith("40 examples (dev), so they are unreliable; evaluate on more examples with --dev FILE")
