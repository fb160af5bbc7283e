"""Web archives: the text of WET files, and what is left out or damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from discern.data.sources.documents import ProblemLog
from discern.errors import DataError
from tests.data.small_text import read


def record(content: bytes, kind: str = "conversion", media: str = "text/plain") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


PAGES = [
    b"First page.\nOf two lines.\n\nAnd one more.",
    "Zweite Seite: größer.".encode(),
    b"WARC/1.0\r\nis only text\r\n\r\nhere",
]
EXPECTED = [["First page.", "Of two lines.", "And one more."], ["Zweite Seite: größer."], ["WARC/1.0", "is only text", "here"]]
INFO = record(b"Software-Info: x\r\n", "warcinfo", "application/warc-fields")


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "a member for each record"])
def test_the_pages_of_a_wet_file(tmp_path: Path, compressed: bool) -> None:
    records = [INFO, *map(record, PAGES)]
    content = b"".join(map(gzip.compress, records)) if compressed else b"".join(records)
    (tmp_path / "CC-MAIN.warc.wet.gz").write_bytes(content)
    problems = ProblemLog()
    assert read(tmp_path / "CC-MAIN.warc.wet.gz", problems=problems) == EXPECTED
    assert not problems.summary()


def test_other_records_are_left_out_and_reported(tmp_path: Path) -> None:
    html = record(b"HTTP/1.1 200 OK\r\n\r\n<p>" * 100_000, "response", "application/http; msgtype=response")
    (tmp_path / "a.warc").write_bytes(INFO + html + record(PAGES[0]) + record(b"bad \xff byte"))
    problems = ProblemLog()
    assert read(tmp_path / "a.warc", problems=problems) == [EXPECTED[0], ["bad \ufffd byte"]]
    kinds = [problem.kind for problem in problems.summary()]
    assert kinds == ["record skipped, as it is not plain text; WET files have the text of pages", "invalid UTF-8, replaced"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (record(PAGES[0])[:-20], "record 1 is cut short"),
        (record(PAGES[0]) + b"no record\r\n", "expected a WARC record, found b'no record"),
        (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n", "no Content-Length"),
        (b"WARC/1.0\r\n" + b"X-Long: y\r\n" * 10_000, "a WARC header of more than"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.wet").write_bytes(content)
    with pytest.raises(DataError, match=says):
        read(tmp_path / "a.wet")
