"""Files of vectors, written block by block, and the record of the model beside each of them.

The record of `vectors.npy` is `vectors.npy.json`. It names the weights, so that vectors of different models are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from discern.errors import ConfigError, DataError
from discern.inference.embed import unit_vectors
from discern.storage.checksums import read_json
from discern.storage.files import is_stream, whole_binary_file, write_text

Write = Callable[[Sequence[str], NDArray[np.float32]], None]
"""Takes the next texts and their vectors."""
_SUFFIXES = (".npy", ".parquet", ".jsonl")
# Stored vectors, and texts, that are compared at a time: their cosines and the order of these take about 100 MB.
_ROWS, _QUERIES = 65536, 64


def check_vectors_path(out: Path) -> None:
    """Check, before any work, that vectors can be written to a path.

    Raises:
        ConfigError: its suffix names no format, the format needs a library that is missing, or it is a pipe.
    """
    if out.suffix not in _SUFFIXES:
        raise ConfigError(
            f"the suffix of {out} names no vector format", hint=f"use {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        )
    if out.suffix == ".npy" and is_stream(out):
        raise ConfigError(f"{out} is a pipe or a device, but the header of .npy is written last", hint="write .jsonl to it")
    if out.suffix == ".parquet":
        _arrow(out)


def record_path(vectors: Path) -> Path:
    """The record of a file of vectors."""
    return vectors.with_name(f"{vectors.name}.json")


@contextmanager
def vectors_file(out: Path, size: int, record: dict[str, Any]) -> Iterator[Write]:
    """A file of vectors to write, which appears with its record at the end of the block. On failure the old file is unchanged.

    Args:
        size: number of components.
        record: what the record holds besides the number of rows.

    Raises:
        DataError: it cannot be written.
    """
    makers = {".npy": _npy, ".parquet": _parquet, ".jsonl": _jsonl}
    rows = [0]
    with whole_binary_file(out) as file, makers[out.suffix](file, size) as write:

        def counted(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
            write(texts, vectors)
            rows[0] += len(vectors)

        yield counted
        # A file without a record is compared with nothing; the record of an older file would be wrong.
        if not is_stream(out):
            record_path(out).unlink(missing_ok=True)
    if not is_stream(out):
        write_text(record_path(out), json.dumps(record | {"rows": rows[0], "size": size}, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def _npy(file: BinaryIO, size: int) -> Iterator[Write]:
    """float32, in C order. The header, whose length does not depend on the number of rows, is written again at the end."""
    rows = 0

    def write_header() -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, size)}
        np.lib.format.write_array_header_1_0(file, header)

    write_header()

    def write(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        nonlocal rows
        file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
        rows += len(vectors)

    yield write
    file.seek(0)
    write_header()
    file.seek(0, 2)


@contextmanager
def _parquet(file: BinaryIO, size: int) -> Iterator[Write]:
    """Columns `text` and `vector`, a list of fixed size."""
    arrow, parquet = _arrow(Path("vectors.parquet"))
    schema = arrow.schema([("text", arrow.string()), ("vector", arrow.list_(arrow.float32(), size))])
    with parquet.ParquetWriter(file, schema) as writer:

        def write(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
            values = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), size)
            writer.write_table(arrow.table([arrow.array(list(texts)), values], schema=schema))

        yield write


@contextmanager
def _jsonl(file: BinaryIO, size: int) -> Iterator[Write]:
    """Objects with `text` and `vector`."""

    def write(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        for text, vector in zip(texts, vectors.tolist(), strict=True):
            line = json.dumps({"text": text, "vector": vector}, ensure_ascii=False)
            file.write(line.encode("utf-8", "replace") + b"\n")

    yield write


def _arrow(out: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as problem:
        raise ConfigError(
            f"{out} is a parquet file, which needs pyarrow", hint="pip install 'discern-nlp[parquet]', or write .npy"
        ) from problem
    return pyarrow, pyarrow.parquet


_AGAIN = "write the vectors again: discern embed MODEL INPUT --out vectors.npy"


def opened_vectors(path: Path) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """The vectors of a .npy file, mapped into memory, and their record.

    Raises:
        ConfigError: it is not a .npy file.
        DataError: the file or its record is missing or damaged.
    """
    where = record_path(path)
    if path.suffix != ".npy":
        raise ConfigError(f"{path} is not a .npy file", hint="write the vectors with --out vectors.npy")
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise DataError(f"{path} cannot be read: {problem}", hint=_AGAIN) from problem
    if not where.is_file():
        raise DataError(
            f"{path} has no record of its model ({where.name})", hint=f"copy the record to the same folder, or {_AGAIN}"
        )
    return vectors, read_json(where, hint=_AGAIN)


def stored_vectors(path: Path, record: dict[str, Any]) -> NDArray[np.float32]:
    """The vectors of a .npy file, mapped into memory, if they are of the same model.

    Args:
        record: the record that new vectors would have.

    Raises:
        ConfigError, DataError: as in `opened_vectors`, or the vectors are of another model, pooling or size.
    """
    vectors, found = opened_vectors(path)
    names = {"fingerprint": "another model", "pooling": "another pooling", "size": "another size"}
    for key, what in names.items():
        if found.get(key) != record[key]:
            raise DataError(
                f"{path} has vectors of {what}: its {key} is {str(found.get(key))[:12]}, and that of {record['model']} is "
                f"{str(record[key])[:12]}",
                hint=_AGAIN,
            )
    if vectors.shape != (found.get("rows"), record["size"]):
        raise DataError(f"{path} has the shape {vectors.shape}, and its record says {found.get('rows')} rows", hint=_AGAIN)
    return vectors


def nearest(
    queries: NDArray[np.float32], stored: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(Q, count) rows of the nearest stored vectors by their cosines, and the cosines, the nearest first."""
    count = min(count, len(stored))
    rows = np.zeros((len(queries), count), np.int64)
    cosines = np.full((len(queries), count), -np.inf, np.float32)
    unit = unit_vectors(queries)
    for first in range(0, len(stored), _ROWS):
        block = unit_vectors(np.asarray(stored[first : first + _ROWS])).T
        for start in range(0, len(queries), _QUERIES):
            some = slice(start, start + _QUERIES)
            found = np.concatenate([cosines[some], unit[some] @ block], 1)
            numbers = np.broadcast_to(np.arange(first, first + block.shape[1]), (len(found), block.shape[1]))
            numbers = np.concatenate([rows[some], numbers], 1)
            best = np.argpartition(-found, count - 1, axis=1)[:, :count]
            cosines[some], rows[some] = np.take_along_axis(found, best, 1), np.take_along_axis(numbers, best, 1)
    order = np.lexsort((rows, -cosines), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(cosines, order, 1)
