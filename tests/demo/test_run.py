from pathlib import Path
from typing import Any

import pytest

from discern.demo import run as module
from discern.demo.run import demo
from discern.errors import DataError
from discern.progress import Silent

FEW = ("train.max_steps=4", "train.evaluate_every_steps=0", "train.evaluate_sequences=8", "train.checkpoint_every_steps=2")


def test_the_whole_way_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Return item number {number} of the list and {number * 7} of the other one." for number in range(400)]
    records = [
        {"text": text, "kind": kind, "module": "a/b.py"} for text, kind in zip(texts, ["class", "function"] * 200, strict=True)
    ]
    monkeypatch.setattr(module, "collect", lambda limit, advance: records)
    monkeypatch.setattr(module, "VOCABULARY", 200)
    monkeypatch.setattr(module, "FINETUNE_SETTINGS", (*module.FINETUNE_SETTINGS, "train.max_steps=2"))
    result = demo(tmp_path / "demo", 1, FEW, Silent())
    assert result["text"] == {"documents": 400, "characters": sum(map(len, texts)), "modules": 1, "packages": 1}
    assert len(result["sentences"]) == len(module.SENTENCES)
    for sentence in result["sentences"]:
        assert 1 <= sentence["rank"] <= sentence["words"]
    assert 0 <= result["wrong_words"]["most_suspicious"] <= result["wrong_words"]["sentences"] <= 200
    assert "<svg" in Path(result["report"]).read_text()
    task = result["labeled_task"]
    assert task["examples"] == 200
    assert [len(task[part]) for part in ("pretrained", "untrained")] == [3, 3]
    assert 0 <= result["baseline"]["metrics"]["accuracy"] <= 1
    assert result["note"].startswith("4 steps are too few")

    monkeypatch.setattr(module, "collect", None)  # the text is there: it must not be read again
    again = demo(tmp_path / "demo", 1, FEW, Silent())
    varying: dict[str, Any] = {"seconds_by_stage": {}}
    assert again | varying == result | varying


@pytest.mark.parametrize(
    ("pretrained", "untrained", "verdict"),
    [
        ([0.8, 0.9, 0.7], [0.6, 0.5, 0.65], "every pre-trained seed is above every untrained one"),
        ([0.5, 0.6], [0.7, 0.8], "every pre-trained seed is below every untrained one"),
        ([0.5, 0.9], [0.6, 0.6], "no difference: the seeds of the two overlap"),
    ],
)
def test_the_verdict_is_what_the_seeds_allow(pretrained: list[float], untrained: list[float], verdict: str) -> None:
    assert module.verdict(pretrained, untrained) == verdict


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="is not empty and holds no demonstration"):
        demo(tmp_path, 1, (), Silent())
