"""Small files that hold gigabytes: skipped quickly or refused, naming the file and the limit, with bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from discern.data.sources import streams as expansion_module
from discern.data.sources.documents import Limits, ProblemLog
from discern.data.sources.formats import text_lines
from discern.data.sources.streams import FREE_BYTES, LARGEST_RATIO, Expansion
from discern.data.tables import numbered_lines, whole_text
from discern.errors import DataError
from tests.data.small_text import read, tar_of

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}
SECONDS = 20
"""On a machine that is busy with other things; what is refused or skipped here took minutes."""


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs of a few megabytes instead of gigabytes."""
    monkeypatch.setattr(expansion_module, "FREE_BYTES", 1 << 18)


def test_what_may_come_out_grows_with_what_was_read() -> None:
    expansion = Expansion("file")
    expansion.count_made(FREE_BYTES, 1)
    expansion.count_read(100)
    expansion.count_made(100 * LARGEST_RATIO, 1)
    expansion.count_made(FREE_BYTES, 2)
    with pytest.raises(
        DataError, match=r"^file decompresses to too much data: .* came out of 100, and the limit is 250 times"
    ) as caught:
        expansion.count_made(1, 1)
    assert "decompress it" in (caught.value.hint or "")


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("filling", [b"\n", b"\0", b"x", b" \r\n", b'{"text": "a"}\n'])
@pytest.mark.usefixtures("small_limits")
def test_bombs_are_refused(tmp_path: Path, compression: str, filling: bytes) -> None:
    compress = COMPRESS[compression]
    content = filling * ((1 << 20) // len(filling))
    if compression == "gz":  # deflate ends at about 1,000:1
        content = compress(content)
    path = tmp_path / "bomb"
    path.write_bytes(compress(content))
    with pytest.raises(DataError, match=f"{path} decompresses to too much data"):
        read(path)


@pytest.mark.usefixtures("small_limits")
def test_bombs_in_archives_and_archives_of_bombs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "nested").write_bytes(lzma.compress(bz2.compress(gzip.compress(bytes(2 << 20)))))
    with pytest.raises(DataError, match=r"nested decompresses to too much data"):
        read(tmp_path / "nested")
    (tmp_path / "tar.xz").write_bytes(lzma.compress(tar_of({f"{n}.txt": b"\n" * (300 << 10) for n in range(5)})))
    with pytest.raises(DataError, match=r"tar\.xz decompresses to too much data"):
        read(tmp_path / "tar.xz")


@pytest.mark.usefixtures("small_limits")
def test_a_sparse_member_is_no_terabyte_of_zeros(tmp_path: Path) -> None:
    member = tarfile.TarInfo("sparse.txt")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"00000000000\0", b"00000000000\0"  # a hole from the start
    header[483:495] = b"77777777777\0"  # of 8 GiB
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header[:512])
    (tmp_path / "holes.tar").write_bytes(bytes(header) + bytes(1024))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"holes\.tar decompresses to too much data"):
        read(tmp_path / "holes.tar")
    assert time.monotonic() - began < SECONDS


def test_empty_lines_are_skipped_quickly() -> None:
    bomb = zstandard.compress(b"one\n\n" + b"\n \t\r\n" * (4 << 20) + b"two\n\n\nthree")
    began = time.monotonic()
    decompress = decompressor(bomb)
    assert decompress is not None
    batches = list(text_lines(decompress(io.BytesIO(bomb)), "bomb", ProblemLog()))
    assert time.monotonic() - began < SECONDS
    assert sum(len(batch.lines) for batch in batches) < 1000
    assert [line.strip() for batch in batches for line in batch.lines if line.strip()] == ["one", "two", "three"]


def test_blank_lines_in_a_row_part_documents_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\n\n\n \n\t\n\nb\nc\n\n\n\n" + "\n" * 100)
    assert read(tmp_path / "text") == [["a"], ["b", "c"]]


def test_empty_lines_between_records_are_skipped_quickly_and_counted(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b'{"text": "a"}\n' + b"\n" * (1 << 20) + b'not json\n{"text": "b"}')
    problems = ProblemLog()
    assert read(tmp_path / "records", problems=problems) == [["a"], ["b"]]
    assert "line 1,048,578" in str(problems.summary()[0])


def test_a_document_of_very_short_lines_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x\n" * (1 << 13))
    from discern.data.sources.documents import CorpusOptions

    found = read(tmp_path / "text", options=CorpusOptions(limits=Limits(document=1 << 13)))
    assert [len(document) for document in found] == [1 << 10] * 8


def test_deep_json_is_a_line_left_out(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a"}), '{"text": ' + "[" * 100_000, '{"text": ' + "9" * 5000 + "}", json.dumps({"text": "b"})]
    (tmp_path / "records").write_text("\n".join(lines))
    problems = ProblemLog()
    assert read(tmp_path / "records", problems=problems) == [["a"], ["b"]]
    assert problems.summary()[0].count == 2


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("form", ["repeated", "one value", "empty rows"])
def test_parquet_bombs_are_refused(tmp_path: Path, form: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "repeated": arrow.array(["x" * 10_000] * 1000).dictionary_encode(),
        "one value": arrow.array(["y" * (4 << 20)]),
        "empty rows": arrow.nulls(100_000, arrow.string()),
    }
    path = tmp_path / "bomb.parquet"
    parquet.write_table(arrow.table({"text": columns[form]}), path, compression="zstd")
    assert path.stat().st_size < 4000
    with pytest.raises(DataError, match=r"bomb\.parquet decompresses to too much data"):
        read(path)


def test_rows_of_a_dictionary_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"Text {number % 7}." for number in range(5000)]
    parquet.write_table(arrow.table({"text": texts, "n": list(range(5000))}), tmp_path / "a", row_group_size=1200)
    assert read(tmp_path / "a") == [[text] for text in texts]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("compression", ["xz", "zst", "bz2"])
def test_task_files_are_bounded_too(tmp_path: Path, compression: str) -> None:
    (tmp_path / "bomb").write_bytes(COMPRESS[compression](b"\n" * (1 << 20)))
    for reader in (lambda path: list(numbered_lines(path)), whole_text):
        with pytest.raises(DataError, match="bomb decompresses to too much data"):
            reader(tmp_path / "bomb")


def test_a_task_file_compressed_over_and_over_is_refused(tmp_path: Path) -> None:
    content = b"text"
    for _ in range(9):
        content = gzip.compress(content)
    (tmp_path / "again").write_bytes(content)
    with pytest.raises(DataError, match="compressed more than 8 times"):
        whole_text(tmp_path / "again")
