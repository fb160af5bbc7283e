"""Limits on decompression: a few kilobytes can expand to terabytes of zeros or empty lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from discern.data.streams import Readable
from discern.errors import DataError

FREE_BYTES = 1 << 26
"""What any file may expand to."""
LARGEST_RATIO = 250
"""Bytes that may come out of each byte read, beyond that. Text compresses 3 to 10 times, logs and markup up to 100 times."""


class Expansion:
    """What one file was found to hold, against its size as stored, in each layer of compression and archives.

    Args:
        name: of the file, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._read = 0
        self._made: Counter[int] = Counter()

    def count_read(self, count: int) -> None:
        """`count` more bytes of the file were read."""
        self._read += count

    def count_made(self, count: int, layer: int) -> None:
        """`count` more bytes came out.

        Args:
            layer: how many decompressors and archives they came through.

        Raises:
            DataError: it is more than text ever compresses to.
        """
        self._made[layer] += count
        if self._made[layer] > FREE_BYTES + LARGEST_RATIO * self._read:
            raise DataError(
                f"{self._name} decompresses to too much data: {self._made[layer]:,} bytes came out of "
                f"{self._read:,}, and the limit is {LARGEST_RATIO} times the bytes read and {FREE_BYTES >> 20} MiB",
                hint="if it holds real text, decompress it first and pass the result",
            )

    def watched(self, stream: Readable, layer: int) -> Readable:
        """A stream that a decompressor or an archive gives, its bytes counted."""
        return CountingStream(stream, lambda count: self.count_made(count, layer))


class CountingStream:
    """Reports how many bytes are read from a stream."""

    def __init__(self, stream: Readable, report: Callable[[int], None]) -> None:
        self._stream = stream
        self._report = report

    def read(self, size: int = -1, /) -> bytes:
        """As of the stream beneath; all of it comes in pieces, which are reported one by one."""
        if size < 0:
            return b"".join(iter(lambda: self.read(1 << 20), b""))
        data = self._stream.read(size)
        self._report(len(data))
        return data
