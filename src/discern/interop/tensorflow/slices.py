"""The parts of a partitioned variable: which piece of the array each one is, and under which key the index has it.

Reference: tensorflow/core/framework/tensor_slice.proto; tensorflow/core/util/saved_tensor_slice_util.cc for the keys, whose
numbers and text are in the encoding of tensorflow/core/lib/strings/ordered_code.cc: as bytes they sort as the values do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from discern.interop.tensorflow.wire import MalformedError, content, fields, number

PART_KEYS = b"\0"
"""What the key of every part begins with; the name of a variable never does."""

_WHOLE = -1
_SIGN = 1 << 63


@dataclass(frozen=True)
class Slice:
    """A piece of an array.

    Attributes:
        starts: first index along each axis.
        lengths: number of indices along each axis; -1: all.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def key(self, name: str) -> bytes:
        """Under which the index has this piece of a variable."""
        text = name.encode("utf-8").replace(b"\0", b"\0\xff") + b"\0\1"  # the byte 255 is escaped too, but UTF-8 has none
        pairs = zip(self.starts, self.lengths, strict=True)
        return PART_KEYS + text + _unsigned(len(self.starts)) + b"".join(_signed(each) for pair in pairs for each in pair)

    def within(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """The indices of the piece in an array of this shape.

        Raises:
            MalformedError: it is not inside.
        """
        if len(self.starts) != len(shape):
            raise MalformedError(f"a part with {len(self.starts)} axes of an array with {len(shape)}")
        found = []
        for start, length, size in zip(self.starts, self.lengths, shape, strict=True):
            stop = size if length == _WHOLE else start + length
            if not 0 <= start <= stop <= size:
                raise MalformedError(f"a part from {start:,} to {stop:,} along an axis of {size:,}")
            found.append(slice(start, stop))
        return tuple(found)

    def __str__(self) -> str:
        pairs = zip(self.starts, self.lengths, strict=True)
        return ", ".join(":" if length == _WHOLE else f"{start}:{start + length}" for start, length in pairs)


def read_slice(message: bytes) -> Slice:
    """Of a TensorSliceProto. An axis that the piece has all of says nothing.

    Raises:
        MalformedError: it is none.
    """
    axes = [dict(fields(content(extent))) for key, extent in fields(message) if key == 1]
    starts = tuple(_integer(axis.get(1, 0)) for axis in axes)
    return Slice(starts, tuple(_integer(axis[2]) if 2 in axis else _WHOLE for axis in axes))


def _integer(value: int | bytes) -> int:
    """A field of type int64: negative numbers stand in two's complement."""
    plain = number(value)
    return plain - 2 * _SIGN if plain >= _SIGN else plain


def _unsigned(value: int) -> bytes:
    """The number of bytes, then those, the highest first."""
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _signed(value: int) -> bytes:
    """Seven bits to a byte, the highest first, in two's complement; as many leading bits are flipped as there are bytes."""
    size = (value if value >= 0 else ~value).bit_length() // 7 + 1
    flipped = ((1 << size) - 1) << (7 * size)
    return ((value & ((1 << 8 * size) - 1)) ^ flipped).to_bytes(size, "big")
