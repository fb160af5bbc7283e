"""Rows of a task kept on disk, found again by everything that decides them."""

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

from discern.artifacts.files import write_bytes
from discern.checksums import cache_folder, make_cache_folder, verification_is_on
from discern.data.tokenizer import fingerprint
from discern.tasks.base import Task, TextEncoder
from discern.tasks.features import Column, Features, Ragged

# Below this many examples encoding is faster than reading back.
_WORTH_KEEPING = 2000
_SAID = "discern"
_FOLDER = "features"


def cached_features(task: Task[Any], examples: Sequence[Any], text: TextEncoder, *, labelled: bool) -> Features:
    """The rows of some examples, from the cache where they are there.

    The key is a hash of the examples, the tokenizer, every setting and label of the task, and the code of its family: a file
    that changed, another length or casing, a debug run with fewer examples are other keys. A file of the cache holds its
    key and a hash of its rows: one that is damaged, or another's, is passed over and written again, as other rows would give
    other weights. So is a cache that cannot be written or read.
    """
    if len(examples) < _WORTH_KEEPING:
        return task.encode(examples, text, labelled=labelled)
    path = _folder() / f"{_key(task, examples, text, labelled)}.safetensors"
    with suppress(OSError, SafetensorError, KeyError, TypeError, ValueError):
        if path.is_file():
            return _read(path)
    features = task.encode(examples, text, labelled=labelled)
    with suppress(OSError):
        _write(path, features)
    return features


def _folder() -> Path:
    return cache_folder() / _FOLDER


def _key(task: Task[Any], examples: Sequence[Any], text: TextEncoder, labelled: bool) -> str:
    digest = hashlib.sha256()
    settings = [type(task).__qualname__, task.config.model_dump_json(), repr(task.labels), fingerprint(text.tokenizer)]
    for part in (*settings, str(labelled), _code(type(task)), examples_digest(examples)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def examples_digest(examples: Sequence[Any]) -> str:
    """A hash of all that some examples say, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()


@cache
def _code(family: type[Task[Any]]) -> str:
    """A hash of everything that may have a say in the rows: the module of the family, and all of `discern.tasks`."""
    own = Path(inspect.getfile(family))
    digest = hashlib.sha256()
    for path in (own, *sorted(Path(inspect.getfile(Task)).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, features: Features) -> None:
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
    said = {"key": path.stem, "sha256": _digest(arrays, features.notes), "notes": features.notes}
    write_bytes(path, save(arrays, {_SAID: json.dumps(said)}))  # one entry: several would come in any order


def _digest(arrays: Mapping[str, np.ndarray], notes: Sequence[str]) -> str:
    digest = hashlib.sha256(json.dumps(list(notes)).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.hexdigest()


def _read(path: Path) -> Features:
    """Rows from the cache.

    Raises:
        OSError, SafetensorError, KeyError, TypeError, ValueError: the file is damaged, or holds other rows.
    """
    tensors = load_file(path)
    with safe_open(path, "numpy") as file:
        said = json.loads(file.metadata()[_SAID])
    if said["key"] != path.stem or (verification_is_on() and said["sha256"] != _digest(tensors, said["notes"])):
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
        tuple(said["notes"]),
    )
