"""Writes TensorFlow checkpoints by the description of the format, so that tests can have any, also ones that are wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from discern.interop.tensorflow.crc32c import crc32c

TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}
MAGIC = 0xDB4775248B80FB57


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


def entry(array: np.ndarray, offset: int, *, dtype: int | None = None, extra: bytes = b"") -> bytes:
    """A BundleEntryProto."""
    data = array.tobytes()
    shape = b"".join(message(2, number(1, size)) for size in array.shape)
    checksum = varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(data)))
    kind = number(1, TYPES[array.dtype.name] if dtype is None else dtype)
    return kind + message(2, shape) + number(4, offset) + number(5, len(data)) + checksum + extra


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
) -> Path:
    """A checkpoint of one data file.

    Args:
        header: BundleHeaderProto.
        special: what to append to the entry of some variables.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data, entries = bytearray(), {b"": header}
    for name, array in sorted(arrays.items()):
        entries[name.encode()] = entry(array, len(data), extra=(special or {}).get(name, b""))
        data += array.tobytes()
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(data)
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
