"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def sync_file(file: BinaryIO) -> None:
    """Push what was written through to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Push a folder's list of names through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and push it through to the disk."""
    with path.open("xb") as file:
        file.write(content)
        sync_file(file)
