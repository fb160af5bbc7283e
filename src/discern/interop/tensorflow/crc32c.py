"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, fast enough for gigabytes.

A CRC is linear over bits: appending zeros to a message is a 32 x 32 matrix on its register, and registers of parts add up by
exclusive or. So many words are taken at once, each as a message of its own, and brought together at the end.

Reference: RFC 3720, appendix B.4 (check values); the mask: leveldb, doc/log_format.md.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # bits reversed
_ALL = 0xFFFFFFFF
_MASK = 0xA282EAD8
_LANES = 1 << 14

Words = NDArray[np.uint32]


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of some bytes."""
    length = len(data)
    if length < 4:
        return _bit_by_bit(data)
    lanes = min(_LANES, 1 << (length // 4).bit_length())
    width = 4 * lanes
    # Zeros in front of a message change nothing, as the register begins at zero here; the ones that it should begin with are
    # instead added to the first four bytes.
    prefix = (length - 1) % width + 1
    if prefix < 4:
        prefix += width
    begin = np.zeros(-(-prefix // width) * width, np.uint8)
    begin[begin.size - prefix :] = np.frombuffer(data, np.uint8, prefix)
    begin[begin.size - prefix :][:4] ^= 0xFF
    rows = [*begin.view("<u4").reshape(-1, lanes), *np.frombuffer(data, "<u4", offset=prefix).reshape(-1, lanes)]
    registers: Words = rows[0]
    for row in rows[1:]:
        registers = _shifted(registers, width) ^ row
    while registers.size > 1:
        half = registers.size // 2
        registers = _shifted(registers[:half], 4 * half) ^ registers[half:]
    return int(_shifted(registers, 4)[0]) ^ _ALL


def unmasked(stored: int) -> int:
    """The checksum that a file states in masked form, as a checksum of data that holds checksums is of little use otherwise."""
    rotated = (stored - _MASK) & _ALL
    return (rotated >> 17 | rotated << 15) & _ALL


def _bit_by_bit(data: bytes | memoryview) -> int:
    register = _ALL
    for byte in bytes(data):
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register ^ _ALL


def _shifted(registers: Words, num_bytes: int) -> Words:
    """The registers after so many zero bytes more, a power of two."""
    low, high = _tables(num_bytes)
    shifted: Words = low[registers & 0xFFFF] ^ high[registers >> 16]
    return shifted


@lru_cache(maxsize=32)
def _tables(num_bytes: int) -> tuple[Words, Words]:
    """What each value of a register's lower and upper half becomes."""
    images = _images(num_bytes)
    return _spanned(images[:16]), _spanned(images[16:])


@lru_cache(maxsize=32)
def _images(num_bytes: int) -> tuple[int, ...]:
    """What each bit of a register becomes, from the lowest on."""
    if num_bytes > 1:
        half = _images(num_bytes // 2)
        return tuple(_applied(half, image) for image in half)
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    images = one_bit
    for _ in range(7):
        images = tuple(_applied(one_bit, image) for image in images)
    return images


def _applied(images: tuple[int, ...], register: int) -> int:
    result = 0
    for bit, image in enumerate(images):
        if register >> bit & 1:
            result ^= image
    return result


def _spanned(images: tuple[int, ...]) -> Words:
    """The exclusive or of the images of the bits of each number, 0 to 65,535."""
    table = np.zeros(1 << 16, np.uint32)
    for bit, image in enumerate(images):
        table[1 << bit : 2 << bit] = table[: 1 << bit] ^ np.uint32(image)
    return table
