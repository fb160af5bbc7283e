"""The checksum against published values, and against its definition."""

from __future__ import annotations

import random

import pytest

from discern.interop.tensorflow.crc32c import _LANES, crc32c, unmasked
from tests.interop.bundle_writer import masked


def by_definition(data: bytes) -> int:
    """One bit after the other."""
    register = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            carry = (register ^ byte >> bit) & 1
            register = register >> 1 ^ 0x82F63B78 * carry
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of every catalogue of CRCs
        (bytes(32), 0x8A9136AA),  # RFC 3720, appendix B.4, and the next three
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize("length", [*range(40), *(4 * _LANES + extra for extra in (-1, 0, 1, 3, 4, 5)), 8 * _LANES + 2])
def test_every_length_agrees_with_the_definition(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert crc32c(data) == crc32c(memoryview(data)) == by_definition(data)


def test_one_bit_anywhere_changes_it() -> None:
    data = bytearray(random.Random(0).randbytes(300))
    whole = crc32c(bytes(data))
    for at in (0, 3, 4, 150, 299):
        data[at] ^= 0x10
        assert crc32c(bytes(data)) != whole
        data[at] ^= 0x10


@pytest.mark.parametrize("checksum", [0, 1, 0xE3069283, 0xFFFFFFFF])
def test_the_mask_comes_off(checksum: int) -> None:
    assert unmasked(masked(checksum)) == checksum
    assert masked(checksum) != checksum
