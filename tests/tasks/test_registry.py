"""Tasks that another package publishes under the entry point group `discern.tasks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.errors import ConfigError
from discern.registry import Registry
from discern.tasks import tasks
from discern.tasks.base import Definition

MODULE = """
from discern.tasks.base import Definition
from discern.tasks.classification import Classification

KINDS = Definition("question-kind", Classification, ("accuracy",))
"""


def registry(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Registry[Definition[object]]:
    """One like ours that has not yet looked at what is installed: a package that publishes a task under this name."""
    (folder / "published_kinds.py").write_text(MODULE)
    about = folder / "published_kinds-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: published-kinds\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[discern.tasks]\n{name} = published_kinds:KINDS\n")
    monkeypatch.syspath_prepend(str(folder))
    fresh: Registry[Definition[object]] = Registry("task", tasks._group)
    fresh.register("rte", "discern.tasks.named:TASKS")
    return fresh


def test_a_task_of_another_package_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry(tmp_path, monkeypatch, "question-kind")
    assert known.names() == ["question-kind", "rte"]
    assert known.load("question-kind").name == "question-kind"


def test_a_name_that_is_taken_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="task 'rte' is registered twice") as caught:
        registry(tmp_path, monkeypatch, "rte").load("rte")
    assert caught.value.hint == "give one of them another name"


def test_every_task_loads_under_its_own_name() -> None:
    for name in tasks.names():
        assert tasks.load(name).name == name
