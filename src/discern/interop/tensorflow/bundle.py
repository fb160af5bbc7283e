"""The arrays of a TensorFlow checkpoint: `NAME.index`, and `NAME.data-00000-of-00001` and its like.

Reference: tensorflow/core/protobuf/tensor_bundle.proto. The index holds a `BundleHeaderProto` under the empty key and a
`BundleEntryProto` under the name of each variable; the data files hold the bytes of one array after another. A partitioned
variable has an entry that says which slices there are, and one for each slice, under a key of its own (`slices`).
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
from discern.interop.tensorflow.crc32c import crc32c, unmasked
from discern.interop.tensorflow.slices import PART_KEYS, Slice, read_slice
from discern.interop.tensorflow.sstable import read_table
from discern.interop.tensorflow.wire import MalformedError, content, fields, number

INDEX_SUFFIX = ".index"
_FILES = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_AGAIN = "copy or download the checkpoint again, every file of it"

# Values of tensorflow.DataType, as far as weights and counters go.
_TYPES: dict[int, tuple[str, torch.dtype]] = {
    1: ("<f4", torch.float32),
    2: ("<f8", torch.float64),
    3: ("<i4", torch.int32),
    9: ("<i8", torch.int64),
    14: ("<i2", torch.bfloat16),
    19: ("<f2", torch.float16),
}
_INTEGERS = (3, 9)
# No weight comes near either; numpy and torch fail in ways of their own beyond.
_LONGEST_AXIS, _MOST_AXES = 2**31 - 1, 32


@dataclass(frozen=True)
class Entry:
    """Where an array stands, and what it is.

    Attributes:
        dtype: a value of tensorflow.DataType.
        shard: number of the data file.
        offset: of its first byte there.
        size: in bytes.
        checksum: CRC-32C of these.
        slices: the pieces that a partitioned variable consists of; empty for others.
        parts: where each piece stands. The bytes are theirs, and `size` is the sum of their sizes.
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
        """Whether it is one number of an integer type, with or without axes."""
        return not self.slices and self.dtype in _INTEGERS and math.prod(self.shape) == 1


@dataclass(frozen=True)
class Bundle:
    """A checkpoint whose index has been read.

    Attributes:
        prefix: path of its files up to the suffix.
        num_shards: data files.
        entries: by variable, sorted.
    """

    prefix: Path
    num_shards: int
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, prefix: Path) -> Bundle:
        """Read the index, and make sure that the data files are as long as it says.

        Raises:
            CheckpointError: a file is missing, cut short or damaged.
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
        """A data file."""
        return self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self.num_shards:05d}")

    def verified(self) -> Iterator[tuple[str, Entry]]:
        """Each variable, once the checksum of its bytes is right; in the order in which they stand in the files.

        Raises:
            CheckpointError: one is not.
        """
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].shard, item[1].offset)):
            for part in entry.parts or (entry,):
                self._bytes(name, part)
            yield name, entry

    def read(self, name: str) -> Tensor:
        """An array, in the type that it is stored in.

        Raises:
            CheckpointError: its bytes are damaged, or it is no plain array of numbers.
        """
        entry = self.entries[name]
        if entry.dtype not in _TYPES:
            raise CheckpointError(
                f"{self.prefix}: '{name}' is of TensorFlow's type {entry.dtype}, which is no plain number",
                hint="give a checkpoint of the released ELECTRA code",
            )
        stored, dtype = _TYPES[entry.dtype]
        array = self._joined(name, entry, stored) if entry.slices else self._array(name, entry, stored)
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        return tensor.view(dtype) if dtype == torch.bfloat16 else tensor

    def _array(self, name: str, entry: Entry, stored: str) -> NDArray[Any]:
        """An array that stands in one piece, or one piece of an array."""
        if np.dtype(stored).itemsize * math.prod(entry.shape) != entry.size:
            raise CheckpointError(
                f"{self.prefix}: '{name}' has shape {list(entry.shape)} and {entry.size:,} bytes, which do not go together",
                hint=_AGAIN,
            )
        return np.frombuffer(self._bytes(name, entry), stored).reshape(entry.shape)

    def _joined(self, name: str, entry: Entry, stored: str) -> NDArray[Any]:
        """A partitioned variable, put together from its parts."""
        # Before memory is taken for it: what the parts hold must be in the files, what the shape says need not be.
        if np.dtype(stored).itemsize * math.prod(entry.shape) != entry.size or entry.size > self._stored_bytes():
            raise CheckpointError(f"{self.prefix}: the parts of '{name}' do not add up to shape {list(entry.shape)}", hint=_AGAIN)
        joined, filled = np.zeros(entry.shape, stored), np.zeros(entry.shape, np.bool_)
        for piece, part in zip(entry.slices, entry.parts, strict=True):
            place = piece.within(entry.shape)
            joined[place], filled[place] = self._array(f"{name}[{piece}]", part, stored), True
        if not filled.all():
            raise CheckpointError(f"{self.prefix}: the parts of '{name}' overlap, and do not cover all of it", hint=_AGAIN)
        return joined

    def _stored_bytes(self) -> int:
        """Of all data files."""
        return sum(self.shard_path(shard).stat().st_size for shard in {part.shard for part in self._pieces()})

    def _pieces(self) -> Iterator[Entry]:
        """What stands in the data files: arrays and parts of arrays."""
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
        found = crc32c(data)
        if found != entry.checksum:
            raise CheckpointError(
                f"{path} is damaged: '{name}' has checksum {found:08x}, and {entry.checksum:08x} is stated", hint=_AGAIN
            )
        return data

    def _check_sizes(self) -> None:
        needed: dict[int, int] = {}
        for entry in self._pieces():
            needed[entry.shard] = max(needed.get(entry.shard, 0), entry.offset + entry.size)
        for shard, size in sorted(needed.items()):
            path = self.shard_path(shard)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; {self.prefix.name}{INDEX_SUFFIX} names it", hint=_AGAIN)
            found = path.stat().st_size
            if found < size:
                raise CheckpointError(
                    f"{path} is cut short: it has {found:,} bytes, and the index needs {size:,}",
                    hint=_AGAIN,
                )


def find_checkpoint(source: Path) -> Path | None:
    """The prefix of the checkpoint that a path means; None: it means none.

    Args:
        source: any file of the checkpoint, its prefix, or the folder that it is in. There the file `checkpoint` says which
            is the newest of several.

    Raises:
        CheckpointError: several are there, and nothing says which.
    """
    if not source.is_dir():
        name = _FILES.sub("", source.name)
        if not name:  # a file that is called '.index' and nothing else
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
            f"{source} holds {len(prefixes)} checkpoints ({prefixes[0].name}, ..., {prefixes[-1].name}), and no file "
            "'checkpoint' says which is meant",
            hint=f"name one: {prefixes[-1]}{INDEX_SUFFIX}",
        )
    if not prefixes and (loose := next(source.glob("?*.data-*-of-*"), None)) is not None:
        return loose.with_name(_FILES.sub("", loose.name))
    return prefixes[0] if prefixes else None


def _newest(state: str) -> str | None:
    """The name of the newest checkpoint, of the content of a file `checkpoint`; None: it gives none."""
    named = re.search(r'^model_checkpoint_path: "([^"\x00]*)"$', state, re.MULTILINE)
    # The path is that of the machine on which it was written.
    name = re.split(r"[/\\]", named[1])[-1] if named else ""
    return None if name in ("", ".", "..") else name


def _num_shards(header: bytes) -> int:
    """Of a BundleHeaderProto."""
    found = dict(fields(header))
    if number(found.get(2, 0)) != 0:
        raise MalformedError("its numbers are big-endian")
    shards = number(found.get(1, 0))
    if not 0 < shards < 100_000:
        raise MalformedError("it does not say how many data files there are")
    return shards


def _entries(table: Mapping[bytes, bytes]) -> dict[str, Entry]:
    """Every variable; those that are partitioned with their parts."""
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
        raise MalformedError(f"a part that belongs to no variable, under the key {stray!r}")
    return entries


def _with_parts(name: str, entry: Entry, parts: Sequence[Entry | None]) -> Entry:
    """A partitioned variable, once each of its parts is there and of the size that its slice has."""
    present = []
    for piece, part in zip(entry.slices, parts, strict=True):
        if part is None:
            raise MalformedError(f"'{name}' is partitioned, and its part [{piece}] is missing")
        sizes = tuple(place.stop - place.start for place in piece.within(entry.shape))
        if part.slices or part.dtype != entry.dtype or part.shape != sizes:
            raise MalformedError(f"'{name}' is partitioned, and its part [{piece}] is of shape {list(part.shape)}")
        present.append(part)
    return replace(entry, parts=tuple(present), shard=0, offset=0, size=sum(part.size for part in present))


def _entry(message: bytes) -> Entry:
    """Of a BundleEntryProto."""
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
    """Of a TensorShapeProto; a size of zero is left out, as protocol buffers do. Negative ones, of unknown size, look huge."""
    shape = tuple(number(dict(fields(content(size))).get(1, 0)) for key, size in fields(message) if key == 2)
    if len(shape) > _MOST_AXES:
        raise MalformedError(f"an array of {len(shape)} axes, expected {_MOST_AXES} at most")
    if shape and max(shape) > _LONGEST_AXIS:
        raise MalformedError(f"an array with {max(shape):,} elements along one axis, expected {_LONGEST_AXIS:,} at most")
    return shape
