"""Reads the weights of a Hugging Face folder, in any of its file formats. Of a pickle, only tensors are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from discern.errors import CheckpointError
from discern.model_files.hub import CONFIG_NAME, WEIGHTS_NAME
from discern.models.architecture import AGAIN
from discern.storage.checksums import Record, read_json, verify
from discern.storage.files import utf8_name
from discern.training.checkpoint import check_finite

PICKLE_NAME = "pytorch_model.bin"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PICKLE_INDEX_NAME = f"{PICKLE_NAME}.index.json"
"""Indexes of large models, which list the files that contain the weights."""

_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WRITE_AGAIN = "if you trust it, load it with transformers and save it again with save_pretrained(), which writes safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder, read on demand.

    Attributes:
        path: file with the weights, or index of several files.
        tensors: functions that read one tensor each, by its current name.
    """

    path: Path
    tensors: Mapping[str, Callable[[], Tensor]]

    def read(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: its data type is not floating point of 16 bits or more.
            NumericsError: it contains values that are not finite.
        """
        tensor = self.tensors[name]()
        if tensor.dtype not in _READABLE:
            found = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self.path}: '{name}' has data type {found}: the model is quantized",
                hint="use the original model, with weights of 16 or 32 bits",
            )
        check_finite({name: tensor}, self.path)
        return tensor


@contextmanager
def open_weight_files(folder: Path, part: str = "") -> Iterator[WeightFiles]:
    """Open the weights of a folder in any file format, as a context manager.

    Args:
        part: a second network of the folder, whose files are named after it, such as "generator"; "": the only or first network.
    """
    path = weights_path(folder, part)
    files = _shards(path) if path.suffix == ".json" else [path.name]
    if ".bin" in path.suffixes:
        contents = [_unpickled(folder / name) for name in files]
        yield WeightFiles(path, {_modern_name(name): partial(each.__getitem__, name) for each in contents for name in each})
        return
    with ExitStack() as opening:
        shards = [opening.enter_context(opened(folder / name)) for name in files]
        tensors = {_modern_name(name): partial(shard.get_tensor, name) for shard in shards for name in shard.keys()}  # noqa: SIM118
        yield WeightFiles(path, tensors)


def weights_path(folder: Path, part: str = "") -> Path:
    """The file of weights, or the index of several, that the folder has; that of safetensors if it has none."""
    names = [WEIGHTS_NAME, INDEX_NAME, PICKLE_NAME, PICKLE_INDEX_NAME]
    if part:
        names = [f".{part}.".join(name.split(".")) for name in (WEIGHTS_NAME, PICKLE_NAME)]
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])


def _shards(index: Path) -> list[str]:
    """The files that an index lists, all of them in its folder."""
    files = sorted(set(read_json(index, _Index, hint=AGAIN, error=CheckpointError)["weight_map"].values()))
    missing = [file for file in files if Path(file).name != file or not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(f"{index} names '{missing[0]}'{and_more(missing)}, but {index.parent} has no such file", hint=AGAIN)
    return files


class _Index(Record):
    """The file that contains each tensor."""

    weight_map: dict[str, str]


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, by name. Code in it is not executed."""
    verify(path, error=CheckpointError)
    try:
        with path.open("rb") as file:
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # unpickling damaged data raises errors of many types
        raise CheckpointError(
            f"{path} cannot be loaded ({type(problem).__name__}): it is damaged, or contains more than tensors, possibly code",
            hint=f"download the model again; or, {_WRITE_AGAIN}",
        ) from problem
    if isinstance(content, dict):  # a training checkpoint has the weights under a key of their own
        content = next((content[key] for key in ("state_dict", "model_state_dict") if key in content), content)
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{path} contains something other than a dictionary of tensors", hint=_WRITE_AGAIN)
    return {str(name): tensor for name, tensor in content.items()}


def _modern_name(name: str) -> str:
    """The current name of a weight, without what DistributedDataParallel and torch.compile put in front of it."""
    name = name.replace("_orig_mod.", "").removeprefix("module.")
    # TensorFlow's names of the parameters of a LayerNorm, which early conversions of BERT kept
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def check_shape(name: str, found: Sequence[int], parameter: Tensor, path: Path) -> None:
    """Check that a stored tensor has the shape of its parameter.

    Args:
        path: file that contains the tensor, for messages.

    Raises:
        CheckpointError: the shapes differ.
    """
    if list(parameter.shape) != list(found):
        raise CheckpointError(
            f"{path}: '{name}' has shape {list(found)}, but the network expects {list(parameter.shape)}",
            hint=f"{CONFIG_NAME} and {path.name} must come from the same model",
        )


def and_more(names: Sequence[str]) -> str:
    """The end of a message that names the first of several: ", and 3 more"."""
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def read_tensors(path: Path, hint: str = AGAIN) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        CheckpointError: the file is missing or damaged, or does not match its checksum.
        NumericsError: it contains values that are not finite.
    """
    with opened(path, hint) as weights:
        found = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - not a mapping
    check_finite(found, path)
    return found


def opened(path: Path, hint: str = AGAIN) -> Any:
    """Open a safetensors file, as a context manager.

    Raises:
        CheckpointError: the file is missing or damaged, or does not match its checksum.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}", hint=hint)
    verify(path, error=CheckpointError)
    try:
        with utf8_name(path) as readable:
            return safe_open(readable, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint=hint) from problem
