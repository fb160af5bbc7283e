"""Locks of files, and file systems that have none."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from discern.storage.locks import held

fcntl = pytest.importorskip("fcntl")


def test_a_lock_is_held_by_one_and_by_all_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path / "lock") as first, held(tmp_path / "lock") as second:
        assert (first, second) == (True, False)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "lock") as mine:
        assert mine
