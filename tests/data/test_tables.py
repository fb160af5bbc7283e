"""Tables of one's own: every format, and every fault with the place of it."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pytest

from discern.data.tables import TEXT_NAMES, TableFormat, open_table
from discern.errors import ConfigError, DataError
from discern.tasks.base import ClassificationExample, Layout, Reading
from discern.tasks.rows import choose_column, read_texts
from tests.tasks.data_folder import write

TEXTS = [('great, "really"', "good"), ("a waste\nof time", "bad"), ("naïve 中文", "good")]


def stars(path: Path) -> Reading[ClassificationExample]:
    return read_texts(path, Layout({"text": ("review",), "label": ("stars",)}), ())


def test_a_pipe_is_read_from_its_first_byte() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"review,stars\n" + b"".join(b"text number %d,good\n" % number for number in range(500)))
    os.close(writing)
    found = [row.values["review"] for row in open_table(Path(f"/dev/fd/{reading}"), "csv").rows]
    os.close(reading)
    assert found == [f"text number {number}" for number in range(500)]


def rows(path: Path, format: TableFormat | None = None) -> list[tuple[str, object]]:
    return [(row.values["review"], row.values["stars"]) for row in open_table(path, format).rows]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    records = [{"review": text, "stars": label} for text, label in TEXTS]
    csv = '\ufeffreview,stars\r\n"great, ""really""",good\r\n"a waste\nof time",bad\r\n\r\nnaïve 中文,good'
    (tmp_path / "a.csv").write_bytes(csv.encode())
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(csv.encode()))
    (tmp_path / "b.csv").write_bytes(csv.replace('really""",', 'really""";').replace("review,stars", "review;stars")
                                     .replace('time",', 'time";').replace("中文,", "中文;").encode())  # fmt: skip
    write(tmp_path / "a.jsonl", *[json.dumps(record) for record in records])
    write(tmp_path / "a.json", json.dumps(records, indent=1))
    for name in ("a.csv", "a.csv.gz", "b.csv", "a.jsonl", "a.json"):
        assert rows(tmp_path / name) == TEXTS, name
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.data")
    assert rows(tmp_path / "a.data") == TEXTS


def test_tsv_takes_quotes_as_text_unless_a_field_is_quoted_as_a_spreadsheet_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "review\tstars", '"open\t1', '"said ""yes"""\t2', 'a "b" c\t3', '"a" and "b"\t4')
    assert [text for text, _ in rows(path)] == ['"open', 'said "yes"', 'a "b" c', '"a" and "b"']


def test_standard_input_and_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "", "One, two.", "", "Three.", "", "")
    assert [row.values["text"] for row in open_table(path).rows] == ["", "One, two.", "", "Three."], "aligned with the lines"

    class Standard:
        buffer = io.BytesIO(b'{"text": "x"}\n{"text": "y"}\n')

    monkeypatch.setattr("sys.stdin", Standard)
    table = open_table(Path("-"))
    assert [row.values["text"] for row in table.rows] == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('review,stars\n"never closed,1\nnext,2\n', r"a\.csv:2: unbalanced quotation marks .* detected in line 3"),
        ("review,stars\nfine,1\na \rfilm,1\n", r"a\.csv:3: .* a carriage return in the row that begins here"),
        ("review,stars\rfine,1\rpoor,2\r", r"a\.csv:1: .* a carriage return in the row that begins here"),
        ('review,stars\n"' + 11 * ("x" * 999_999 + "\n"), r"a\.csv:2: unbalanced .* detected in line 1[12]"),
        ("review,stars\na;1\n", r"a\.csv:2: 1 fields, but .*\n.*fields are separated by ','"),
        ("review,stars\na,b,1\n", r"a\.csv:2: 3 fields, but the header has 2 \(review, stars\)"),
        ("review,stars\n,1\n", r"a\.csv:2: 'review' is empty"),
        ("review,stars\nfine,\n", r"a\.csv:2: 'stars' is empty"),
        ("review,review\nfine,1\n", "two columns are named 'review'"),
        ("review,stars\n", "a header but no rows"),
        ("", "is empty"),
    ],
)
def test_faults_of_a_csv_file_name_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    with pytest.raises(DataError, match=message) as error:
        stars(tmp_path / "a.csv")
    assert error.value.hint


@pytest.mark.parametrize("name", ["Review", "words"])
def test_the_column_of_texts_is_chosen_by_its_name_or_its_content(tmp_path: Path, name: str) -> None:
    table = open_table(
        write(tmp_path / "a.csv", f"id,{name},kind", *[f"a{row},Some words of row {row},good" for row in range(9)])
    )
    assert choose_column(table, "text", TEXT_NAMES) == name
    assert len(list(table.rows)) == 9


def test_other_encodings_are_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("review,stars\nfine,1\ncafé,2\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"a\.csv:3: not UTF-8: byte 0xe9\n.*iconv -f windows-1252 -t UTF-8 a\.csv"):
        rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes("review,stars\nfine,1\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"(?s)not UTF-8.*it may be utf-16"):
        rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"PK\x03\x04\x00\x00")
    with pytest.raises(DataError, match="spreadsheet"):
        rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"review,stars\n" + 10_000 * b"fine,1\n" + b"\0,1\n")
    with pytest.raises(DataError, match="NUL"):
        rows(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(DataError, match=r"Git LFS pointer.*\n.*git lfs pull"):
        rows(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"review": "x", "stars": 1}', '{"review": "x", "stars"'], r"a\.jsonl:2: not JSON"),
        (['{"review": "x", "stars": 1}', "[1]"], r"a\.jsonl:2: list instead of an object"),
        (['{"review": "x", "stars": 1}', '{"reviw": "x", "stars": 1}'], r"a\.jsonl:2: no 'review'"),
        (['{"review": null, "stars": 1}'], r"a\.jsonl:1: 'review' is empty"),
        (['{"review": ["x"], "stars": 1}'], r"a\.jsonl:1: 'review' is a list, expected a text"),
    ],
)
def test_faults_of_json_lines_name_the_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        stars(write(tmp_path / "a.jsonl", *lines))


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        open_table(tmp_path / "a.csv", "jsonll")
    with pytest.raises(DataError, match="cannot be read"):
        open_table(tmp_path / "missing.csv")
