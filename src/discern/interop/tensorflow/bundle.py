"""Reads the arrays of a TensorFlow checkpoint: `NAME.index` and the data files `NAME.data-00000-of-00001`, ...

The index maps the empty key to a `BundleHeaderProto` and the name of each variable to a `BundleEntryProto`. The data files
contain the bytes of the arrays, one after another. A partitioned variable has one entry that lists its slices, and one for each
slice under a key of its own.

Reference: tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discern.errors import CheckpointError
from discern.interop.tensorflow.sstable import MalformedError, checksum, content, fields, number, read_table, unmasked

INDEX_SUFFIX = ".index"
_FILES = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_AGAIN = "copy or download the checkpoint again, with all its files"

# Values of tensorflow.DataType that weights and counters have.
_TYPES: dict[int, tuple[str, torch.dtype]] = {
    1: ("<f4", torch.float32),
    2: ("<f8", torch.float64),
    3: ("<i4", torch.int32),
    9: ("<i8", torch.int64),
    14: ("<i2", torch.bfloat16),
    19: ("<f2", torch.float16),
}
_INTEGERS = (3, 9)
# Far more than any weight has. Beyond these limits numpy and torch fail with errors of their own.
_LONGEST_AXIS, _MOST_AXES = 2**31 - 1, 32


@dataclass(frozen=True)
class Entry:
    """Type, shape and location of an array.

    Attributes:
        dtype: a value of tensorflow.DataType.
        shard: number of the data file.
        offset: position of its first byte in that file.
        size: number of bytes.
        checksum: CRC-32C of the bytes.
        slices: the slices of a partitioned variable; empty for others.
        parts: the entry of each slice. A partitioned variable has no bytes of its own, and `size` is the sum over its parts.
    """

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    slices: tuple[Slice, ...] = ()
    parts: tuple[Entry, ...] = ()

    def is_whole_number(self) -> bool:
        """Whether it is a single number of an integer type, of any shape."""
        return not self.slices and self.dtype in _INTEGERS and math.prod(self.shape) == 1


@dataclass(frozen=True)
class Bundle:
    """A checkpoint whose index has been read.

    Attributes:
        prefix: path of its files without the suffix.
        num_shards: number of data files.
        entries: the entry of each variable, sorted by name.
    """

    prefix: Path
    num_shards: int
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, prefix: Path) -> Bundle:
        """Read the index, and check that the data files are at least as long as it requires.

        Raises:
            CheckpointError: a file is missing, truncated or damaged.
        """
        path = prefix.with_name(prefix.name + INDEX_SUFFIX)
        table = read_table(path)
        try:
            num_shards = _num_shards(table.pop(b"", b""))
            entries = _entries(table)
        except (MalformedError, UnicodeDecodeError) as problem:
            raise CheckpointError(f"{path} is damaged: {problem}", hint=_AGAIN) from problem
        bundle = cls(prefix, num_shards, entries)
        bundle._check_sizes()
        return bundle

    def shard_path(self, shard: int) -> Path:
        """The path of a data file."""
        return self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self.num_shards:05d}")

    def verified(self) -> Iterator[tuple[str, Entry]]:
        """Check the variables one by one, in the order of their bytes in the files, and yield each whose checksum is correct.

        Raises:
            CheckpointError: a checksum is wrong.
        """
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].shard, item[1].offset)):
            for part in entry.parts or (entry,):
                self._bytes(name, part)
            yield name, entry

    def read(self, name: str) -> Tensor:
        """Read an array, in its stored data type.

        Raises:
            CheckpointError: its bytes are damaged, or its data type is not supported.
        """
        entry = self.entries[name]
        if entry.dtype not in _TYPES:
            raise CheckpointError(
                f"{self.prefix}: '{name}' has TensorFlow's data type {entry.dtype}, which is not a supported number type",
                hint="give a checkpoint of the released ELECTRA code",
            )
        stored, dtype = _TYPES[entry.dtype]
        array = self._joined(name, entry, stored) if entry.slices else self._array(name, entry, stored)
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        return tensor.view(dtype) if dtype == torch.bfloat16 else tensor

    def _array(self, name: str, entry: Entry, stored: str) -> NDArray[Any]:
        """An array that is stored in one piece, or one part of a partitioned array."""
        if np.dtype(stored).itemsize * math.prod(entry.shape) != entry.size:
            raise CheckpointError(
                f"{self.prefix}: '{name}' has {entry.size:,} bytes, which does not match its shape {list(entry.shape)}",
                hint=_AGAIN,
            )
        return np.frombuffer(self._bytes(name, entry), stored).reshape(entry.shape)

    def _joined(self, name: str, entry: Entry, stored: str) -> NDArray[Any]:
        """A partitioned variable, assembled from its parts."""
        # Checked before memory is allocated: a damaged index may state any shape, but the parts cannot exceed the files.
        if np.dtype(stored).itemsize * math.prod(entry.shape) != entry.size or entry.size > self._stored_bytes():
            raise CheckpointError(f"{self.prefix}: the parts of '{name}' do not add up to shape {list(entry.shape)}", hint=_AGAIN)
        joined, filled = np.zeros(entry.shape, stored), np.zeros(entry.shape, np.bool_)
        for piece, part in zip(entry.slices, entry.parts, strict=True):
            place = piece.within(entry.shape)
            joined[place], filled[place] = self._array(f"{name}[{piece}]", part, stored), True
        if not filled.all():
            raise CheckpointError(f"{self.prefix}: the parts of '{name}' overlap and do not cover all of it", hint=_AGAIN)
        return joined

    def _stored_bytes(self) -> int:
        """Total size of the data files."""
        return sum(self.shard_path(shard).stat().st_size for shard in {part.shard for part in self._pieces()})

    def _pieces(self) -> Iterator[Entry]:
        """The entries with bytes in the data files: arrays and parts of arrays."""
        for entry in self.entries.values():
            yield from entry.parts or (entry,)

    def _bytes(self, name: str, entry: Entry) -> bytes:
        path = self.shard_path(entry.shard)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be read: {problem.strerror}", hint=_AGAIN) from problem
        found = checksum(data)
        if found != entry.checksum:
            raise CheckpointError(
                f"{path} is damaged: '{name}' has checksum {found:08x}, expected {entry.checksum:08x}", hint=_AGAIN
            )
        return data

    def _check_sizes(self) -> None:
        needed: dict[int, int] = {}
        for entry in self._pieces():
            needed[entry.shard] = max(needed.get(entry.shard, 0), entry.offset + entry.size)
        for shard, size in sorted(needed.items()):
            path = self.shard_path(shard)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, and {self.prefix.name}{INDEX_SUFFIX} refers to it", hint=_AGAIN)
            found = path.stat().st_size
            if found < size:
                raise CheckpointError(
                    f"{path} is truncated: it has {found:,} bytes, and the index requires {size:,}",
                    hint=_AGAIN,
                )


def find_checkpoint(source: Path) -> Path | None:
    """The prefix of the checkpoint that a path refers to; None if there is no checkpoint.

    Args:
        source: any file of the checkpoint, its prefix, or its folder. If the folder contains several checkpoints, its file
            `checkpoint` names the newest one, which is used.

    Raises:
        CheckpointError: the folder contains several checkpoints, and no file names the newest one.
    """
    if not source.is_dir():
        name = _FILES.sub("", source.name)
        if not name:  # a file named just '.index'
            return None
        prefix = source.with_name(name)
        is_part = source.is_file() and _FILES.search(source.name) is not None
        return prefix if is_part or prefix.with_name(prefix.name + INDEX_SUFFIX).is_file() else None
    prefixes = sorted(path.with_name(path.name.removesuffix(INDEX_SUFFIX)) for path in source.glob(f"?*{INDEX_SUFFIX}"))
    state = source / "checkpoint"
    newest = _newest(state.read_text(encoding="utf-8", errors="replace")) if state.is_file() else None
    if newest is not None and (source / newest in prefixes or not prefixes):
        return source / newest
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{source} has {len(prefixes)} checkpoints ({prefixes[0].name}, ..., {prefixes[-1].name}), and no file "
            "'checkpoint' that names the newest one",
            hint=f"specify one: {prefixes[-1]}{INDEX_SUFFIX}",
        )
    if not prefixes and (loose := next(source.glob("?*.data-*-of-*"), None)) is not None:
        return loose.with_name(_FILES.sub("", loose.name))
    return prefixes[0] if prefixes else None


def _newest(state: str) -> str | None:
    """The name of the newest checkpoint, from the content of a file `checkpoint`; None if it has no name."""
    named = re.search(r'^model_checkpoint_path: "([^"\x00]*)"$', state, re.MULTILINE)
    # The file contains the path on the machine that wrote it.
    name = re.split(r"[/\\]", named[1])[-1] if named else ""
    return None if name in ("", ".", "..") else name


def _num_shards(header: bytes) -> int:
    """The number of data files, from a BundleHeaderProto."""
    found = dict(fields(header))
    if number(found.get(2, 0)) != 0:
        raise MalformedError("its numbers are big-endian, which is not supported")
    shards = number(found.get(1, 0))
    if not 0 < shards < 100_000:
        raise MalformedError("it does not state the number of data files")
    return shards


def _entries(table: Mapping[bytes, bytes]) -> dict[str, Entry]:
    """The entries of all variables; those of partitioned variables with their parts."""
    found = {key: _entry(message) for key, message in table.items()}
    entries: dict[str, Entry] = {}
    claimed: set[bytes] = set()
    for key, entry in found.items():
        if key.startswith(PART_KEYS):
            continue
        name = key.decode("utf-8")
        if entry.slices:
            keys = [piece.key(name) for piece in entry.slices]
            claimed.update(keys)
            entry = _with_parts(name, entry, [found.get(each) for each in keys])
        entries[name] = entry
    stray = next((key for key in found if key.startswith(PART_KEYS) and key not in claimed), None)
    if stray is not None:
        raise MalformedError(f"the part with key {stray!r} belongs to no variable")
    return entries


def _with_parts(name: str, entry: Entry, parts: Sequence[Entry | None]) -> Entry:
    """The entry of a partitioned variable with its parts, after checking that each is present and has the size of its slice."""
    present = []
    for piece, part in zip(entry.slices, parts, strict=True):
        if part is None:
            raise MalformedError(f"'{name}' is partitioned, and its part [{piece}] is missing")
        sizes = tuple(place.stop - place.start for place in piece.within(entry.shape))
        if part.slices or part.dtype != entry.dtype or part.shape != sizes:
            raise MalformedError(
                f"'{name}' is partitioned, and its part [{piece}] has shape {list(part.shape)}, expected {list(sizes)}"
            )
        present.append(part)
    return replace(entry, parts=tuple(present), shard=0, offset=0, size=sum(part.size for part in present))


def _entry(message: bytes) -> Entry:
    """The entry in a BundleEntryProto."""
    found: dict[int, int | bytes] = {}
    slices = []
    for key, value in fields(message):
        found[key] = value
        if key == 7:
            slices.append(read_slice(content(value)))
    return Entry(
        dtype=number(found.get(1, 0)),
        shape=_shape(content(found.get(2, b""))),
        shard=number(found.get(3, 0)),
        offset=number(found.get(4, 0)),
        size=number(found.get(5, 0)),
        checksum=unmasked(number(found.get(6, 0))),
        slices=tuple(slices),
    )


def _shape(message: bytes) -> tuple[int, ...]:
    """The shape in a TensorShapeProto.

    Protocol buffers omit a size of zero. A negative size, which means unknown, is decoded as a huge number.
    """
    shape = tuple(number(dict(fields(content(size))).get(1, 0)) for key, size in fields(message) if key == 2)
    if len(shape) > _MOST_AXES:
        raise MalformedError(f"an array has {len(shape)} axes, expected at most {_MOST_AXES}")
    if shape and max(shape) > _LONGEST_AXIS:
        raise MalformedError(f"an array has {max(shape):,} elements along one axis, expected at most {_LONGEST_AXIS:,}")
    return shape


# Parts of partitioned variables.

PART_KEYS = b"\0"
"""Prefix of the key of every part. The name of a variable never starts with it."""

_WHOLE = -1
_SIGN = 1 << 63


@dataclass(frozen=True)
class Slice:
    """A rectangular part of an array.

    Attributes:
        starts: first index along each axis.
        lengths: number of indices along each axis; -1 for all.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def key(self, name: str) -> bytes:
        """The key of this part of a variable in the index."""
        text = name.encode("utf-8").replace(b"\0", b"\0\xff") + b"\0\1"  # the byte 255 is escaped too, but UTF-8 has none
        pairs = zip(self.starts, self.lengths, strict=True)
        return PART_KEYS + text + _unsigned(len(self.starts)) + b"".join(_signed(each) for pair in pairs for each in pair)

    def within(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """The indices of the slice in an array of this shape.

        Raises:
            MalformedError: the slice is not inside the array.
        """
        if len(self.starts) != len(shape):
            raise MalformedError(f"a part has {len(self.starts)} axes, and its array has {len(shape)}")
        found = []
        for start, length, size in zip(self.starts, self.lengths, shape, strict=True):
            stop = size if length == _WHOLE else start + length
            if not 0 <= start <= stop <= size:
                raise MalformedError(f"a part extends from {start:,} to {stop:,} along an axis of length {size:,}")
            found.append(slice(start, stop))
        return tuple(found)

    def __str__(self) -> str:
        pairs = zip(self.starts, self.lengths, strict=True)
        return ", ".join(":" if length == _WHOLE else f"{start}:{start + length}" for start, length in pairs)


def read_slice(message: bytes) -> Slice:
    """The slice in a TensorSliceProto, in which an axis that is not cut has neither start nor length.

    Raises:
        MalformedError: the message is not a TensorSliceProto.
    """
    axes = [dict(fields(content(extent))) for key, extent in fields(message) if key == 1]
    starts = tuple(_integer(axis.get(1, 0)) for axis in axes)
    return Slice(starts, tuple(_integer(axis[2]) if 2 in axis else _WHOLE for axis in axes))


def _integer(value: int | bytes) -> int:
    """The value of a field of type int64, which stores negative numbers in two's complement."""
    plain = number(value)
    return plain - 2 * _SIGN if plain >= _SIGN else plain


def _unsigned(value: int) -> bytes:
    """An unsigned number as its number of bytes, then the bytes, most significant first."""
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _signed(value: int) -> bytes:
    """A signed number in two's complement, seven bits per byte, most significant first.

    As many leading bits are flipped as there are bytes.
    """
    size = (value if value >= 0 else ~value).bit_length() // 7 + 1
    flipped = ((1 << size) - 1) << (7 * size)
    return ((value & ((1 << 8 * size) - 1)) ^ flipped).to_bytes(size, "big")
