"""The files of a piece from which near-duplicates are found. A task reads the part of them that it needs.

`signatures` has a row for each document: its signature and a check number. There is a file for each band: its keys in ascending
order, each with the document that has it. A slice of a band is a range of its keys.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt

from discern.data.curation.near_duplicates import HASHES, Banding
from discern.data.stages.results import RUN_AGAIN, read_array
from discern.errors import DataError
from discern.storage.files import write_file

_ROW = np.dtype([("key", "<u8"), ("document", "<u4")])
# Odd, so that a change of one number always changes the sum.
_FACTORS = np.arange(1, HASHES + 1, dtype=np.uint32) * np.uint32(0x9E3779B9) | np.uint32(1)


def with_checks(signatures: UInt[np.ndarray, "n 128"]) -> UInt[np.ndarray, "n 129"]:
    """The rows of the file `signatures`."""
    return np.concatenate([signatures, _checks(signatures)[:, None]], axis=1).astype("<u4")


def read_signatures(folder: Path, count: int) -> UInt[np.ndarray, "D 129"]:
    """The rows of a piece, mapped into memory; `checked_rows` checks those that are used.

    Args:
        count: number of documents of the piece.

    Raises:
        DataError: the file is missing or cut short.
    """
    path = folder / "signatures"
    if not count:
        return np.zeros((0, HASHES + 1), dtype="<u4")
    try:
        return np.memmap(path, dtype="<u4", mode="r", shape=(count, HASHES + 1))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} is cut short or missing", hint=RUN_AGAIN) from problem


def checked_rows(folder: Path, rows: UInt[np.ndarray, "n 129"]) -> UInt[np.ndarray, "n 128"]:
    """The signatures of some rows of a piece.

    Raises:
        DataError: a row is damaged.
    """
    found = rows[:, :HASHES]
    if (_checks(found) != rows[:, HASHES]).any():
        raise DataError(f"{folder / 'signatures'} is damaged", hint=RUN_AGAIN)
    return found


def _checks(signatures: UInt[np.ndarray, "n 128"]) -> UInt[np.ndarray, " n"]:
    # The complement, so that a row of zeros, as a file system may leave it after a crash, is no valid one.
    sums: np.ndarray = (~signatures * _FACTORS).sum(axis=1, dtype=np.uint32)
    return sums


def write_bands(folder: Path, signatures: UInt[np.ndarray, "D 128"], banding: Banding) -> None:
    """Write a file for each band. A document without words is in no band."""
    for band in range(banding.bands):
        keys = banding.keys(signatures, band)
        order = np.argsort(keys, kind="stable")
        order = order[keys[order] != 0]
        rows = np.empty(len(order), dtype=_ROW)
        rows["key"], rows["document"] = keys[order], order
        write_file(folder / f"band-{band:02d}", rows.tobytes())


def read_slice(folder: Path, band: int, part: int, parts: int) -> tuple[UInt[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The keys of a slice of a band, ascending, and the documents of the piece that have them, those of a key ascending.

    Args:
        part: number of the slice, from 0.
        parts: number of slices of a band, which are equal ranges of the keys.

    Raises:
        DataError: the file is missing or damaged.
    """
    rows = read_array(folder, f"band-{band:02d}", _ROW)
    # Unlike np.searchsorted, bisection does not copy all keys.
    begin, end = (bisect_left(rows["key"], (number << 64) // parts) for number in (part, part + 1))
    return rows["key"][begin:end].astype(np.uint64), rows["document"][begin:end].astype(np.int64)
