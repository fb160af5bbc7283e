from pathlib import Path

import pytest

from discern.demo import run as module
from discern.demo.documentation import Collected
from discern.demo.run import DemoResult, demo
from discern.demo.task import LabeledTask
from discern.finetuning.results import spread
from discern.progress import Silent
from tests.support import run_python

FEW = ("train.max_steps=4", "train.evaluate_every_steps=0", "train.evaluate_sequences=8", "train.checkpoint_every_steps=2")


def warn(message: str) -> None:
    if "unknown to the vocabulary" not in message:  # 200 entries know few words of the sentences
        raise AssertionError(message)


def test_the_whole_way_and_again(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    texts = [f"Return item number {number} of the list and {number * 7} of the other one." for number in range(400)]
    kinds = ["class", "function"] * 200
    monkeypatch.setattr(module, "collect", lambda limit, advance: Collected(texts, kinds, 40, 3, sum(map(len, texts))))
    monkeypatch.setattr(module, "VOCABULARY", 200)

    def run() -> DemoResult:
        few = {"overrides": FEW, "task_overrides": ("train.max_steps=2",)}
        return demo(out=tmp_path / "demo", minutes=1, progress=Silent(), warn=warn, **few)

    result = run()
    assert result.metrics["step"] == 4
    assert 0 <= result.metrics["discriminator_auc"] <= 1
    assert result.text["documents"] == 400
    assert len(result.sentences) == len(module.SENTENCES)
    for found in result.sentences:
        assert found.word in found.detection.text
        assert 1 <= found.rank <= len(found.detection.tokens)
    assert result.wrong_words is not None
    assert 1 <= result.wrong_words.sentences <= 200
    assert 0 <= result.wrong_words.auc <= 1
    assert 0 <= result.wrong_words.most_suspicious <= result.wrong_words.sentences
    assert "<svg" in result.report.read_text()
    assert result.task is not None
    assert result.task.examples == 200
    assert [len(part["scores"]) for part in (result.task.pretrained, result.task.untrained)] == [3, 3]

    monkeypatch.setattr(module, "collect", None)  # the text is there: it must not be read again
    again = run()
    assert again.metrics == result.metrics
    assert again.task == result.task


def test_the_verdict_is_what_the_seeds_allow() -> None:
    def task(pretrained: list[float], untrained: list[float]) -> LabeledTask:
        return LabeledTask(9, *(spread(scores) for scores in (pretrained, untrained)))

    better = task([0.8, 0.9, 0.7], [0.6, 0.5, 0.65])
    assert better.difference == pytest.approx(0.2)
    assert better.verdict == "every pre-trained seed is above every untrained one"
    assert task([0.5, 0.6], [0.7, 0.8]).verdict == "every pre-trained seed is below every untrained one"
    assert task([0.5, 0.9], [0.6, 0.6]).verdict.startswith("no difference")


def test_the_rank_is_that_of_the_wrong_word() -> None:
    from discern.inference.detection import Detection

    detection = Detection("go an home", ["go", "an", "home"], [(0, 2), (3, 5), (6, 10)], [0.2, 0.6, 0.7])
    assert module._rank(detection, "go", "an").rank == 2
    detection = Detection("go an home", ["go", "an", "home"], [(0, 2), (3, 5), (6, 10)], [0.2, 0.9, 0.7])
    assert module._rank(detection, "go", "an").rank == 1


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run_python("-m", "discern", "demo", "--out", tmp_path, "--json")
    assert done.returncode == 1
    assert "not empty" in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
