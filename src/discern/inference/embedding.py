"""Texts as vectors: of tokens, of texts from Python, and of the texts of a file, stored with their texts or searched."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import Encoding

from discern.data.tables import TEXT_NAMES, open_table, suffix_of
from discern.errors import ConfigError, DataError
from discern.inference.texts import InputText, read_texts
from discern.inference.windows import (
    IN_WINDOWS,
    TextModel,
    TextT,
    Window,
    device_of,
    framed_outputs,
    read,
    read_blocks,
    read_in_windows,
)
from discern.models.base import Encoder
from discern.progress import Progress
from discern.storage.checksums import read_json, understood
from discern.storage.files import check_output, whole_binary_file, whole_file, write_text
from discern.tasks.rows import choose_column, text_of

Vectors: TypeAlias = Float[np.ndarray, "N S"]

POOLINGS = ("mean", "mean-all", "first", "cls", "none")
"""The ways to make a vector from the states of a text; 'first' and 'cls' are the same, 'none' keeps a vector for each token."""
_FORMATS = (".npy", ".parquet", ".jsonl")
_TABLES = (".csv", ".tsv", ".tab", ".parquet", ".json")
_AGAIN = "write the vectors again: discern embed MODEL INPUT --out vectors.npy"


@dataclass(frozen=True)
class VectorSettings:
    """What the vector of a text is, unless the user asks for something else.

    Attributes:
        pooling: one of `POOLINGS`.
        normalize: whether vectors have length 1.
        trained: whether the model was trained for its vectors.
        size: number of first components to keep, before vectors are normalized; None: all.
    """

    pooling: str = "mean"
    normalize: bool = False
    trained: bool = False
    size: int | None = None


@dataclass(frozen=True)
class Reader(TextModel):
    """An encoder."""

    encoder: Encoder

    @property
    def hidden_size(self) -> int:
        """D, the size of a state."""
        return self.encoder.config.hidden_size


def chosen_settings(
    trained: VectorSettings, pooling: str, normalize: bool | None, size: int | None, width: int
) -> VectorSettings:
    """The settings of a model, overridden by what the user asks for.

    Args:
        pooling: 'auto', or one of `POOLINGS`.
        normalize: None: as the model was trained.
        size: number of components to keep; None: all.
        width: number of components of the model's vectors.

    Raises:
        ConfigError: there is no such pooling, or the vectors have fewer components.
    """
    if pooling not in ("auto", *POOLINGS):
        raise ConfigError(f"unknown pooling {pooling!r}", hint="one of 'auto', 'mean', 'mean-all', 'cls', 'none'")
    if size is not None and not 1 <= size <= width:
        raise ConfigError(
            f"{size} components are asked for, and the vectors of this model have {width}", hint=f"give a size from 1 to {width}"
        )
    return replace(
        trained,
        pooling=trained.pooling if pooling == "auto" else pooling,
        normalize=trained.normalize if normalize is None else normalize,
        size=size,
    )


def text_vectors(
    reader: Reader, texts: Iterable[TextT], settings: VectorSettings, progress: Progress, warn: Callable[[str], None]
) -> Iterator[list[tuple[TextT, Float[np.ndarray, "*T S"]]]]:
    """The vector of each text, in blocks; zeros for the mean of a text without tokens. With pooling "none", one for each token.

    Only "mean" and "none" read the whole of a long text. The other poolings include the state of [CLS], a summary of the text in
    fine-tuned encoders, and truncate texts to `reader.window_size` tokens.
    """
    pooling, encoder = settings.pooling, reader.encoder
    reads_whole = pooling in ("mean", "none")

    def states_of(windows: Sequence[Window]) -> Iterator[tuple[int, Sequence[Any]]]:
        return framed_outputs(windows, lambda ids, mask: read(encoder, ids, mask), reader.special, device_of(encoder))

    def compute(_: list[str], encodings: list[Encoding]) -> Iterator[Float[np.ndarray, "*T S"]]:
        texts = [tuple(encoding.ids) for encoding in encodings]
        if reads_whole:
            found: Iterable[Sequence[Any]] = read_in_windows(texts, reader.window_size, states_of)
        else:  # with [CLS], token -1, and [SEP]
            rows = (ids[: reader.window_size] for ids in texts)
            found = (states for _, states in sorted(states_of([Window(ids, tuple(range(-1, len(ids) + 1))) for ids in rows])))
        for states in found:
            vectors = np.array(states, np.float32).reshape(-1, reader.hidden_size)
            if pooling != "none":
                vectors = vectors[:1] if pooling in ("first", "cls") else vectors
                vectors = vectors.sum(0, keepdims=True) / max(len(vectors), 1)
            vectors = vectors[:, : settings.size]
            vectors = unit_vectors(vectors) if settings.normalize else vectors
            yield vectors if pooling == "none" else vectors[0]

    how = IN_WINDOWS if reads_whole else "the rest is not read"
    return read_blocks(reader, texts, compute, progress, warn, description="embedding", how=how)


def unit_vectors(vectors: Vectors) -> Vectors:
    """The vectors with length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return scaled


# Vectors of a file, and the record beside them, which names the weights, so that vectors of different models are not compared


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
    top: int = 5,
    device: str = "auto",
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Write the vector of each text of a file, in order, or find the nearest stored vectors.

    Args:
        model: as in `discern.load`.
        input: text with one text per line, JSON lines, or a table; `-` is standard input.
        show: called with blocks of records `text` and `vector`, or `nearest`, if there is no `out`.
        out: .npy, .parquet or .jsonl file to write, complete or not at all.
        pooling, normalize, size: as in `Model.encode`.
        column: column or field of the text.
        search: file of vectors of the same model; the nearest `top` of them are found instead, with their texts.
        warn: called with messages about long texts, and if the model was not trained for these vectors.

    Returns:
        The number of `rows`, the `seconds` from the first text read to the last vector written, and the record of the model.

    Raises:
        ConfigError: there is no such pooling, size, column or format.
        DataError: the input cannot be read or is empty, or the stored vectors are of another model.
    """
    from discern.inference.model import load

    for written in () if out is None else (out, _beside(out, "json"), _beside(out, "jsonl")):
        check_output("--out", written, "vectors.npy", model, input)
    for path in (out, search):
        if path is not None and path.suffix not in _FORMATS:
            raise ConfigError(f"the suffix of {path} names no vector format", hint=f"use {' or '.join(_FORMATS)}")
    # Before the model is loaded, which takes seconds, and minutes if it is downloaded.
    stored = None if search is None else read_vectors(search)
    texts = input_texts(input, column)
    found = load(model, device=device)
    settings = chosen_settings(found.vectors, pooling, normalize, size, found.hidden_size)
    if not settings.trained:
        warn(
            f"{found.path} was not fine-tuned for embeddings, so similarities of its vectors mean little: train it with discern "
            f"finetune {found.path} --task pairs"
        )
    width = size or found.hidden_size
    record = {
        "model": found.path.name,
        "fingerprint": found.fingerprint,
        "pooling": "cls" if settings.pooling == "first" else settings.pooling,
        "normalized": settings.normalize,
        "size": width,
        "max_length": found.max_length,
    }
    if stored is not None and any(stored[0].get(key) != record[key] for key in ("fingerprint", "pooling", "size")):
        raise DataError(f"{search} has vectors of another model, pooling or size than {found.path.name} gives here", hint=_AGAIN)
    started, rows = time.perf_counter(), 0
    with nullcontext(show) if out is None else vectors_file(out, width) as write:
        for block in text_vectors(found.reader, texts, settings, progress, warn):
            rows += len(block)
            vectors = np.array([vector for _, vector in block])
            results = vectors.tolist() if stored is None else nearest(vectors, *stored[1:], top)
            key = "vector" if stored is None else "nearest"
            write([{"text": text.text, key: result} for (text, _), result in zip(block, results, strict=True)])
        if not rows:
            raise DataError(f"{input} has no texts", hint="expected one text per line, or one per row of a table")
    if out is not None:
        write_text(_beside(out, "json"), json.dumps(record | {"rows": rows}, indent=1, ensure_ascii=False) + "\n")
    return {"rows": rows, "seconds": time.perf_counter() - started, **record}


def input_texts(source: Path, column: str | None) -> Iterator[InputText]:
    """The texts of a file, one by one; an empty line of plain text is an empty text.

    Raises:
        ConfigError: the column does not exist, or none can be recognized.
        DataError: the file cannot be read.
    """
    if suffix_of(source) not in _TABLES:
        return read_texts(source, column, option="--text")
    table = open_table(source)
    chosen = table.require(column, "--text") if column else choose_column(table, "text", ("anchor", *TEXT_NAMES))
    return (InputText(row.where, row.number, text_of(row, chosen)) for row in table.rows)


Write: TypeAlias = Callable[[list[dict[str, Any]]], None]
"""Takes the records `text` and `vector` of the next texts."""


def _beside(vectors: Path, suffix: str) -> Path:
    return vectors.with_name(f"{vectors.name}.{suffix}")


@contextmanager
def vectors_file(out: Path, size: int) -> Iterator[Write]:
    """A file of vectors to write, which appears at the end of the block; on failure the old file is unchanged.

    .jsonl has objects, and .parquet columns, `text` and `vector`. The texts of .npy, an array of float32, are beside it in
    `NAME.npy.jsonl`.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: it cannot be written.
    """
    if out.suffix == ".jsonl":
        with whole_file(out) as lines:
            yield lambda records: lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif out.suffix == ".npy":
        with whole_binary_file(out) as file, vectors_file(_beside(out, "jsonl"), size) as write_texts:
            rows = 0

            def write_header() -> None:
                file.seek(0)
                np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, size)})

            def write(records: list[dict[str, Any]]) -> None:
                nonlocal rows
                rows += len(records)
                file.write(np.array([record["vector"] for record in records], "<f4").tobytes())
                write_texts([{"text": record["text"]} for record in records])

            # The header, whose length does not depend on the number of rows, is written again at the end.
            write_header()
            yield write
            write_header()
            file.seek(0, 2)
    else:
        try:
            import pyarrow as arrow
            from pyarrow import parquet
        except ImportError as problem:
            hint = "pip install 'discern-nlp[parquet]', or write .npy"
            raise ConfigError("a parquet file needs pyarrow", hint=hint) from problem
        schema = arrow.schema([("text", arrow.string()), ("vector", arrow.list_(arrow.float32(), size))])
        with whole_binary_file(out) as file, parquet.ParquetWriter(file, schema) as writer:
            yield lambda records: writer.write_table(arrow.Table.from_pylist(records, schema))


def read_vectors(path: Path) -> tuple[dict[str, Any], Vectors, list[str]]:
    """The record of a file that `embed` wrote, its vectors, and their texts.

    Raises:
        DataError: the file, its texts or its record are missing or damaged.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist", hint=_AGAIN)
    record = read_json(_beside(path, "json"), hint=_AGAIN)
    with understood(path, hint=_AGAIN):
        rows = [row.values for row in open_table(_beside(path, "jsonl") if path.suffix == ".npy" else path).rows]
        vectors = np.load(path, mmap_mode="r") if path.suffix == ".npy" else [row["vector"] for row in rows]
        if not len(rows) == len(vectors) == record["rows"]:
            raise ValueError(f"it has {len(vectors):,} vectors and {len(rows):,} texts, and its record {record['rows']:,} rows")
        return record, np.asarray(vectors, np.float32), [row["text"] for row in rows]


def nearest(queries: Float[np.ndarray, "Q S"], stored: Vectors, texts: Sequence[str], count: int) -> list[list[dict[str, Any]]]:
    """For each query, the nearest stored vectors, the nearest first: `row`, `text` and `cosine`."""
    units, found = unit_vectors(stored), []
    # The cosines of some queries at a time take at most about 100 MB.
    for some in np.array_split(unit_vectors(queries), max(1, len(queries) * len(stored) >> 24)):
        best = torch.from_numpy(some @ units.T).topk(min(count, len(stored)))
        for rows, cosines in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            near = zip(rows, cosines, strict=True)
            found.append([{"row": row, "text": texts[row], "cosine": round(cosine, 6)} for row, cosine in near])
    return found
