"""Locks of files, and file systems that have none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from discern.errors import DataError
from discern.storage.files import held, lock_folder

fcntl = pytest.importorskip("fcntl")


def test_a_lock_is_held_by_one_and_by_all_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path / "lock") as first, held(tmp_path / "lock") as second:
        assert (first, second) == (True, False)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "lock") as mine:
        assert mine


def test_a_folder_counts_as_locked_only_while_it_is(tmp_path: Path) -> None:
    ours: dict[tuple[int, int], int] = {}
    theirs: dict[tuple[int, int], int] = {}
    lock_folder(tmp_path, theirs)
    for _ in range(2):
        with pytest.raises(DataError, match="another process is using"):
            lock_folder(tmp_path, ours)
        assert not ours
    (opened,) = theirs.values()
    os.close(opened)
    lock_folder(tmp_path, ours)
    lock_folder(tmp_path, ours)
    (opened,) = ours.values()
    os.close(opened)
