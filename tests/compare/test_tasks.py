"""Folders of tasks are found by the names that people give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.compare.plan import CompareConfig, RunSpec, TaskFolder, find_task_folders
from discern.errors import ConfigError, DataError


def find(root: Path | None, *tasks: str, **given: Path) -> list[TaskFolder]:
    return find_task_folders(CompareConfig(run=(RunSpec(name="a"),), tasks=tasks, task_data=given), root)


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("x\n")
    return folder


@pytest.mark.parametrize(
    ("task", "place", "file"), [("stsb", "glue/STS-B", "train.tsv"), ("chunk", "data/CoNLL-2000", "train.txt")]
)
def test_usual_names(tmp_path: Path, task: str, place: str, file: str) -> None:
    folder = make(tmp_path / place, file)
    (found,) = find(tmp_path, task)
    assert (found.folder, set(found.files)) == (folder, {"train"})


def test_the_folder_itself_a_given_one_and_one_without_the_files(tmp_path: Path) -> None:
    make(tmp_path / "RTE", "readme.txt")
    folder = make(tmp_path / "glue" / "rte", "train.tsv", "dev.tsv")
    assert find(folder, "rte")[0].folder == find(tmp_path, "rte")[0].folder == folder
    mine = make(tmp_path / "mine", "train.tsv")
    for root in (tmp_path, None):
        (given,) = find(root, "rte", rte=mine)
        assert given.folder == mine
    (mine / "train.tsv").write_text("y\n")
    assert find(None, "rte", rte=mine)[0].files != given.files, "a changed file is another task"


def test_what_was_looked_for_is_listed(tmp_path: Path) -> None:
    make(tmp_path / "CoLA", "train.tsv")
    with pytest.raises(DataError) as caught:
        find(tmp_path, "cola", "rte", "chunk")
    message = str(caught.value)
    for part in ("rte: a folder called rte", "chunk or conll2000", "[task_data]"):
        assert part in message
    assert "cola:" not in message
    with pytest.raises(DataError, match=r"--task-data \(not given\)"):
        find(None, "rte")
    with pytest.raises(ConfigError, match="unknown task 'rt'\\n  hint: did you mean 'rte'"):
        find(tmp_path, "rt")
