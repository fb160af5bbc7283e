"""Folders of tasks are found by the names that people give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.compare.tasks import find_task_folders
from discern.errors import DataError


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("x\n")
    return folder


@pytest.mark.parametrize(
    ("task", "place", "file"),
    [
        ("rte", "RTE", "train.tsv"),
        ("stsb", "glue/STS-B", "train.tsv"),
        ("sst2", "sst_2", "train.tsv"),
        ("chunk", "data/CoNLL-2000", "train.txt"),
        ("chunk", "chunk", "train.txt"),
    ],
)
def test_usual_names(tmp_path: Path, task: str, place: str, file: str) -> None:
    folder = make(tmp_path / place, file)
    (found,) = find_task_folders([task], tmp_path, {})
    assert (found.name, found.folder) == (task, folder)
    assert set(found.files) == {"train"}


def test_the_folder_itself_and_a_given_one(tmp_path: Path) -> None:
    folder = make(tmp_path / "RTE", "train.tsv", "dev.tsv")
    assert find_task_folders(["rte"], folder, {})[0].folder == folder
    mine = make(tmp_path / "mine", "train.tsv")
    assert find_task_folders(["rte"], tmp_path, {"rte": mine})[0].folder == mine
    assert find_task_folders(["rte"], None, {"rte": mine})[0].files.keys() == {"train"}


def test_a_folder_of_the_name_without_the_files_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "RTE", "readme.txt")
    folder = make(tmp_path / "glue" / "rte", "train.tsv")
    assert find_task_folders(["rte"], tmp_path, {})[0].folder == folder


def test_a_changed_file_is_another_task(tmp_path: Path) -> None:
    folder = make(tmp_path / "RTE", "train.tsv")
    before = find_task_folders(["rte"], tmp_path, {})[0].files
    (folder / "train.tsv").write_text("y\n")
    assert find_task_folders(["rte"], tmp_path, {})[0].files != before


def test_what_was_looked_for_is_listed(tmp_path: Path) -> None:
    make(tmp_path / "CoLA", "train.tsv")
    with pytest.raises(DataError) as caught:
        find_task_folders(["cola", "rte", "chunk"], tmp_path, {})
    message = str(caught.value)
    for part in ("it contains CoLA", "rte: looked for a folder called rte", "chunk or conll2000", "[task_data]"):
        assert part in message
    assert "cola:" not in message
    with pytest.raises(DataError, match=r"neither --task-data nor a \[task_data\] folder"):
        find_task_folders(["rte"], None, {})
    with pytest.raises(DataError, match="is not a folder"):
        find_task_folders(["rte"], tmp_path / "none", {})


def test_folders_that_may_not_be_read_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "RTE", "train.tsv", "dev.tsv")
    closed, iterdir = make(tmp_path / "lost+found"), Path.iterdir

    def refuse(path: Path) -> object:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    (found,) = find_task_folders(["rte"], tmp_path, {})
    assert found.folder == tmp_path / "RTE"
