"""The two encodings that an index consists of: varints, and fields of protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


class MalformedError(ValueError):
    """Bytes that are none of these encodings; whoever knows the file makes an error of it."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 64 bits at most, seven to a byte, and where it ends.

    Raises:
        MalformedError: it doesn't end.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedError("a number runs over the end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise MalformedError("a number of more than 64 bits")


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protocol buffer, in order.

    Raises:
        MalformedError: it is none.
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
            raise MalformedError(f"a field of kind {kind}")
        content = message[at : at + size]
        at += size
        if len(content) < size:
            raise MalformedError("a field runs over the end")
        yield number, content if kind == _BYTES else struct.unpack("<I" if size == 4 else "<Q", content)[0]


def number(value: int | bytes) -> int:
    """A field that must be a number."""
    if not isinstance(value, int):
        raise MalformedError("bytes where a number belongs")
    return value


def content(value: int | bytes) -> bytes:
    """A field that must be bytes."""
    if not isinstance(value, bytes):
        raise MalformedError("a number where bytes belong")
    return value
