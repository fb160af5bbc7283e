"""Reads sorted tables of keys and values in LevelDB's format, which TensorFlow uses for the index of a checkpoint.

Each block is followed by a byte for the kind of compression and a masked CRC-32C.

Reference: leveldb, doc/table_format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import google_crc32c

from discern.errors import CheckpointError

_FOOTER, _TRAILER = 48, 5
_MAGIC = 0xDB4775248B80FB57
_PLAIN, _SNAPPY = 0, 1
# A key shares a prefix with the previous one, so a few bytes in the file can expand to a long key. This bounds the memory used.
_LONGEST_KEY = 4096
_AGAIN = "copy or download the checkpoint again, with all its files"
_CHECKSUM_MASK = 0xA282EAD8

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


class MalformedError(ValueError):
    """The bytes are not in the expected encoding. Callers that know the file turn it into a `CheckpointError`."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number of at most 64 bits, seven per byte; returns it and the position after it.

    Raises:
        MalformedError: the number has no end.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedError("a number extends beyond the end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise MalformedError("a number has more than 64 bits")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protocol buffer, in order.

    Raises:
        MalformedError: the message is not a protocol buffer.
    """
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = read_varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = read_varint(message, at)
        elif kind in (_FOUR_BYTES, _EIGHT_BYTES):
            size = 4 if kind == _FOUR_BYTES else 8
        else:
            raise MalformedError(f"a field has the unknown wire type {kind}")
        content = message[at : at + size]
        at += size
        if len(content) < size:
            raise MalformedError("a field extends beyond the end")
        yield number, content if kind == _BYTES else struct.unpack("<I" if size == 4 else "<Q", content)[0]


def number(value: int | bytes) -> int:
    """The value of a field that must be a number."""
    if not isinstance(value, int):
        raise MalformedError("a field contains bytes, expected a number")
    return value


def content(value: int | bytes) -> bytes:
    """The value of a field that must be bytes."""
    if not isinstance(value, bytes):
        raise MalformedError("a field contains a number, expected bytes")
    return value


def checksum(data: bytes) -> int:
    """CRC-32C of the data."""
    found: int = google_crc32c.value(data)
    return found


def unmasked(stored: int) -> int:
    """The checksum for its masked form. Files store it masked, because a CRC of data that contains CRCs is weak."""
    rotated = (stored - _CHECKSUM_MASK) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def read_table(path: Path) -> dict[bytes, bytes]:
    """All entries of a table, in order.

    Raises:
        CheckpointError: the file is missing, truncated, damaged or compressed, or is not a table.
    """
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}", hint=_AGAIN) from problem
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise CheckpointError(
            f"{path} ({len(data):,} bytes) does not end as the index of a TensorFlow checkpoint does: it is truncated, or "
            "another kind of file",
            hint=_AGAIN,
        )
    try:
        _, at = _handle(data[-_FOOTER:], 0)
        index, _ = _handle(data[-_FOOTER:], at)
        blocks = [_handle(value, 0)[0] for _, value in _entries(_block(data, index, path))]
        if any(offset + size > following for (offset, size), (following, _) in pairwise(blocks)):
            raise MalformedError("its blocks overlap or are out of order")
        return {key: value for block in blocks for key, value in _entries(_block(data, block, path))}
    except (MalformedError, struct.error) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint=_AGAIN) from problem


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the position after the handle."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _block(data: bytes, handle: tuple[int, int], path: Path) -> bytes:
    """The content of a block, after its checksum was verified."""
    offset, size = handle
    end = offset + size + 1
    if end + 4 > len(data) - _FOOTER:
        raise CheckpointError(f"{path}: a block of {size:,} bytes at {offset:,} extends beyond the end", hint=_AGAIN)
    stated, found = unmasked(struct.unpack("<I", data[end : end + 4])[0]), checksum(data[offset:end])
    if stated != found:
        raise CheckpointError(
            f"{path} is damaged: the block at byte {offset:,} has checksum {found:08x}, expected {stated:08x}", hint=_AGAIN
        )
    compression = data[end - 1]
    if compression == _SNAPPY:
        raise CheckpointError(
            f"{path} is compressed with Snappy, which discern does not support",
            hint="save the checkpoint again with tf.compat.v1.train.Saver, which does not compress it",
        )
    if compression != _PLAIN:
        raise MalformedError(f"a block has the unknown compression type {compression}")
    return data[offset : end - 1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block. A key is stored as the length of the prefix it shares with the previous key, and the
    rest."""
    (restarts,) = struct.unpack("<I", block[-4:])
    end = len(block) - 4 * (restarts + 1)
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        size, at = read_varint(block, at)
        if shared > len(key) or at + own + size > end:
            raise MalformedError("an entry extends beyond the end of its block")
        if shared + own > _LONGEST_KEY:
            raise MalformedError(f"a name has {shared + own:,} bytes, expected at most {_LONGEST_KEY:,}")
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + size]
        at += size
