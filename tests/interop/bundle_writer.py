"""Writes TensorFlow checkpoints by the description of the format, so that tests can have any, also ones that are wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from discern.interop.tensorflow.sstable import checksum as crc32c

TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}
MAGIC = 0xDB4775248B80FB57
Piece = tuple[tuple[int, int] | None, ...]
"""Start and length along each axis; None: all of it."""


def masked(checksum: int) -> int:
    """What a file states for a checksum. Reference: leveldb, doc/log_format.md."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    """Seven bits to a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def number(key: int, value: int) -> bytes:
    """A field that is a number."""
    return varint(key << 3) + varint(value)


def message(key: int, content: bytes) -> bytes:
    """A field that is a message."""
    return varint(key << 3 | 2) + varint(len(content)) + content


def entry(array: np.ndarray, offset: int, *, shard: int = 0, extra: bytes = b"") -> bytes:
    """A BundleEntryProto."""
    data = array.tobytes()
    checksum = varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(data)))
    return whole(array) + number(3, shard) + number(4, offset) + number(5, len(data)) + checksum + extra


def whole(array: np.ndarray, pieces: Sequence[Piece] = ()) -> bytes:
    """The part of a BundleEntryProto that says what an array is, and of which slices it consists, if any."""
    shape = b"".join(message(2, number(1, size)) for size in array.shape)
    return number(1, TYPES[array.dtype.name]) + message(2, shape) + b"".join(message(7, slice_proto(piece)) for piece in pieces)


def slice_proto(piece: Piece) -> bytes:
    """A TensorSliceProto; None is all of an axis, a start of 0 is left out."""
    return b"".join(
        message(1, b"" if extent is None else (number(1, extent[0]) if extent[0] else b"") + number(2, extent[1]))
        for extent in piece
    )


def slice_key(name: str, piece: Piece) -> bytes:
    """What TensorFlow calls EncodeTensorNameSlice, in its ordered code, for slices whose numbers are below 8,192."""

    def signed(value: int) -> bytes:
        if -64 <= value < 64:
            return bytes([0x80 ^ (value & 0xFF)])
        return struct.pack(">H", 0xC000 ^ value)

    numbers = [value for extent in piece for value in (extent or (0, -1))]
    return b"\0" + name.encode() + b"\0\1" + b"\1" + bytes([len(piece)]) + b"".join(map(signed, numbers))


def table(entries: Mapping[bytes, bytes], *, compression: int = 0, per_block: int = 7, times: int = 1) -> bytes:
    """A sorted table in several blocks, each key stored as what differs from the one before it.

    Args:
        times: how often each block is named; more than once is wrong.
    """
    out = bytearray()
    index: dict[bytes, bytes] = {}
    keys = sorted(entries)
    for begin in range(0, len(keys), per_block):
        part = keys[begin : begin + per_block]
        handle = _append(out, _block({key: entries[key] for key in part}), compression)
        index |= {part[-1] + b"\0" * time: handle for time in range(times)}
    meta = _append(out, _block({}), 0)
    footer = meta + _append(out, _block(index), 0)
    return bytes(out) + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def write_bundle(
    prefix: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    header: bytes = number(1, 1),
    compression: int = 0,
    special: Mapping[str, bytes] | None = None,
    partitions: Mapping[str, Sequence[Piece]] | None = None,
    shards: int = 1,
) -> Path:
    """A checkpoint.

    Args:
        header: BundleHeaderProto.
        special: what to append to the entry of some variables.
        partitions: the slices that some variables are stored in, as a `Saver` stores variables made with a partitioner.
        shards: data files; what is stored goes to one after the other.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data = [bytearray() for _ in range(shards)]
    entries = {b"": header if shards == 1 else number(1, shards)}

    def store(key: bytes, array: np.ndarray, extra: bytes = b"") -> None:
        shard = len(entries) % shards
        entries[key] = entry(array, len(data[shard]), shard=shard, extra=extra)
        data[shard] += array.tobytes()

    for name, array in sorted(arrays.items()):
        pieces = (partitions or {}).get(name)
        if pieces is None:
            store(name.encode(), array, (special or {}).get(name, b""))
            continue
        entries[name.encode()] = whole(array, pieces)
        for piece in pieces:
            place = tuple(slice(None) if extent is None else slice(extent[0], sum(extent)) for extent in piece)
            store(slice_key(name, piece), np.ascontiguousarray(array[place]))
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries, compression=compression))
    return prefix


def _append(out: bytearray, block: bytes, compression: int) -> bytes:
    """Put a block at the end; gives its handle."""
    handle = varint(len(out)) + varint(len(block))
    stored = block + bytes([compression])
    out += stored + struct.pack("<I", masked(crc32c(stored)))
    return handle


def _block(entries: Mapping[bytes, bytes]) -> bytes:
    found, before = b"", b""
    for key, value in entries.items():
        shared = next((at for at, (a, b) in enumerate(zip(key, before, strict=False)) if a != b), min(len(key), len(before)))
        found += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    return found + struct.pack("<II", 0, 1)
