"""Imports checkpoints of the released ELECTRA code, which TensorFlow wrote: `NAME.index` and `NAME.data-00000-of-00001`, ...

The index is a sorted table in LevelDB's format. It maps the empty key to a `BundleHeaderProto` and the name of each variable to a
`BundleEntryProto`; the data files contain the bytes of the arrays, one after another. TensorFlow is not needed.

Reference: tensorflow/core/protobuf/tensor_bundle.proto; leveldb, doc/table_format.md.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from discern.data.tokenizer.loading import protobuf_fields, read_varint
from discern.errors import CheckpointError, ConfigError
from discern.model_files.huggingface import HuggingFaceModel
from discern.model_files.weight_files import and_more, check_shape
from discern.models.architecture import Predicts
from discern.models.base import Network, build_embeddings, build_encoder, build_head, named_parameters
from discern.models.config import build_config
from discern.storage.checksums import understood
from discern.types import SpecialTokens

KIND = "TensorFlow checkpoint of the released ELECTRA code"
_INDEX = ".index"
_FILES = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_AGAIN = "copy or download the checkpoint again, with all its files"
_GIVE = "give a checkpoint of the released ELECTRA code; for any other model, give a Hugging Face folder"
_FOOTER, _MAGIC, _CHECKSUM_MASK = 48, 0xDB4775248B80FB57, 0xA282EAD8
# A key shares a prefix with the previous one, so a few bytes in the file can expand to a long key. This bounds the memory used.
_LONGEST_KEY = 4096
# Values of tensorflow.DataType that weights and counters have.
_TYPES = {1: "<f4", 3: "<i4", 9: "<i8", 19: "<f2"}
_SLOTS = re.compile(r"/(adam_m|adam_v|Adam|Adam_1)$")
_STEP, _HEAD_WIDTH = "global_step", 64
# Parts of names: Hugging Face's and the released code's, replaced in this order.
_NAMES = (
    (r"^discriminator_predictions\.dense_prediction\.", "discriminator_predictions.dense_1."),
    (r"^generator_lm_head\.bias$", "generator_predictions.output_bias"),
    (r"\.layer\.(\d+)\.", r".layer_\1."),
    (r"LayerNorm\.weight$", "LayerNorm.gamma"),
    (r"LayerNorm\.bias$", "LayerNorm.beta"),
    (r"_embeddings\.weight$", "_embeddings"),
    (r"\.weight$", ".kernel"),
    (r"\.", "/"),
)


@dataclass(frozen=True)
class Entry:
    """An array of a checkpoint: type (a value of tensorflow.DataType), shape, data file, first byte, bytes, CRC-32C."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int


@dataclass(frozen=True)
class Bundle:
    """A checkpoint whose index has been read.

    Attributes:
        prefix: path of its files without the suffix.
        num_shards: number of data files.
        entries: the entry of each variable, by name.
    """

    prefix: Path
    num_shards: int
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, prefix: Path) -> Bundle:
        """Read the index.

        Raises:
            ConfigError: google-crc32c is not installed.
            CheckpointError: the index is missing, truncated or damaged.
        """
        path = prefix.with_name(prefix.name + _INDEX)
        try:
            table = read_table(path.read_bytes())
            header = dict(protobuf_fields(table.pop(b"", b"")))
            num_shards = header.get(1, 0)
            if header.get(2, 0) != 0 or not 0 < num_shards < 100_000:
                raise ValueError("its header is not that of little-endian data files")
            # The keys of the parts of a partitioned variable begin with a zero.
            entries = {key.decode(): _entry(message) for key, message in table.items() if not key.startswith(b"\0")}
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be read: {problem.strerror}", hint=_AGAIN) from problem
        except (ValueError, KeyError, TypeError, struct.error) as problem:
            raise CheckpointError(f"{path} is damaged, or another kind of file: {problem}", hint=_AGAIN) from problem
        return cls(prefix, num_shards, entries)

    def read(self, name: str) -> Tensor:
        """Read an array, in its stored data type.

        Raises:
            CheckpointError: a file is missing or truncated, the bytes are damaged, or the data type is not supported.
        """
        entry = self.entries[name]
        path = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self.num_shards:05d}")
        if entry.dtype not in _TYPES or not entry.size:
            what = f"has TensorFlow's data type {entry.dtype}" if entry.size else "is empty or partitioned"
            raise CheckpointError(f"{self.prefix}: '{name}' {what}, which is not supported", hint=_GIVE)
        stored = _TYPES[entry.dtype]
        with understood(path, hint=_AGAIN, error=CheckpointError), path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(min(entry.size, path.stat().st_size))
        if _crc32c(data) != entry.checksum or len(data) != np.dtype(stored).itemsize * math.prod(entry.shape):
            raise CheckpointError(
                f"{path} is damaged or truncated: the checksum or the size of '{name}' is wrong",
                hint=_AGAIN,
            )
        array = np.frombuffer(data, stored).reshape(entry.shape)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def read_table(data: bytes) -> dict[bytes, bytes]:
    """All entries of a sorted table.

    Raises:
        ValueError, struct.error: it is truncated, damaged or compressed.
    """
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError(f"its {len(data):,} bytes do not end as the index of a TensorFlow checkpoint does")

    def block(place: BytesIO) -> Iterator[tuple[bytes, bytes]]:
        """The entries of a block, at the offset and of the size that are read from `place`."""
        offset, size = read_varint(place), read_varint(place)
        # A byte for the kind of compression and a masked CRC-32C follow.
        kind, stated = struct.unpack("<BI", data[offset + size : offset + size + 5])
        if kind != 0 or _unmasked(stated) != _crc32c(data[offset : offset + size + 1]):
            raise ValueError(f"the block at byte {offset:,} has a wrong checksum, or is compressed")
        # A key is stored as the length of the prefix that it shares with the previous key, and the rest.
        (restarts,) = struct.unpack("<I", data[offset + size - 4 : offset + size])
        content, key = BytesIO(data[offset : offset + size - 4 * (restarts + 1)]), b""
        while content.tell() < len(content.getbuffer()):
            shared, rest, length = (read_varint(content) for _ in range(3))
            if shared > len(key) or shared + rest > _LONGEST_KEY:
                raise ValueError("an entry extends beyond the end of its block")
            key = key[:shared] + content.read(rest)
            yield key, content.read(length)

    footer = BytesIO(data[-_FOOTER:])
    _ = read_varint(footer), read_varint(footer)  # the place of a block that is not needed
    return {key: value for _, place in block(footer) for key, value in block(BytesIO(place))}


def _entry(message: bytes) -> Entry:
    """The entry in a BundleEntryProto."""
    found = dict(protobuf_fields(message))
    shape = tuple(dict(protobuf_fields(size)).get(1, 0) for key, size in protobuf_fields(found.get(2, b"")) if key == 2)
    dtype, shard, offset, size = (found.get(key, 0) for key in (1, 3, 4, 5))
    if len(shape) > 8 or max((*shape, offset >> 31)) >= 2**31:
        raise ValueError(f"an array has the shape {list(shape)} at byte {offset:,}")
    return Entry(dtype, shape, shard, offset, size, _unmasked(int.from_bytes(found.get(6, b""), "little")))


def _unmasked(stored: int) -> int:
    """The checksum for its masked form. Files store it masked, because a CRC of data that contains CRCs is weak."""
    rotated = (stored - _CHECKSUM_MASK) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def _crc32c(data: bytes) -> int:
    try:
        import google_crc32c
    except ImportError:
        raise ConfigError(
            "checkpoints of TensorFlow have checksums that need google-crc32c", hint="pip install 'discern-nlp[tensorflow]'"
        ) from None
    return int(google_crc32c.value(data))


def find_checkpoint(source: Path) -> Path | None:
    """The prefix of the checkpoint that a path refers to; None if there is no checkpoint.

    Args:
        source: any file of the checkpoint, its prefix, or its folder.

    Raises:
        CheckpointError: the folder contains several checkpoints.
    """
    if not source.is_dir():
        name = _FILES.sub("", source.name)
        is_part = source.is_file() and name != source.name
        return source.with_name(name) if name and (is_part or source.with_name(name + _INDEX).is_file()) else None
    prefixes = sorted(path.with_name(path.name.removesuffix(_INDEX)) for path in source.glob(f"?*{_INDEX}"))
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{source} has {len(prefixes)} checkpoints ({prefixes[0].name}, ..., {prefixes[-1].name})",
            hint=f"specify one: {prefixes[-1]}{_INDEX}",
        )
    return next(iter(prefixes), None)


@dataclass(frozen=True)
class _Scopes:
    """The scopes of the variables of a network: of its embeddings and of its layers; and what the network predicts."""

    embeddings: str
    encoder: str
    predicts: Predicts

    def variable(self, name: str) -> str:
        """The released code's name of a weight, by Hugging Face's."""
        scope = self.embeddings if name.startswith("electra.embeddings.") else self.encoder
        name = re.sub(r"^electra\.", f"{scope}.", name)
        for theirs, released in _NAMES:
            name = re.sub(theirs, released, name)
        return name


def read_released(prefix: Path, special: SpecialTokens, heads: int | None) -> dict[str, Any]:
    """Read the networks in a checkpoint of the released code.

    The networks are recognized by the names of the variables, and their sizes by the shapes. The state of Adam is not read.

    Args:
        prefix: path of the checkpoint's files without the suffix.
        heads: number of attention heads of the discriminator, which cannot be inferred from the weights; None: hidden size / 64,
            as in the released code. The generator always has hidden size / 64.

    Returns:
        `models`: the networks by name, the one to fine-tune first; `step`, `left_out` and `remarks` as in `ImportedModel`.

    Raises:
        CheckpointError: a file is missing or damaged, or the variables are not those of an ELECTRA.
    """
    bundle = Bundle.open(prefix)
    names = {name for name in bundle.entries if not _SLOTS.search(name) and name != _STEP}
    scopes = _scopes(names, prefix)
    models = {name: _read_network(bundle, each, None if name == "generator" else heads, special) for name, each in scopes.items()}
    num_heads = next(iter(models.values())).sizes.num_heads
    left_out = sorted(names - {scopes[network].variable(name) for network, model in models.items() for name in model.tensors})
    foreign = [name for name in left_out if not name.startswith("task_specific/")]
    if foreign:
        raise CheckpointError(f"{prefix}: unexpected tensor '{foreign[0]}'{and_more(foreign)}", hint=_GIVE)
    counter = bundle.read(_STEP) if _STEP in bundle.entries else None
    step = None if counter is None or counter.numel() != 1 or counter.is_floating_point() else int(counter)
    slots = ["Adam's slots"] if any(_SLOTS.search(name) for name in bundle.entries) else []
    remark = (
        f"the number of attention heads cannot be inferred from the weights; assumed to be {num_heads} (hidden size / "
        f"{_HEAD_WIDTH}, as in the released code); set it with --heads N"
    )
    remarks = [remark] if heads is None else []
    return {"models": models, "step": step, "left_out": [*slots, *left_out], "remarks": remarks}


def _scopes(names: Collection[str], prefix: Path) -> dict[str, _Scopes]:
    """The networks that the variables belong to; the one to fine-tune comes first."""

    def has(scope: str) -> bool:
        return any(name.startswith(f"{scope}/") for name in names)

    if "electra/embeddings/word_embeddings" not in names:
        shown = ", ".join(sorted({name.partition("/")[0] for name in names})[:6]) or "none"
        raise CheckpointError(f"{prefix} contains no ELECTRA: its variables are in the scopes {shown}", hint=_GIVE)
    judges, speaks = has("discriminator_predictions"), has("generator_predictions")
    found: dict[str, _Scopes] = {"discriminator": _Scopes("electra", "electra", "replaced")} if judges else {}
    if speaks and has("generator/encoder"):
        found["generator"] = _Scopes("generator" if has("generator/embeddings") else "electra", "generator", "words")
    elif speaks:
        # Untied generators have a scope of their own; a tied one is the discriminator with another head.
        found["generator" if judges else "encoder"] = _Scopes("electra", "electra", "words")
    return found or {"encoder": _Scopes("electra", "electra", "nothing")}


def _read_network(bundle: Bundle, scopes: _Scopes, heads: int | None, special: SpecialTokens) -> HuggingFaceModel:
    """A network, whose sizes follow from the shapes of its variables."""
    tables, layer = f"{scopes.embeddings}/embeddings", f"{scopes.encoder}/encoder/layer_"
    names = [f"{tables}/{kind}_embeddings" for kind in ("word", "position", "token_type")]
    shapes = []
    for name in (*names, f"{layer}0/intermediate/dense/kernel"):
        entry = bundle.entries.get(name)
        if entry is None or len(entry.shape) != 2:
            raise CheckpointError(f"{bundle.prefix}: there is no matrix '{name}'", hint=_GIVE)
        shapes.append(entry.shape)
    (rows, embedding_size), (positions, _), (types, _), (hidden, feedforward) = shapes
    layers = {found[1] for name in bundle.entries if (found := re.match(rf"{layer}(\d+)/", name))}
    with understood(bundle.prefix, hint="set the number of attention heads with --heads N", error=CheckpointError):
        sizes = build_config(
            num_layers=len(layers),
            hidden_size=hidden,
            embedding_size=embedding_size,
            num_heads=heads or max(1, hidden // _HEAD_WIDTH),
            feedforward_size=feedforward,
            max_positions=positions,
            num_token_types=types,
        )
    with torch.device("meta"):
        encoder = build_encoder(build_embeddings(rows, embedding_size, sizes), sizes)
        network = Network(encoder, build_head(encoder, scopes.predicts))
    tensors = {}
    for name, like in encoder.architecture.to_huggingface(named_parameters(network), sizes).items():
        variable = scopes.variable(name)
        if variable not in bundle.entries:
            raise CheckpointError(f"{bundle.prefix}: '{variable}' is missing", hint=_GIVE)
        tensor = bundle.read(variable).float()
        # Kernels are (in, out) there.
        tensors[name] = (tensor.t() if variable.endswith("/kernel") else tensor).contiguous()
        check_shape(variable, tensors[name].shape, like, bundle.prefix)
    config = encoder.architecture.config_json(sizes, rows, scopes.predicts, special, "float32")
    return HuggingFaceModel(config, tensors, output=scopes.predicts)
