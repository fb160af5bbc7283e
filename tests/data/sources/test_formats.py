"""Every kind of file is recognized by its content, read or refused by name; damage is told."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import zipfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import zstandard

from discern.data.sources import formats, streams
from discern.data.sources.documents import CorpusOptions, ProblemLog
from discern.data.tables import open_table
from discern.errors import ConfigError, DataError
from tests.data.small_text import read, tar_of
from tests.data.sources.test_corpus import TEXT, TWO, WIKI

WIKI_DOCUMENTS = [["Fish & Chips", "They are <fried>.", "A second paragraph."], ["Tea", "It is hot."]]
ROWS = ["The film was fine and long.", "A dull evening, with nobody in it.", "We liked it very much."]
PAGE = "<!doctype html><html><head><script>var a = 1;</script></head><body><p>The old town lies by the sea.</p></body></html>"
MANY = tar_of({f"{n}.txt": b"Some text.\n" * 80 for n in range(20)})
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}


def json_lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def parquet_of(columns: dict[str, list]) -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(arrow.table(columns), buffer)
    return buffer.getvalue()


def npy_of(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def warc(content: bytes, kind: str = "conversion", media: str = "text/plain") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("content", ["text", "wiki", "json", "tar", "zip", "parquet", "warc"])
def test_content_decides_whatever_the_name(tmp_path: Path, compression: str, content: str) -> None:
    info = warc(b"Software-Info: x\r\n", "warcinfo", "application/warc-fields")
    raw, expected = {
        "text": (TEXT, TWO),
        "wiki": (WIKI, WIKI_DOCUMENTS),
        "json": (json_lines("One.\n\nTwo.", "Three."), [["One.", "Two."], ["Three."]]),
        "tar": (tar_of({"b/x": TEXT, "a": gzip.compress(WIKI), ".h": TEXT}), TWO + WIKI_DOCUMENTS),
        "zip": (zip_of({"b/x": TEXT, "a": tar_of({"c": WIKI}), "b/.h": TEXT}), TWO + WIKI_DOCUMENTS),
        "parquet": (parquet_of({"id": [1, 2], "body": ["One.\nTwo.", "Three."]}), [["One.", "Two."], ["Three."]]),
        "warc": (info + warc(b"One.\n\nTwo.") + warc(b"WARC/1.0\r\nis text"), [["One.", "Two."], ["WARC/1.0", "is text"]]),
    }[content]
    file = tmp_path / "misleading.png"
    file.write_bytes(COMPRESS[compression](raw))
    problems = ProblemLog()
    assert read(file, problems=problems) == expected
    assert problems.summary() == ()
    if content in ("tar", "zip"):
        assert read(file, options=CorpusOptions(exclude=("b/*",))) == WIKI_DOCUMENTS


def test_a_hub_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_bytes(json_lines("One.\nTwo.", "Three."))
    assert read(f"hf:{tmp_path / 'rows'}") == [["One.", "Two."], ["Three."]]
    with pytest.raises(DataError, match=r"(?s)cannot be read.*the form is hf:NAME"):
        read(f"hf:{tmp_path / 'absent'}")


@pytest.mark.parametrize(
    ("encoding", "text", "said"),
    [
        ("latin-1", "Der Käse und die Bäckerei waren schön.", "windows-1252"),
        ("cp1252", "Il a dit « l’été à la forêt », où j’étais.", "windows-1252"),
        ("cp1251", "Привет, мир! Сегодня хорошая погода.", "windows-1251"),
        ("gb18030", "今天天气很好，我们去公园散步。", "gb18030"),
        ("utf-16", "Привет, мир!", "utf-16"),
        ("utf-32", "A long way.", "utf-32"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_the_encoding_is_detected_and_said_once(tmp_path: Path, encoding: str, text: str, said: str, name: str) -> None:
    line = {"a.txt": text, "a.csv": f'1,"{text}"', "a.jsonl": json.dumps({"text": text}, ensure_ascii=False)}[name]
    content = ("id,text\n" if name == "a.csv" else "") + f"{line}\n" * 5000
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content.encode(encoding))
    problems = ProblemLog()
    assert [line for document in read(tmp_path, problems=problems) for line in document] == [text] * 10_000
    assert f"read as {said} (detected): {tmp_path}/1/{name}; --encoding NAME to choose another" in problems.notes
    assert sum("detected" in note for note in problems.notes) == 1
    assert problems.summary() == ()


def test_the_encoding_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("Привет.\n".encode("utf-16-le"))
    (tmp_path / "b").write_bytes(TEXT + b"." * 2_000_000 + b"\0")
    for name in "ab":
        with pytest.raises(DataError, match=r"(?s)NUL bytes.*--encoding utf-16-le"):
            read(tmp_path / name)
    assert read(tmp_path / "a", options=CorpusOptions(encoding="utf-16-le")) == [["Привет."]]
    (tmp_path / "late").write_bytes(b"A line.\n" * 10_000 + "Ein schöner Käse.\n".encode("latin-1"))
    problems = ProblemLog()
    read(tmp_path / "late", problems=problems)
    assert str(problems.summary()[0]) == f"invalid UTF-8, replaced: 2 ({tmp_path / 'late'}:10001, ...)"
    with pytest.raises(ConfigError, match=r"(?s)unknown encoding 'utf-99'.*--encoding takes"):
        read(tmp_path / "a", options=CorpusOptions(encoding="utf-99"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes(range(256)) * 10, "NUL"),
        (bytes(range(128, 256)) * 10, "not UTF-8"),
        (zip_of({"[Content_Types].xml": b"x", "word/document.xml": b"x"}), "a Word document"),
        (zip_of({"xl/workbook.xml": b"x"}), "an Excel workbook"),
        (zip_of({"mimetype": b"application/vnd.oasis.opendocument.text"}), "an OpenDocument file"),
        (b'<?xml version="1.0"?>\n<dump>', "XML"),
        (b"%PDF-1.4\n1 0 obj\n\xe2\xe3\xcf\xd3", "PDF"),
        (b"%!PS-Adobe-3.0\n", "PostScript"),
        (b"{\\rtf1\\ansi Text.}", "RTF"),
        (b"% a comment\n\\documentclass{article}\n", "LaTeX"),
        (b"From a@b.org Mon Jan  1 00:00:00 2001\nSubject: x\n", "mailbox"),
        (b"#!/usr/bin/env python\nprint()\n", "program"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b'{\n "version": 1,\n "data": []\n}', "one JSON object"),
    ],
)
def test_what_is_no_text_is_refused_if_named_and_passed_over_if_found(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(TEXT)
    with pytest.raises(DataError, match=says) as raised:
        read(tmp_path / "a")
    assert raised.value.hint
    problems = ProblemLog()
    assert read(tmp_path, problems=problems) == TWO
    assert "as it is not text: 1" in str(problems.summary()[0])
    assert says in str(problems.summary()[0])
    (tmp_path / "c.tar").write_bytes(tar_of({"a": content, "b": TEXT}))
    assert read(tmp_path / "c.tar") == TWO


@pytest.mark.parametrize("has_extractor", [True, False])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.dat", PAGE),
        ("a.txt", f"\ufeff\n<!-- a --> <!-- b -->\n{PAGE}"),
        ("a.txt", "Town\n" + "<p>The old town is by the sea, and has many houses.</p><script>var a;</script>\n" * 5),
        ("a.html", "The old town lies by the sea.<p>It is very old.</p><script>var a = 1;</script>"),
        ("a.warc", warc(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE.encode(), "response").decode()),
    ],
)
def test_markup_never_becomes_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, has_extractor: bool
) -> None:
    pytest.importorskip("trafilatura")
    monkeypatch.setattr(formats, "has_extractor", lambda: has_extractor)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text(content)
    problems = ProblemLog()
    lines = [line for document in read(tmp_path / "a", problems=problems) for line in document]
    assert not any("var a" in line or "<" in line for line in lines)
    assert bool(lines) == has_extractor
    assert bool(problems.summary()) != has_extractor
    if not has_extractor and name != "a.warc":
        with pytest.raises(DataError, match=r"(?s)it is HTML.*discern-nlp\[web\]"):
            read(tmp_path / "a" / name)


@pytest.mark.parametrize(
    "text",
    [
        "HTML is written as <html>.\n",
        "# Title\n\n<p>Text.</p>\n",
        "<!-- a -->\nText.\n",
        "From 1990 on.\n",
        "[Spoiler] {x}\n{{name}} liked it\n",
        "[] and {} are brackets\n",
        "{} [] too\n",
        "Well, text, yes.\nOne, two.\nThree, four, five.\n",
        "word\tDT\nother\tNN\n\nthird\tVB\n",
        "text\n\nA document.\n",
    ],
)
def test_text_may_look_like_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    problems = ProblemLog()
    lines = [line for document in read(tmp_path / "a", problems=problems) for line in document]
    assert lines == list(filter(None, text.split("\n")))
    assert problems.notes == ()


def table(header: str, row: str) -> str:
    return "\n".join([header, *(row.format(number=number, text=text) for number, text in enumerate(ROWS))]) + "\n"


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("a.tsv", "label\ttext_a", "{number}\t{text}"),
        ("a.csv", "sentence", "{text}"),
        ("a.csv", "id,review,stars", '{number},"{text}",5'),
        ("a.csv", "id;whatever;stars", "{number};{text};5"),
        ("a.csv", ",words of people,kind", '{number},"{text}",good'),
        ("noending", "id;comment", "{number};{text}"),
        ("a.tsv", f"gj04\t1\t\t{ROWS[0]}", "gj04\t{number}\t\t{text}"),
        ("a.csv", "sep=;\ntext;label", "{text};{number}"),
    ],
)
def test_the_column_of_text_is_read(tmp_path: Path, name: str, header: str, row: str) -> None:
    (tmp_path / name).write_text(table(header, row))
    problems = ProblemLog()
    assert read(tmp_path / name, problems=problems)[-3:] == [[row] for row in ROWS]
    assert problems.summary() == ()
    assert len(problems.notes) == 1
    if "sep=" in header:
        assert open_table(tmp_path / name).columns == ("text", "label")


@pytest.mark.parametrize("name", ["content", "Review", "text", "some_words"])
def test_the_text_is_found_by_the_same_rule_in_every_format(tmp_path: Path, name: str) -> None:
    records = [{"id": f"a{number}", name: f"Some words of row {number}.", "stars": "5"} for number in range(30)]
    rows = [",".join(record.values()) for record in records]
    (tmp_path / "a.csv").write_text("\n".join([",".join(records[0]), *rows]))
    (tmp_path / "a.tsv").write_text("\n".join([",".join(records[0]), *rows]).replace(",", "\t"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "a.parquet").write_bytes(parquet_of({key: [record[key] for record in records] for key in records[0]}))
    for file in ("a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet"):
        assert read(tmp_path / file) == [[record[name]] for record in records], file


def test_the_column_is_given_by_pattern(tmp_path: Path) -> None:
    for name in ("reviews.csv", "other.csv"):
        (tmp_path / name).write_text("title,body\nA,B\nC,D\n")
    (tmp_path / "x.jsonl").write_text('{"title": "E", "body": "F"}\n')
    (tmp_path / "x.parquet").write_bytes(parquet_of({"title": ["G"], "body": ["H"]}))
    (tmp_path / "y.zip").write_bytes(zip_of({"a/reviews.csv": b"title,body\nI,J\n"}))
    options = CorpusOptions(text_fields=("title", "reviews.csv:body", "*.parquet:body"))
    assert read(tmp_path, options=options) == [["A"], ["C"], ["B"], ["D"], ["E"], ["H"], ["J"]]
    for name in ("other.csv", "x.jsonl", "x.parquet"):
        with pytest.raises(ConfigError, match="no column 'titel'; its columns: title, body") as error:
            read(tmp_path / name, options=CorpusOptions(text_fields=("titel",)))
        assert "did you mean 'title'?" in str(error.value.hint)


@pytest.mark.parametrize("columns", ["sentence1,sentence2", "one thing,another thing"])
def test_two_columns_of_text_are_asked_about(tmp_path: Path, columns: str) -> None:
    (tmp_path / "a.csv").write_text(f"{columns},label\n" + "some words of one,some words of two,1\n" * 3)
    first, second = columns.split(",")
    with pytest.raises(ConfigError, match=f"(?s)not clear which .*its columns: {first}, {second}, label.*--text-field '{first}'"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize(("name", "content"), [("a.csv", "x,y\n1,2\n3,4\n"), ("a.jsonl", '{"x": 1, "y": "2"}\n')])
def test_a_table_without_text_stops_only_who_named_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "b.txt").write_text("Text.\n")
    with pytest.raises(ConfigError, match="its columns: x, y"):
        read(tmp_path / name)
    problems = ProblemLog()
    assert read(tmp_path, problems=problems) == [["Text."]]
    assert problems.summary()[0].kind.startswith("table skipped")


def test_rows_and_records_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbftext,n\r\n"One line,\nand another",1\r\n,2\r\nshort\r\n"He said ""yes"".",3\r\n'
    (tmp_path / "a.csv").write_bytes(content)
    problems = ProblemLog()
    assert read(tmp_path / "a.csv", problems=problems) == [["One line,", "and another"], ['He said "yes".']]
    assert {problem.kind for problem in problems.summary()} == {
        "malformed row, left out",
        "record skipped, as it has no text in 'text'",
    }
    lines = b'lf of a record"}\n' + json_lines("One.") + b'\n[1]\n{"text": 3}\n{"text": "a\\ud800b"}\n{"text": ' + b"[" * 100_000
    (tmp_path / "a.jsonl").write_bytes(lines)
    problems = ProblemLog()
    assert read(tmp_path / "a.jsonl", problems=problems) == [["One."], ["a\ufffdb"]]
    assert [problem.count for problem in problems.summary()] == [2, 1, 1, 1]
    assert "a.jsonl:4" in str(problems.summary()[1])


def test_a_long_json_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").write_bytes(json_lines("word " * 600_000, "short"))
    assert len(read(tmp_path / "rows")) == 2
    monkeypatch.setattr(streams, "LONGEST_LINE", 1_500_000)
    with pytest.raises(DataError, match="a line of more than 1,500,000"):
        read(tmp_path / "rows")


def test_token_ids_are_read_as_they_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    documents = [[101, 7, 102], [101, 8, 9, 102]]
    rows = {"input_ids": documents, "attention_mask": [[1] * 3, [1] * 4]}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": each, "labels": [0]}) + "\n" for each in documents))
    (tmp_path / "a.parquet").write_bytes(parquet_of(rows))
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.jsonl", "a.parquet", "saved"):
        problems = ProblemLog()
        found = read(tmp_path / name, problems=problems)
        assert [each.dtype for each in found] == [np.int64] * 2
        assert [each.tolist() for each in found] == documents
        assert problems.summary() == ()
    (tmp_path / "rows.npy").write_bytes(npy_of(np.arange(6, dtype=np.uint16).reshape(2, 3)))
    assert [each.tolist() for each in read(tmp_path / "rows.npy")] == [[0, 1, 2], [3, 4, 5]]
    stream = np.arange(3 << 19, dtype=np.uint32) % 30_000
    np.save(tmp_path / "stream.npy", stream)
    stream.astype("<u2").tofile(tmp_path / "train.bin")
    for name in ("stream.npy", "train.bin"):
        pieces = read(tmp_path / name)
        assert [len(piece) for piece in pieces] == [1 << 20, 1 << 19]
        assert np.array_equal(np.concatenate(pieces), stream)
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"(?s)array of float64 and shape \(3,\).*expected integers"):
        read(tmp_path / "floats.npy")
    (tmp_path / "train.bin").write_bytes(b"\1\0\2")
    with pytest.raises(DataError, match=r"train\.bin is damaged or cut short: it ends inside a token id"):
        read(tmp_path / "train.bin")


@pytest.mark.parametrize("compression", ["gz", "xz", "zst", "bz2"])
@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_a_corrupt_archive_is_named(tmp_path: Path, compression: str, damage: str) -> None:
    whole = COMPRESS[compression](tar_of({f"{n}.txt": os.urandom(3000).hex().encode() for n in range(20)}))
    middle = len(whole) // 2
    broken = whole[:middle] if damage == "cut" else whole[:middle] + b"discern" * 20 + whole[middle + 140 :]
    (tmp_path / "web.tar").write_bytes(broken)
    with pytest.raises(DataError, match=r"web\.tar.* is damaged or cut short"):
        read(tmp_path / "web.tar")


@pytest.mark.parametrize(("compression", "place"), [("bz2", 0), ("bz2", 12), ("xz", 0), ("xz", 30), ("gz", 0), ("gz", 15)])
def test_damage_in_a_later_stream_is_named(tmp_path: Path, compression: str, place: int) -> None:
    parts = [bytearray(COMPRESS[compression](f"Day {day}.\n".encode() * 9)) for day in range(3)]
    path = tmp_path / "days"
    path.write_bytes(bytes(4).join(parts) + bytes(8))
    assert sum(map(len, read(path))) == 27
    parts[1][place] ^= 0xFF
    path.write_bytes(b"".join(parts))
    with pytest.raises(DataError, match="days is damaged or cut short"):
        read(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((MANY[:end], "is damaged or cut short") for end in (3000, 512 * 3 + 100)),
        (tar_of({"a": b"Text."})[:1024] + b"x" * 512, "a header has a"),
        (zip_of({"a": TEXT * 100})[:-30], "is damaged or cut short: File is not a zip file"),
        (b"PAR1" + bytes(100), "is a damaged parquet file"),
        (b"\x93NUMPY\1\0\5", "is damaged or cut short"),
        (npy_of(np.arange(9))[:-16], "2 token ids are missing"),
        (warc(TEXT)[:-20], "record 1 is cut short"),
        (warc(TEXT) + b"no record\r\n", "expected a WARC record .*found b'no record"),
        (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n", "expected a WARC record with its Content-Length"),
        (b"WARC/1.0\r\n" + b"X-Long: y\r\n" * 10_000, "is damaged"),
        (b'[{"text": "a"}, {"text"', "not JSON"),
        (reduce(lambda inner, _: gzip.compress(inner), range(12), TEXT), "nested more than 8 deep"),
    ],
)
def test_damage_is_told(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=rf"(?s)a\b.*{says}") as raised:
        read(tmp_path / "a")
    assert raised.value.hint


@pytest.mark.parametrize("compression", ["gz", "xz", "zst", "bz2", "zip"])
@pytest.mark.parametrize("filling", [b"\n", b'{"text": "a"}\n'])
def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, filling: bytes) -> None:
    monkeypatch.setattr(streams, "FREE_BYTES", 1 << 18)  # megabytes instead of gigabytes
    content = filling * ((4 << 20) // len(filling))
    packed = zip_of({"a": content}) if compression == "zip" else COMPRESS[compression](content)
    (tmp_path / "bomb").write_bytes(packed)
    with pytest.raises(DataError, match=r"bomb.* decompresses to too much data"):
        read(tmp_path / "bomb")
    if compression != "zip":
        with pytest.raises(DataError, match="bomb decompresses to too much data"):
            list(open_table(tmp_path / "bomb", "text").rows)


MODULE = """
from discern.data.sources.documents import Lines
from discern.data.sources.formats import text_lines


def recognizes(name, text):
    return text.startswith("WEBVTT")


def documents(pieces, context):
    batches = (Lines([line for line in batch.lines[1:] if "-->" not in line]) for batch in text_lines(pieces))
    return context.cut(batches, are_records=False)
"""


def test_another_package_reads_a_format_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "packages" / "subtitles-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: subtitles\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[discern.sources]\nwebvtt = subtitles\n")
    (tmp_path / "packages" / "subtitles.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    formats.added_formats.cache_clear()
    (tmp_path / "film.gz").write_bytes(gzip.compress(b"WEBVTT\n\n00:01.000 --> 00:04.000\nNever drink it.\n"))
    assert read(tmp_path / "film.gz") == [["Never drink it."]]
    formats.added_formats.cache_clear()
    sys.modules.pop("subtitles")
