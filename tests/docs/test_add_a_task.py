"""The examples of the page about new tasks, run as they stand there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError
from discern.finetuning.evaluate import evaluate_finetuned
from discern.inference.prediction import predict
from discern.model_files.export import export
from discern.progress import Silent
from discern.tasks import tasks
from tests.small.run import make_run
from tests.small.task import Finetuning, finetune

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "add-a-task.md"
LINES = ["LOCATION where is the file", "NUMBER what is the shape", "TIME when does it return"]


FAST = ("train.max_steps=60", "optimizer.learning_rate=3e-3", "finetune.dropout=0")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data of the page's tasks, which stand in a module and are not yet registered."""
    module = types.ModuleType("kinds")
    monkeypatch.setitem(sys.modules, "kinds", module)
    monkeypatch.setattr(tasks, "_targets", dict(tasks._targets))
    for code in re.findall(r"```python\n(from .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, vars(module))
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "dev"):
        (folder / f"{split}.txt").write_text("\n".join([*LINES * 10, "NOTHING"]) + "\n")
    make_run(tmp_path / "run")
    return folder


def predicted(model: Path, content: str, notes: list[str]) -> list[dict[str, Any]]:
    """What is said of a file without kinds."""
    path = model.parent / "new.txt"
    path.write_text(content)
    found: list[dict[str, Any]] = []
    listener = Silent()
    listener.note = notes.append  # type: ignore[method-assign]
    predict(model, path, found.extend, listener)
    return found


def test_the_example_is_a_task(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.register("question-kind", "kinds:KINDS")
    notes: list[str] = []
    listener = Silent()
    monkeypatch.setattr(listener, "note", notes.append)
    request = Finetuning(str(tmp_path / "run"), tmp_path / "out", [("question-kind", data)], overrides=FAST)
    results = finetune(request, listener)
    assert results["metrics"]["accuracy"] == 1.0
    assert any("line without a question, left out: 1" in note for note in notes)
    notes.clear()
    questions = [line.partition(" ")[2] for line in LINES]
    found = predicted(tmp_path / "out", "\n".join([*questions, "", "where"]), notes)
    assert [each["label"] for each in found[:3]] == ["LOCATION", "NUMBER", "TIME"]
    assert [each["id"] for each in found] == ["1", "2", "3", "5"], "a text of one word is a question too"
    assert f"new.txt: line without a question, left out: 1 ({tmp_path / 'new.txt'}:4)" in notes


def test_the_example_of_a_family_is_used_afterwards(data: Path, tmp_path: Path) -> None:
    request = Finetuning(str(tmp_path / "run"), tmp_path / "out", [("sure-kind", data)], overrides=("train.max_steps=1",))
    tasks.register("sure-kind", "kinds:SURE")
    finetune(request, Silent())
    (said,) = predicted(tmp_path / "out", "where is it", [])
    assert set(said) == {"row", "id", "label", "probabilities", "is_sure"}
    assert evaluate_finetuned(tmp_path / "out", data, progress=Silent())["examples"] == 30
    assert export(tmp_path / "out", out=tmp_path / "export", progress=Silent(), warn=pytest.fail).task == "sure-kind"
    del tasks._targets["sure-kind"]
    with pytest.raises(ConfigError, match="'sure-kind' is of the family 'kinds', which is not installed here"):
        predicted(tmp_path / "out", "where is it", [])


def test_a_definition_under_another_name_is_refused_before_training(data: Path, tmp_path: Path) -> None:
    tasks.register("other-kind", "kinds:SURE")
    with pytest.raises(ConfigError, match="'sure-kind' of the family 'kinds' is not registered under its name"):
        finetune(Finetuning(str(tmp_path / "run"), tmp_path / "out", [("other-kind", data)]), Silent())
    assert not (tmp_path / "out").exists()
