"""Errors of reading name the file and what to try."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.data.sources.streams import naming
from discern.errors import DataError


def test_a_missing_file_is_told_with_the_name_most_like_it(tmp_path: Path) -> None:
    (tmp_path / "sentences.txt").write_text("text\n")
    with pytest.raises(DataError, match=r"sentence\.txt cannot be read: No such file") as raised:
        _open(tmp_path / "sentence.txt")
    assert raised.value.hint == f"did you mean {tmp_path / 'sentences.txt'}?"
    with pytest.raises(DataError) as raised:
        _open(tmp_path / "nothing-like-it")
    assert str(Path.cwd()) in str(raised.value)


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        _open(tmp_path / "folder" / "file.txt")
    assert f"hint: there is no folder {tmp_path / 'folder'}" in str(raised.value)


def _open(path: Path) -> None:
    with naming(str(path)), path.open("rb"):
        pass
