"""A sorted table of keys and values, the format of leveldb's files, in which TensorFlow keeps the index of a checkpoint.

Reference: leveldb, doc/table_format.md. Blocks end with a byte that says how they are compressed and a masked CRC-32C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from discern.errors import CheckpointError
from discern.interop.tensorflow.crc32c import crc32c, unmasked
from discern.interop.tensorflow.wire import MalformedError, read_varint

_FOOTER, _TRAILER = 48, 5
_MAGIC = 0xDB4775248B80FB57
_PLAIN, _SNAPPY = 0, 1
# A key of a few bytes in the file can be as long as the one before it; what reading takes is bounded by this times the file.
_LONGEST_KEY = 4096
_AGAIN = "copy or download the checkpoint again, every file of it"


def read_table(path: Path) -> dict[bytes, bytes]:
    """All entries of a table, in order.

    Raises:
        CheckpointError: the file is missing, cut short, damaged or compressed, or no table.
    """
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}", hint=_AGAIN) from problem
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise CheckpointError(
            f"{path} ({len(data):,} bytes) does not end as the index of a TensorFlow checkpoint does: it is cut short, or "
            "something else",
            hint=_AGAIN,
        )
    try:
        _, at = _handle(data[-_FOOTER:], 0)
        index, _ = _handle(data[-_FOOTER:], at)
        blocks = [_handle(value, 0)[0] for _, value in _entries(_block(data, index, path))]
        if any(offset + size > following for (offset, size), (following, _) in pairwise(blocks)):
            raise MalformedError("its blocks are not one after the other")
        return {key: value for block in blocks for key, value in _entries(_block(data, block, path))}
    except (MalformedError, struct.error) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint=_AGAIN) from problem


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and where the handle ends."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _block(data: bytes, handle: tuple[int, int], path: Path) -> bytes:
    """The content of a block, once its checksum is right."""
    offset, size = handle
    end = offset + size + 1
    if end + 4 > len(data) - _FOOTER:
        raise CheckpointError(f"{path}: a block of {size:,} bytes at {offset:,} runs over the end", hint=_AGAIN)
    stated, found = unmasked(struct.unpack("<I", data[end : end + 4])[0]), crc32c(data[offset:end])
    if stated != found:
        raise CheckpointError(
            f"{path} is damaged: the block at byte {offset:,} has checksum {found:08x}, and {stated:08x} is stated", hint=_AGAIN
        )
    compression = data[end - 1]
    if compression == _SNAPPY:
        raise CheckpointError(
            f"{path} is compressed with snappy, which TensorFlow reads and discern does not",
            hint="write the checkpoint again with tf.compat.v1.train.Saver, which does not compress",
        )
    if compression != _PLAIN:
        raise MalformedError(f"a block is compressed in an unknown way ({compression})")
    return data[offset : end - 1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; each key states how much of the one before it begins with."""
    (restarts,) = struct.unpack("<I", block[-4:])
    end = len(block) - 4 * (restarts + 1)
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        size, at = read_varint(block, at)
        if shared > len(key) or at + own + size > end:
            raise MalformedError("an entry runs over the end of its block")
        if shared + own > _LONGEST_KEY:
            raise MalformedError(f"a name of {shared + own:,} bytes, expected {_LONGEST_KEY:,} at most")
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + size]
        at += size
