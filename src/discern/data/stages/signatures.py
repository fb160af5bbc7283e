"""The files of a piece from which near-duplicates are found. A task reads the part of them that it needs, and checks that part.

`signatures` has a row for each document: its signature and a check number. `bands` has the bands one after the other, each in the
order of its keys and cut into sections, with the keys of a range and the documents that have them. `sections` says where each
section ends, and its checksum. All documents with the same key are in the same range, so a slice of the keys is a few sections.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt

from discern.data.near_duplicates import HASHES, Banding
from discern.data.stages.results import RUN_AGAIN, read_array
from discern.errors import DataError
from discern.storage.files import sync_file, write_file

# Smaller sections would need more checksums; of larger ones, a task would read more that it does not need.
_DOCUMENTS_PER_SECTION = 1 << 13
_MOST_SECTIONS = 1 << 10
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
    """Write `bands` and `sections`. A document without words is in no band."""
    count = 1
    while count < _MOST_SECTIONS and len(signatures) >= 2 * count * _DOCUMENTS_PER_SECTION:
        count *= 2
    sections: list[tuple[int, int]] = []
    written = 0
    with (folder / "bands").open("xb") as file:
        for band in range(banding.bands):
            keys = banding.keys(signatures, band)
            order = np.argsort(keys, kind="stable")
            order = order[keys[order] != 0]
            rows = np.empty(len(order), dtype=_ROW)
            rows["key"], rows["document"] = keys[order], order
            for section in _slices(rows, count):
                content = section.tobytes()
                file.write(content)
                written += len(section)
                sections.append((written, _digest(content)))
        sync_file(file)
    write_file(folder / "sections", np.array(sections, dtype="<u8").tobytes())


def read_slice(
    folder: Path, banding: Banding, band: int, part: int, parts: int
) -> tuple[UInt[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The keys of a slice of a band, ascending, and the documents of the piece that have them, those of a key ascending.

    Args:
        part: number of the slice, from 0.
        parts: number of slices of a band, a power of two.

    Raises:
        DataError: the files are missing or damaged.
    """
    sections = read_array(folder, "sections", "<u8", 2)
    count = len(sections) // banding.bands
    first = part * count // parts
    stop = max(first + 1, (part + 1) * count // parts)
    chosen = range(band * count + first, band * count + stop)
    begin = int(sections[chosen.start - 1][0]) if chosen.start else 0
    found = []
    try:
        with (folder / "bands").open("rb") as file:
            file.seek(begin * _ROW.itemsize)
            for end, digest in sections[chosen.start : chosen.stop].tolist():
                content = file.read((end - begin) * _ROW.itemsize)
                if _digest(content) != digest:
                    raise DataError(f"{folder / 'bands'} is damaged", hint=RUN_AGAIN)
                found.append(np.frombuffer(content, dtype=_ROW))
                begin = end
    except OSError as problem:
        raise DataError(f"{folder / 'bands'} cannot be read: {problem.strerror}", hint=RUN_AGAIN) from problem
    rows = np.concatenate(found)
    if parts > count:  # the slice is a part of a section
        rows = _slices(rows, parts)[part]
    return rows["key"].astype(np.uint64), rows["document"].astype(np.int64)


def _slices(rows: np.ndarray, count: int) -> list[np.ndarray]:
    """Rows in the order of their keys, cut by equal ranges of the keys; the count is a power of two."""
    width = np.uint64((1 << 64) // count if count > 1 else 0)
    return np.split(rows, np.searchsorted(rows["key"], np.arange(1, count, dtype=np.uint64) * width))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
