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


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str) -> None:
    """Put a package with these entry points where Python looks for packages."""
    (folder / "published_kinds.py").write_text(MODULE)
    about = folder / "published_kinds-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: published-kinds\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))


def fresh() -> Registry[Definition[object]]:
    """A registry that has not yet looked at what is installed."""
    known: Registry[Definition[object]] = Registry("task", "discern.tasks")
    known.register("rte", "discern.tasks.named:TASKS")
    return known


def test_a_task_of_another_package_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "[discern.tasks]\nquestion-kind = published_kinds:KINDS\n")
    known = fresh()
    assert known.names() == ["question-kind", "rte"]
    assert known.load("question-kind").name == "question-kind"


def test_a_name_that_is_taken_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "[discern.tasks]\nrte = published_kinds:KINDS\n")
    with pytest.raises(ConfigError, match="task 'rte' is registered twice") as caught:
        fresh().load("rte")
    assert caught.value.hint == "give one of them another name"


def test_other_groups_are_not_read_and_ours_is_the_one_that_is_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "[discern.objectives]\nquestion-kind = published_kinds:KINDS\n")
    assert fresh().names() == ["rte"]
    assert tasks._group == "discern.tasks"


def test_every_task_loads_under_its_own_name() -> None:
    for name in tasks.names():
        assert tasks.load(name).name == name
