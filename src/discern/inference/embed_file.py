"""Vectors of the texts of a file of any size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from discern.data.tables import TEXT_NAMES, open_table, suffix_of
from discern.errors import ConfigError, DataError
from discern.inference.embed import chosen_settings, text_vectors
from discern.inference.model import load
from discern.inference.texts import read_texts
from discern.inference.vector_files import check_vectors_path, nearest, opened_vectors, stored_vectors, vectors_file
from discern.progress import Progress
from discern.storage.output import check_output
from discern.tasks.rows import choose_column, text_of

# Texts are sorted by length in blocks of this size, and no more of them are in memory.
_BLOCK = 2048
_NEAREST = 5  # vectors that a search finds, by default
_TABLES = (".csv", ".tsv", ".tab", ".parquet", ".json")


@dataclass(frozen=True)
class Embedded:
    """Result of `embed`.

    Attributes:
        rows: number of texts.
        size: number of components of a vector.
        seconds: from the first text read to the last vector written.
        record: pooling, fingerprint of the model and so on, as beside the vectors.
    """

    rows: int
    size: int
    seconds: float
    record: dict[str, Any]


def embed(
    model: Path,
    input: Path,
    show: Callable[[list[dict[str, Any]]], None],
    progress: Progress,
    *,
    out: Path | None = None,
    pooling: str = "auto",
    normalize: bool | None = None,
    size: int | None = None,
    column: str | None = None,
    search: Path | None = None,
    top: int | None = None,
    device: str = "auto",
    warn: Callable[[str], None],
) -> Embedded:
    """Write the vector of each text of a file, in order, or find the nearest stored vectors.

    Args:
        model: as in `discern.load`.
        input: text with one text per line, JSON lines, or a table; `-` is standard input.
        show: called with blocks of records `text`, `vector` or `nearest` if there is no `out`.
        out: .npy, .parquet or .jsonl file to write, complete or not at all.
        pooling, normalize, size: as in `Model.encode`.
        column: column or field of the text.
        search: vectors of the same model, a .npy file; the nearest `top` of them (None: 5) are found instead.

    Raises:
        ConfigError: there is no such pooling, size, column or format.
        DataError: the input cannot be read or is empty, or the stored vectors are of another model.
    """
    check_output("--out", out, "vectors.npy", model, input)
    if out is not None and search is not None:
        raise ConfigError("--out and --search are both given", hint="leave one of them out")
    if top is not None and search is None:
        raise ConfigError("--top is for --search", hint="add --search VECTORS.npy, or leave out --top")
    if out is not None:
        check_vectors_path(out)
    if search is not None:
        opened_vectors(search)
    texts = input_texts(input, column)
    # Read before the model is loaded, which takes seconds, and minutes if it is downloaded: the file may be missing or empty.
    block = list(islice(texts, _BLOCK))
    if not block:
        raise DataError(f"{input} has no texts", hint="expected one text per line, or one per row of a table")
    found = load(model, device=device)
    settings = chosen_settings(found.vectors, pooling, normalize, size, found.hidden_size)
    width = size or found.hidden_size
    if size is not None and size != found.hidden_size and found.vectors.trained and size not in found.vectors.sizes:
        warn(f"the model was not trained for vectors of {size} components; task.matryoshka trains smaller sizes")
    record = {
        "model": found.path.name,
        "fingerprint": found.fingerprint,
        "pooling": "cls" if settings.pooling == "first" else settings.pooling,
        "normalized": settings.normalize,
        "size": width,
        "max_length": found.max_length,
    }
    stored = None if search is None else stored_vectors(search, record)
    started, rows = time.perf_counter(), 0
    progress.start("embedding", None, "texts")
    try:
        with nullcontext() if out is None else vectors_file(out, width, record) as write:
            while block:
                vectors = text_vectors(found.reader, block, settings, size, warn)
                rows += len(block)
                if write is not None:
                    write(block, vectors)
                else:
                    show(_shown(block, vectors, stored, _NEAREST if top is None else top))
                progress.advance(len(block))
                block = list(islice(texts, _BLOCK))
    finally:
        progress.finish()
    return Embedded(rows, width, time.perf_counter() - started, record)


def input_texts(source: Path, column: str | None) -> Iterator[str]:
    """The texts of a file, one by one; an empty line of plain text is an empty text.

    Raises:
        ConfigError: the column does not exist, or none can be recognized.
        DataError: the file cannot be read.
    """
    if suffix_of(source) not in _TABLES:
        return (each.text for each in read_texts(source, column, option="--text"))
    table = open_table(source)
    chosen = table.require(column, "--text") if column else choose_column(table, "text", ("anchor", *TEXT_NAMES))
    return (text_of(row, chosen) for row in table.rows)


def _shown(
    texts: Sequence[str], vectors: NDArray[np.float32], stored: NDArray[np.float32] | None, top: int
) -> list[dict[str, Any]]:
    if stored is None:
        return [{"text": text, "vector": vector} for text, vector in zip(texts, vectors.tolist(), strict=True)]
    rows, cosines = nearest(vectors, stored, top)
    return [
        {"text": text, "nearest": [{"row": row, "cosine": round(near, 6)} for row, near in zip(numbers, found, strict=True)]}
        for text, numbers, found in zip(texts, rows.tolist(), cosines.tolist(), strict=True)
    ]
