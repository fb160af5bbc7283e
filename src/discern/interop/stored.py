"""The weights of a Hugging Face folder, whichever form they have. A pickle is read only as far as it holds tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from discern.checksums import verify
from discern.errors import CheckpointError
from discern.interop.huggingface import and_more, opened
from discern.interop.names import CONFIG_NAME, WEIGHTS_NAME
from discern.records import Record, read_record
from discern.training.finite import check_finite

PICKLE_NAME = "pytorch_model.bin"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PICKLE_INDEX_NAME = f"{PICKLE_NAME}.index.json"
"""Each names the files that the weights of a large model are spread over."""

_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# As TensorFlow calls the two parameters of a LayerNorm; early conversions of BERT kept the names.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_WRITE_AGAIN = "where you trust it, load it with transformers and write it again with save_pretrained(), which makes another file"


@dataclass(frozen=True)
class Stored:
    """Tensors of a folder, not yet read.

    Attributes:
        path: the file that they stand in, or that says where they stand.
        tensors: by name as it is today, what reads one.
    """

    path: Path
    tensors: Mapping[str, Callable[[], Tensor]]

    def read(self, name: str) -> Tensor:
        """One of them.

        Raises:
            CheckpointError: it is of a type that is no number of 16 bits or more.
            NumericsError: it holds values that are not finite.
        """
        tensor = self.tensors[name]()
        if tensor.dtype not in _READABLE:
            found = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.path}: '{name}' is of type {found}: the model is quantised",
                hint="give the model as it was before, with weights of 16 or 32 bits",
            )
        check_finite({name: tensor}, self.path)
        return tensor


@contextmanager
def stored_weights(folder: Path) -> Iterator[Stored]:
    """The weights of a folder, whichever form they have; the files stay open meanwhile."""
    names = (WEIGHTS_NAME, INDEX_NAME, PICKLE_NAME, PICKLE_INDEX_NAME)
    path = next((folder / name for name in names if (folder / name).is_file()), folder / WEIGHTS_NAME)
    files = _shards(path) if path.name in (INDEX_NAME, PICKLE_INDEX_NAME) else [path.name]
    if path.name in (PICKLE_NAME, PICKLE_INDEX_NAME):
        contents = [_unpickled(folder / name) for name in files]
        yield Stored(path, {modern_name(name): partial(each.__getitem__, name) for each in contents for name in each})
        return
    if not path.is_file():
        _refuse_loose_shards(folder)
    with ExitStack() as opening:
        shards = [opening.enter_context(opened(folder, name)) for name in files]
        tensors = {modern_name(name): partial(shard.get_tensor, name) for shard in shards for name in shard.keys()}  # noqa: SIM118
        yield Stored(path, tensors)


def _refuse_loose_shards(folder: Path) -> None:
    """Parts of a model without the index that says what is in which: whether all of them are there, nothing could tell."""
    for pattern, index in (("model-*-of-*.safetensors", INDEX_NAME), ("pytorch_model-*-of-*.bin", PICKLE_INDEX_NAME)):
        parts = sorted(path.name for path in folder.glob(pattern))
        if parts:
            raise CheckpointError(
                f"{folder} has the weights in parts ({parts[0]}{and_more(parts)}), but no {index}, which says what is in which",
                hint=f"download {index} too; a copy of a model needs every file of it",
            )


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of which stand beside it."""
    placed = read_record(index, _Index, hint="download the model again", error=CheckpointError)["weight_map"]
    files = sorted({Path(file) for file in placed.values()})
    missing = [str(file) for file in files if file.name != str(file) or not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names '{missing[0]}'{and_more(missing)}, but {index.parent} has no such file",
            hint="download the model again; a copy needs every file of it",
        )
    return [file.name for file in files]


class _Index(Record):
    """Which file each tensor is in."""

    weight_map: dict[str, str]


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, by name; code in it is not run."""
    verify(path, error=CheckpointError)
    try:
        with path.open("rb") as file:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # what an unpickler stumbles over decides what it raises
        raise CheckpointError(
            f"{path} cannot be loaded ({type(problem).__name__}): it is damaged, or holds more than tensors, maybe code",
            hint=f"download the model again; or, {_WRITE_AGAIN}",
        ) from problem
    named = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not named or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{path} holds something else than tensors by name", hint=_WRITE_AGAIN)
    return dict(content)


def modern_name(name: str) -> str:
    """What today's transformers calls a weight that an old version wrote."""
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def check_names(stored: Stored, expected: Set[str], parts: tuple[str, ...], family: str, ignored: Set[str] = frozenset()) -> None:
    """Refuse missing tensors, and tensors of an encoder that ours would pass over; a head's may be there or not.

    Args:
        parts: what the names of an encoder's tensors begin with.
        family: what the model should be, with its article.
        ignored: names of what may be there and is passed over.

    Raises:
        CheckpointError: a tensor is missing or left over.
    """
    missing = sorted(expected - stored.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{stored.path}: '{missing[0]}' is missing{and_more(missing)}",
            hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model, and be that of {family}",
        )
    left_over = sorted(name for name in stored.tensors.keys() - expected - ignored if name.startswith(parts))
    if left_over:
        raise CheckpointError(
            f"{stored.path}: nothing here can hold '{left_over[0]}'{and_more(left_over)}",
            hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model",
        )
