"""The encoder of any Hugging Face ELECTRA or BERT folder, whatever heads stand on it, to be fine-tuned or gone on with.

Nothing here imports transformers, and a pickle is read only as far as it holds tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from discern.errors import CheckpointError
from discern.interop.huggingface import (
    SUPPORTED,
    and_more,
    check_shape,
    model_config,
    opened,
    read_huggingface_config,
    whole_number,
)
from discern.interop.names import CONFIG_NAME, WEIGHTS_NAME, encoder_names, encoder_parameters
from discern.model.bert import BertEncoder
from discern.model.embeddings import Embeddings

FAMILIES = ("electra", "bert")
"""Values of `model_type` in config.json whose encoder is ours."""
PICKLE_NAME = "pytorch_model.bin"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PICKLE_INDEX_NAME = f"{PICKLE_NAME}.index.json"
"""Each names the files that the weights of a large model are spread over."""

_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ENCODER_PARTS = ("embeddings.", "embeddings_project.", "encoder.")
# Counting buffers that some versions of transformers write.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# As TensorFlow calls the two parameters of a LayerNorm; early conversions of BERT kept the names.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_WRITE_AGAIN = "where you trust it, load it with transformers and write it again with save_pretrained(), which makes another file"


def encoder_from_huggingface(folder: Path) -> BertEncoder:
    """The encoder of a Hugging Face ELECTRA or BERT, in float32 and evaluation mode, on the CPU.

    Heads and the pooler are passed over. The weights stand in model.safetensors, in the files that its index names, in
    pytorch_model.bin, or in the files that its index names, the first of these that is there.

    Raises:
        CheckpointError: a file is missing or damaged, the model is of another family or has an option that ours has not, or a
            tensor of the encoder is missing, is left over, or has another shape than config.json says.
    """
    config, path = read_huggingface_config(folder, FAMILIES), folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "is_decoder": False, "add_cross_attention": False})
    with torch.device("meta"):
        encoder = BertEncoder(Embeddings(whole_number(config, "vocab_size", path), sizes.embedding_size, sizes), sizes)
    encoder.to_empty(device="cpu").eval()
    with _stored(folder) as stored:
        _fill(encoder, stored, config["model_type"])
    return encoder


@dataclass(frozen=True)
class _Stored:
    """Tensors of a folder, not yet read.

    Attributes:
        path: the file that they stand in, or that says where they stand.
        tensors: by name, what reads one.
    """

    path: Path
    tensors: Mapping[str, Callable[[], Tensor]]


@contextmanager
def _stored(folder: Path) -> Iterator[_Stored]:
    """The weights of a folder, whichever form they have; the files stay open meanwhile."""
    names = (WEIGHTS_NAME, INDEX_NAME, PICKLE_NAME, PICKLE_INDEX_NAME)
    path = next((folder / name for name in names if (folder / name).is_file()), folder / WEIGHTS_NAME)
    files = _shards(path) if path.name in (INDEX_NAME, PICKLE_INDEX_NAME) else [path.name]
    if path.name in (PICKLE_NAME, PICKLE_INDEX_NAME):
        contents = [_unpickled(folder / name) for name in files]
        yield _Stored(path, {name: partial(each.__getitem__, name) for each in contents for name in each})
        return
    if not path.is_file():
        _refuse_loose_shards(folder)
    with ExitStack() as opening:
        shards = [opening.enter_context(opened(folder, name)) for name in files]
        tensors = {name: partial(shard.get_tensor, name) for shard in shards for name in shard.keys()}  # noqa: SIM118
        yield _Stored(path, tensors)


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
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({Path(file) for file in placed.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{index} cannot be read: {problem!r}", hint="download the model again") from problem
    missing = [str(file) for file in files if file.name != str(file) or not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names '{missing[0]}'{and_more(missing)}, but {index.parent} has no such file",
            hint="download the model again; a copy needs every file of it",
        )
    return [file.name for file in files]


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, by name; code in it is not run."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # what an unpickler stumbles over decides what it raises
        raise CheckpointError(
            f"{path} cannot be loaded ({type(problem).__name__}): it is damaged, or holds more than tensors, maybe code",
            hint=f"download the model again; or, {_WRITE_AGAIN}",
        ) from problem
    named = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not named or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{path} holds something else than tensors by name", hint=_WRITE_AGAIN)
    return dict(content)


@torch.no_grad()
def _fill(encoder: BertEncoder, stored: _Stored, family: str) -> None:
    """Copy the encoder's weights, whatever type they are stored in."""
    tensors = {_modern(name): read for name, read in stored.tensors.items()}
    # Beside a head stand `electra.` or `bert.` before the encoder's names; an encoder saved alone has nothing there.
    prefix = f"{family}." if any(name.startswith(f"{family}.") for name in tensors) else ""
    names = {ours: prefix + theirs for ours, theirs in encoder_names(encoder).items()}
    _check_names(set(tensors), set(names.values()), prefix, stored.path)
    for ours, parameter in encoder_parameters(encoder).items():
        tensor = tensors[names[ours]]()
        check_shape(names[ours], tensor.shape, parameter, stored.path)
        if tensor.dtype not in _READABLE:
            found = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{stored.path}: '{names[ours]}' is of type {found}: the model is quantised",
                hint="give the model as it was before, with weights of 16 or 32 bits",
            )
        parameter.copy_(tensor)


def _modern(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _check_names(present: set[str], expected: set[str], prefix: str, path: Path) -> None:
    """Refuse missing tensors, and tensors of an encoder that ours would pass over; a head's may be there or not."""
    missing = sorted(expected - present)
    if missing:
        raise CheckpointError(
            f"{path}: '{missing[0]}' is missing{and_more(missing)}",
            hint=f"{CONFIG_NAME} and {path.name} must come from the same model, and be that of an ELECTRA or BERT",
        )
    own = tuple(prefix + part for part in _ENCODER_PARTS)
    buffers = {prefix + name for name in _BUFFERS}
    left_over = sorted(name for name in present - expected - buffers if name.startswith(own))
    if left_over:
        raise CheckpointError(
            f"{path}: nothing here can hold '{left_over[0]}'{and_more(left_over)}",
            hint=f"{CONFIG_NAME} and {path.name} must come from the same model",
        )
