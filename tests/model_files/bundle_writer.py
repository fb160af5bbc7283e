"""Writes TensorFlow checkpoints by the description of the format, so that tests can have any, also ones that are wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np

TYPES = {"float32": 1, "int64": 9, "float16": 19}
MAGIC = 0xDB4775248B80FB57


def checksum(data: bytes) -> bytes:
    """As files state it: masked. Reference: leveldb, doc/log_format.md."""
    found = google_crc32c.value(data)
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    """Seven bits to a byte, the lowest first."""
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


def number(key: int, value: int) -> bytes:
    """A field that is a number."""
    return varint(key << 3) + varint(value)


def message(key: int, content: bytes) -> bytes:
    """A field that is a message."""
    return varint(key << 3 | 2) + varint(len(content)) + content


def shape_field(*sizes: int) -> bytes:
    """The shape in a BundleEntryProto."""
    return message(2, b"".join(message(2, number(1, size)) for size in sizes))


def write_bundle(
    prefix: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    compression: int = 0,
    special: Mapping[str, bytes] = {},
) -> Path:
    """A checkpoint.

    Args:
        shards: data files; the arrays go to one after the other.
        special: what to append to the entries of some variables, or ("") to the header. A later field replaces an earlier one.
    """
    data, entries = [b""] * shards, {b"": number(1, shards) + special.get("", b"")}
    for at, (name, array) in enumerate(sorted(arrays.items())):
        shard, content = at % shards, array.tobytes()
        place = number(3, shard) + number(4, len(data[shard])) + number(5, len(content))
        entry = number(1, TYPES[array.dtype.name]) + shape_field(*array.shape) + place + varint(6 << 3 | 5) + checksum(content)
        entries[name.encode()] = entry + special.get(name, b"")
        data[shard] += content
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
    prefix.with_name(f"{prefix.name}.index").write_bytes(_table(entries, compression))
    return prefix


def _table(entries: Mapping[bytes, bytes], compression: int) -> bytes:
    """A sorted table, in blocks of seven entries."""
    out, index, keys = b"", {}, sorted(entries)

    def append(block: Mapping[bytes, bytes], compression: int = 0) -> bytes:
        """Put a block at the end; gives its handle. No key shares bytes with the one before it."""
        nonlocal out
        rows = (b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in block.items())
        content = b"".join(rows) + struct.pack("<II", 0, 1)
        handle = varint(len(out)) + varint(len(content))
        content += bytes([compression])
        out += content + checksum(content)
        return handle

    for begin in range(0, len(keys), 7):
        part = keys[begin : begin + 7]
        index[part[-1]] = append({key: entries[key] for key in part}, compression)
    footer = append({}) + append(index)
    return out + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)
