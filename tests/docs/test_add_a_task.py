"""The example of the page about new tasks, run as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from discern.progress import Silent
from discern.registry import Registry
from discern.workflows import finetune as workflow
from discern.workflows.finetune import FinetuneRequest, finetune
from tests.workflows.small_run import make_run

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "add-a-task.md"
LINES = ["LOCATION where is the file", "NUMBER what is the shape", "TIME when does it return"]


def test_the_example_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(from dataclasses.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    module = types.ModuleType("kinds")
    monkeypatch.setitem(sys.modules, "kinds", module)
    exec(code[1], vars(module))
    known: Registry[object] = Registry("task")
    known.register("question-kind", "kinds:KINDS")
    monkeypatch.setattr(workflow, "registry", known)

    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "dev"):
        (data / f"{split}.txt").write_text("\n".join([*LINES * 10, "NOTHING"]) + "\n")
    make_run(tmp_path / "run")
    notes: list[str] = []
    listener = Silent()
    monkeypatch.setattr(listener, "note", notes.append)
    fast = ("train.max_steps=60", "optimizer.learning_rate=3e-3", "finetune.dropout=0")
    request = FinetuneRequest(str(tmp_path / "run"), tmp_path / "out", [("question-kind", data)], overrides=fast)
    results = finetune(request, listener)
    assert results["metrics"]["accuracy"] == 1.0
    assert any("line without a question, left out: 1" in note for note in notes)
