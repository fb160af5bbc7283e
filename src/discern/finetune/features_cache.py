"""Encoded features of fine-tuning files, cached on disk."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from discern.data.tokenizer import fingerprint
from discern.storage.checksums import cache_folder, make_cache_folder, verification_is_on
from discern.storage.files import write_bytes
from discern.tasks.base import Task, TextEncoder
from discern.tasks.features import Column, Features, Ragged

# Below this number of examples, encoding is faster than reading the cache.
_MIN_CACHED = 2000
_METADATA = "discern"
_FOLDER = "features"


def cached_features(task: Task[Any], examples: Sequence[Any], text: TextEncoder, *, labeled: bool) -> Features:
    """Return the features of the examples, from the cache if they are in it.

    The key is a hash of the examples, the tokenizer, all settings and labels of the task, and the code of its family, so any
    change of these gives another key. A file of the cache contains its key and a hash of its rows: a damaged or misplaced file
    is ignored and written again. A cache that cannot be read or written is ignored.
    """
    if len(examples) < _MIN_CACHED:
        return task.encode(examples, text, labeled=labeled)
    path = _cache_path() / f"{_cache_key(task, examples, text, labeled)}.safetensors"
    with suppress(OSError, SafetensorError, KeyError, TypeError, ValueError):
        if path.is_file():
            return _read_features(path)
    features = task.encode(examples, text, labeled=labeled)
    with suppress(OSError):
        _write_features(path, features)
    return features


def _cache_path() -> Path:
    return cache_folder() / _FOLDER


def _cache_key(task: Task[Any], examples: Sequence[Any], text: TextEncoder, labeled: bool) -> str:
    digest = hashlib.sha256()
    settings = [type(task).__qualname__, task.config.model_dump_json(), repr(task.labels), fingerprint(text.tokenizer)]
    for part in (*settings, str(labeled), _code_digest(type(task)), examples_digest(examples)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def examples_digest(examples: Sequence[Any]) -> str:
    """A hash of the examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()


@cache
def _code_digest(family: type[Task[Any]]) -> str:
    """A hash of the code that makes the rows: the module of the family, and the modules of `discern.tasks`."""
    own = Path(inspect.getfile(family))
    digest = hashlib.sha256()
    for path in (own, *sorted(Path(inspect.getfile(Task)).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_features(path: Path, features: Features) -> None:
    tensors: dict[str, Any] = {"example": features.example}
    columns: dict[str, Column] = {"ids": features.input_ids, "types": features.token_types}
    columns |= {f"target.{name}": column for name, column in features.targets.items()}
    columns |= {f"place.{name}": column for name, column in features.places.items()}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            tensors |= {f"{name}:values": column.values, f"{name}:offsets": column.offsets}
        else:
            tensors[name] = column
    make_cache_folder(_FOLDER)
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    metadata = {"key": path.stem, "sha256": _rows_digest(arrays, features.notes), "notes": features.notes}
    # The metadata have a single entry, because the order of several is not fixed.
    write_bytes(path, save(arrays, {_METADATA: json.dumps(metadata)}))


def _rows_digest(arrays: Mapping[str, np.ndarray], notes: Sequence[str]) -> str:
    digest = hashlib.sha256(json.dumps(list(notes)).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.hexdigest()


def _read_features(path: Path) -> Features:
    """Features from a file of the cache.

    Raises:
        OSError, SafetensorError, KeyError, TypeError, ValueError: the file is damaged, or contains other rows.
    """
    tensors = load_file(path)
    with safe_open(path, "numpy") as file:
        metadata = json.loads(file.metadata()[_METADATA])
    if metadata["key"] != path.stem or (verification_is_on() and metadata["sha256"] != _rows_digest(tensors, metadata["notes"])):
        raise ValueError(f"{path} is damaged")
    columns: dict[str, Column] = {}
    for name, array in tensors.items():
        if name.endswith(":values"):
            columns[name.removesuffix(":values")] = Ragged(array, tensors[name.replace(":values", ":offsets")])
        elif not name.endswith(":offsets"):
            columns[name] = array
    ids, types = columns["ids"], columns["types"]
    assert isinstance(ids, Ragged)
    assert isinstance(types, Ragged)
    return Features(
        ids,
        types,
        tensors["example"],
        {name.removeprefix("target."): column for name, column in columns.items() if name.startswith("target.")},
        {name.removeprefix("place."): column for name, column in columns.items() if name.startswith("place.")},
        tuple(metadata["notes"]),
    )
