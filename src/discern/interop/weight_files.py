"""Reads the weights of a Hugging Face folder, in any of its file formats. Of a pickle, only tensors are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from discern.errors import CheckpointError
from discern.interop.names import CONFIG_NAME, HEAD_NAME, WEIGHTS_NAME
from discern.storage.checksums import Record, read_record, verify
from discern.storage.files import utf8_name
from discern.training.checkpoint import check_finite

PICKLE_NAME = "pytorch_model.bin"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PICKLE_INDEX_NAME = f"{PICKLE_NAME}.index.json"
"""Indexes of large models, which list the files that contain the weights."""

_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# TensorFlow's names of the parameters of a LayerNorm, which early conversions of BERT kept.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
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
def open_weight_files(folder: Path) -> Iterator[WeightFiles]:
    """Open the weights of a folder in any file format, as a context manager."""
    names = (WEIGHTS_NAME, INDEX_NAME, PICKLE_NAME, PICKLE_INDEX_NAME)
    path = next((folder / name for name in names if (folder / name).is_file()), folder / WEIGHTS_NAME)
    files = _shards(path) if path.name in (INDEX_NAME, PICKLE_INDEX_NAME) else [path.name]
    if path.name in (PICKLE_NAME, PICKLE_INDEX_NAME):
        contents = [_unpickled(folder / name) for name in files]
        yield WeightFiles(path, {modern_name(name): partial(each.__getitem__, name) for each in contents for name in each})
        return
    if not path.is_file():
        _refuse_loose_shards(folder)
    with ExitStack() as opening:
        shards = [opening.enter_context(opened(folder, name)) for name in files]
        tensors = {modern_name(name): partial(shard.get_tensor, name) for shard in shards for name in shard.keys()}  # noqa: SIM118
        yield WeightFiles(path, tensors)


def _refuse_loose_shards(folder: Path) -> None:
    """Raise an error for parts of a model without their index, without which missing parts would not be noticed."""
    for pattern, index in (("model-*-of-*.safetensors", INDEX_NAME), ("pytorch_model-*-of-*.bin", PICKLE_INDEX_NAME)):
        parts = sorted(path.name for path in folder.glob(pattern))
        if parts:
            raise CheckpointError(
                f"{folder} has its weights in several files ({parts[0]}{and_more(parts)}), but no {index}, which lists them",
                hint=f"download {index} too; a copy of a model needs all its files",
            )


def _shards(index: Path) -> list[str]:
    """The files that an index lists. All of them must be in its folder."""
    placed = read_record(index, _Index, hint="download the model again", error=CheckpointError)["weight_map"]
    files = sorted({Path(file) for file in placed.values()})
    missing = [str(file) for file in files if file.name != str(file) or not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names '{missing[0]}'{and_more(missing)}, but {index.parent} has no such file",
            hint="download the model again; a copy needs all its files",
        )
    return [file.name for file in files]


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
    named = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not named or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{path} contains something other than a dictionary of tensors", hint=_WRITE_AGAIN)
    return dict(content)


def modern_name(name: str) -> str:
    """The current name of a weight, without what DistributedDataParallel and torch.compile put in front of it."""
    name = name.replace("_orig_mod.", "").removeprefix("module.")
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def check_names(
    stored: WeightFiles, expected: Set[str], parts: tuple[str, ...], family: str, ignored: Set[str] = frozenset()
) -> None:
    """Check that all expected tensors are present, and that no other tensor belongs to the encoder. Heads may be present.

    Args:
        parts: prefixes of the names of the encoder's tensors.
        family: expected kind of model with its article, for messages.
        ignored: names of tensors to ignore.

    Raises:
        CheckpointError: a tensor is missing or unexpected.
    """
    missing = sorted(expected - stored.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{stored.path}: '{missing[0]}' is missing{and_more(missing)}",
            hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model, which must be {family}",
        )
    left_over = sorted(name for name in stored.tensors.keys() - expected - ignored if name.startswith(parts))
    if left_over:
        raise CheckpointError(
            f"{stored.path}: unexpected tensor '{left_over[0]}'{and_more(left_over)}",
            hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model",
        )


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


def opened(folder: Path, name: str = WEIGHTS_NAME) -> Any:
    """Open a file of weights, as a context manager.

    Raises:
        CheckpointError: the file is missing or damaged, or does not match its checksum.
    """
    path = folder / name
    if not path.is_file() and name == HEAD_NAME:
        raise CheckpointError(
            f"{folder} has no {HEAD_NAME}, which contains the head of its discriminator",
            hint="export the run again; a copy of an export needs all its files",
        )
    if not path.is_file():
        other = "pytorch_model.bin" if (folder / "pytorch_model.bin").is_file() else None
        raise CheckpointError(
            f"{folder} has no {name}" + (f", only {other}, which is a pickle" if other else ""),
            hint=f"load the model with transformers and save it again with save_pretrained(), which writes {name}",
        )
    verify(path, error=CheckpointError)
    try:
        with utf8_name(path) as readable:
            return safe_open(readable, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint="export or download the model again") from problem


_SUFFIXES = (".safetensors", ".bin")


def allocate(network: nn.Module, folder: Path) -> None:
    """Allocate CPU memory for a network built on the meta device; its values are not initialized.

    Args:
        folder: folder with the weights.

    Raises:
        CheckpointError: config.json describes more parameters than the files have bytes: it is damaged, or of another model.
    """
    needed = sum(parameter.numel() for parameter in network.parameters())
    present = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if needed > present:
        raise CheckpointError(
            f"{folder / CONFIG_NAME} describes {needed:,} parameters, but the weights beside it have only {present:,} bytes",
            hint=f"{CONFIG_NAME} and the weights must come from the same model: export or download it again",
        )
    network.to_empty(device="cpu")
