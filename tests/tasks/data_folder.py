"""The folder of real data that some tests count in, and small files made up for the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_folder(*parts: str) -> Path:
    """A part of the folder that DISCERN_TEST_DATA names; without it the test is skipped."""
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    path = Path(folder, *parts)
    if not path.exists():
        pytest.skip(f"DISCERN_TEST_DATA has no {'/'.join(parts)}")
    return path


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    """A UTF-8 file of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((end.join(lines) + end).encode())
    return path
