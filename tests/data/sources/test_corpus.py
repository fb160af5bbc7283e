"""Every kind of input, and every kind of bad input."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, Document, DocumentRule, Limits, ProblemLog
from discern.errors import ConfigError, DataError
from tests.data.small_text import made_up, plain, read, tar_of

TWO: list[Document] = [["One is first.", "It has two lines."], ["Another follows."]]
TEXT = plain(TWO).encode()
WIKI = b"""<doc id="1" url="u" title="Fish &amp; Chips">
Fish &amp; Chips

They are &lt;fried&gt;.

A second paragraph.
</doc>
<doc id="2" url="u" title="Tea">
Tea

It is hot.
</doc>
"""
WIKI_DOCUMENTS = [["Fish & Chips", "They are <fried>.", "A second paragraph."], ["Tea", "It is hot."]]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}


def with_rule(rule: DocumentRule) -> CorpusOptions:
    return CorpusOptions(documents=rule)


def json_lines(*texts: str, field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "n": 1}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("content", ["text", "wiki", "json", "tar"])
def test_content_decides_whatever_the_name(tmp_path: Path, compression: str, content: str) -> None:
    raw, expected = {
        "text": (TEXT, TWO),
        "wiki": (WIKI, WIKI_DOCUMENTS),
        "json": (json_lines("One.\n\nTwo.", "Three."), [["One.", "Two."], ["Three."]]),
        "tar": (tar_of({"b/x": TEXT, "a": WIKI}), TWO + WIKI_DOCUMENTS),
    }[content]
    file = tmp_path / "misleading.png"
    file.write_bytes(COMPRESS[compression](raw))
    assert read(file) == expected


@pytest.mark.parametrize("compression", ["plain", "gz"])
def test_parquet(tmp_path: Path, compression: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(arrow.table({"id": [1, 2, 3], "body": ["One.\nTwo.", None, "Three."]}), buffer)
    (tmp_path / "data").write_bytes(COMPRESS[compression](buffer.getvalue()))
    problems = ProblemLog()
    found = read(tmp_path / "data", options=CorpusOptions(text_field="body"), problems=problems)
    assert found == [["One.", "Two."], ["Three."]]
    assert "row 2" in str(problems.summary()[0])
    assert read(tmp_path / "data") == found
    with pytest.raises(ConfigError, match="no column 'boby'; its columns: id, body"):
        read(tmp_path / "data", options=CorpusOptions(text_field="boby"))


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match=r"data is a damaged parquet file"):
        read(tmp_path / "data")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_folder_for_temporary_files_is_not_the_fault_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data").write_bytes(b"PAR1" + bytes(100))
    monkeypatch.setattr("tempfile.SpooledTemporaryFile", lambda **_: Path("/dev/full").open("wb", buffering=0))  # noqa: SIM115
    with pytest.raises(DataError, match=r"cannot write a temporary file in .*: No space left") as raised:
        read(tmp_path / "data")
    assert "TMPDIR" in (raised.value.hint or "")


def test_a_hub_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_bytes(json_lines("One.\nTwo.", "Three."))
    assert read(f"hf:{tmp_path / 'rows'}") == [["One.", "Two."], ["Three."]]
    with pytest.raises(DataError, match="cannot be read"):
        read(f"hf:{tmp_path / 'absent'}")


@pytest.mark.parametrize("address", ["hf:", "hf::english"])
def test_a_hub_data_set_without_a_name(address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address} names no data set"):
        read(address)


def test_archives_nest(tmp_path: Path) -> None:
    inner = [lzma.compress(tar_of({f"{n}.txt": f"Text {n}{m}.".encode() for m in range(2)})) for n in range(3)]
    outer = tar_of({f"subset{n}.xz": content for n, content in enumerate(inner)})
    (tmp_path / "web.tar").write_bytes(outer)
    assert read(tmp_path / "web.tar") == [["Text 01."], ["Text 11."], ["Text 21."]]


def test_endless_nesting_is_refused(tmp_path: Path) -> None:
    content = TEXT
    for _ in range(12):
        content = gzip.compress(content)
    (tmp_path / "bomb").write_bytes(content)
    with pytest.raises(DataError, match="nested more than"):
        read(tmp_path / "bomb")


def test_members_that_point_outside_are_only_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("../../escape.txt", "/absolute.txt", "folder/.hidden"):
            header = tarfile.TarInfo(name)
            header.size = 5
            archive.addfile(header, io.BytesIO(b"Text."))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            header = tarfile.TarInfo(f"special-{kind!r}")
            header.type, header.linkname = kind, "/etc/passwd"
            archive.addfile(header)
    inside = tmp_path / "inside" / "deep"
    inside.mkdir(parents=True)
    (inside / "a.tar").write_bytes(buffer.getvalue())
    assert read(inside / "a.tar") == [["Text."], ["Text."]]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "deep", "inside"]


def test_folders_are_walked_in_order_and_hidden_names_passed_over(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a/x", ".hidden", ".git/config", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"From {name}.")
    assert read(tmp_path) == [["From a/x."], ["From b/10."], ["From b/2."], ["From c."]]
    assert read(tmp_path / "*" / "*") == [["From a/x."], ["From b/10."], ["From b/2."]]
    assert read(tmp_path / "?") == read(tmp_path)
    assert read(tmp_path / "c", tmp_path / "a") == [["From c."], ["From a/x."]]


def test_the_output_is_not_input(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Text.")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    corpus = Corpus([str(tmp_path)], CorpusOptions(), exclude=tmp_path / "data")
    assert [item.path for item in corpus.inputs] == [tmp_path / "text"]


def test_data_sets_and_models_are_not_input(tmp_path: Path) -> None:
    for name in ("a.txt", "data/manifest.json", "data/tokenizer.json", "runs/one/run.json", "runs/one/checkpoints/step/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Text.")
    for pattern in ("", "*", "**", "**/*"):
        corpus = Corpus([str(tmp_path / pattern)], CorpusOptions())
        assert [item.path for item in corpus.inputs] == [tmp_path / "a.txt"], pattern
        assert corpus.note == f"left out, as they are data sets, runs or models: {tmp_path / 'data'}, {tmp_path / 'runs' / 'one'}"
    assert Corpus([str(tmp_path / "*")], CorpusOptions(), exclude=tmp_path / "data").left_out == (tmp_path / "runs" / "one",)
    with pytest.raises(DataError, match="is a data set, a run or a model, not text"):
        Corpus([str(tmp_path / "data")], CorpusOptions())


def test_a_pattern_reads_nothing_below_a_run(tmp_path: Path) -> None:
    for name in ("a.txt", "runs/one/run.json", "runs/one/logs/deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Text.")
    corpus = Corpus([str(tmp_path / "**" / "*.txt")], CorpusOptions())
    assert [item.path for item in corpus.inputs] == [tmp_path / "a.txt"]
    assert corpus.left_out == (tmp_path / "runs" / "one",)
    named = Corpus([str(tmp_path / "runs" / "one" / "logs" / "**" / "*.txt")], CorpusOptions())
    assert [item.path for item in named.inputs] == [tmp_path / "runs" / "one" / "logs" / "deep" / "b.txt"]


def test_a_pattern_reads_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("a", "sub/b", "sub/deep/c"):
        (tmp_path / name).write_text(f"From {name}.")
    for pattern in ("**", "**/*", "*"):
        assert sorted(read(tmp_path / pattern)) == [["From a."], ["From sub/b."], ["From sub/deep/c."]], pattern
    with pytest.raises(DataError, match="no file matches the pattern"):
        read(tmp_path / "emp*")


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "text" / "sub").mkdir(parents=True)
    (tmp_path / "text" / "sub" / "a").write_text("Text.")
    (tmp_path / "text" / "sub" / "above").symlink_to(tmp_path / "text")
    (tmp_path / "text" / "missing").symlink_to(tmp_path / "nowhere")
    (tmp_path / "links").mkdir()
    for name in ("one", "two"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "text")
    assert [item.path for item in Corpus([str(tmp_path / "links")], CorpusOptions()).inputs] == [
        tmp_path / "links" / "one" / "sub" / "a"
    ]
    assert read(tmp_path / "text" / "*") == [["Text."]]


def test_a_pipe_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(TEXT))
    os.close(writing)
    corpus = Corpus([f"/dev/fd/{reading}"], CorpusOptions())
    assert not corpus.rereadable
    assert corpus.total_bytes is None
    assert list(corpus.documents(ProblemLog())) == TWO
    os.close(reading)


@pytest.mark.parametrize(
    ("rule", "text", "wiki"),
    [
        ("auto", [2, 1], [3, 2]),
        ("blank-line", [2, 1], [1, 1, 1, 1, 1]),
        ("file", [3], [5]),
        ("line", [1, 1, 1], [1, 1, 1, 1, 1]),
        ("record", None, [3, 2]),
    ],
)
def test_document_rules(tmp_path: Path, rule: DocumentRule, text: list[int] | None, wiki: list[int]) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "wiki").write_bytes(WIKI)
    assert list(map(len, read(tmp_path / "wiki", options=with_rule(rule)))) == wiki
    if text is None:
        with pytest.raises(DataError, match="text has no records"):
            read(tmp_path / "text", options=with_rule(rule))
    else:
        assert list(map(len, read(tmp_path / "text", options=with_rule(rule)))) == text


def test_a_file_end_ends_a_document(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("No newline at the end")
    assert len(read(tmp_path)) == 2


def test_line_ends_byte_order_mark_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfOne. \r\n\tTwo.\r\n \t\r\nThree.\xc2\xa0\n")
    assert read(tmp_path / "text") == [["One.", "Two."], ["Three."]]


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no files"):
        read(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "absent.txt")
    with pytest.raises(DataError, match="no file matches"):
        read(tmp_path / "*.txt")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes(range(256)) * 10, "NUL"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04" + b"x" * 50, "zip"),
        (bytes(range(128, 256)) * 10, "not UTF-8"),
        (TEXT + b"\0", "NUL bytes"),
        ("Привет, мир!\n".encode("utf-16-le"), "UTF-16LE"),
        ("长的句子。\nA b.\n".encode("utf-16-be"), "UTF-16BE"),
        ("text\n".encode("utf-32-le"), "UTF-32LE"),
        ("Привет, мир!\n".encode("cp1251"), "CP1251"),
        (b"\xef\xbb\xbf\n<!-- a --> <!-- b -->\n<HTML><p>Text.</p>", "HTML"),
        (b'<?xml version="1.0"?>\n<!doctype html>', "HTML"),
        (b"<mediawiki xmlns='x'>\n<page>", "XML"),
        (b"%PDF-1.4\n1 0 obj\n", "PDF"),
        (b"%!PS-Adobe-3.0\n", "PostScript"),
        (b"{\\rtf1\\ansi Text.}", "RTF"),
        (b"% a comment\n\\documentclass{article}\n", "LaTeX"),
        (b"From a@b.org Mon Jan  1 00:00:00 2001\nSubject: x\n", "mailbox"),
        (b"#!/usr/bin/env python\nprint()\n", "program"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ],
)
def test_a_binary_file_is_refused_if_named_and_passed_over_if_found(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(TEXT)
    with pytest.raises(DataError, match=says):
        read(tmp_path / "a")
    problems = ProblemLog()
    assert read(tmp_path, problems=problems) == TWO
    assert "as it is not text: 1" in str(problems.summary()[0])
    assert says in str(problems.summary()[0])
    (tmp_path / "c.tar").write_bytes(tar_of({"a": content, "b": TEXT}))
    assert read(tmp_path / "c.tar") == TWO


@pytest.mark.parametrize(
    "text", ["HTML is written as <html>.\n", "# Title\n\n<p>Text.</p>\n", "<!-- a -->\nText.\n", "From 1990 on.\n"]
)
def test_text_may_mention_markup(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    assert [line for document in read(tmp_path / "a") for line in document] == [line for line in text.split("\n") if line]


def test_a_nul_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines("x" * 100_000, "Last.\0") + b"\0")
    (tmp_path / "b").write_bytes(TEXT + b"." * 2_000_000 + b"\0")
    for name in ("a.jsonl", "b"):
        with pytest.raises(DataError, match="is not text: it contains NUL bytes"):
            read(tmp_path / name)
    problems = ProblemLog()
    read(tmp_path, problems=problems)
    assert {problem.kind: problem.count for problem in problems.summary()}["file skipped, as it is not text"] == 2


def test_the_likely_encoding_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("Le café de la gare est fermé en été, mais le théâtre est ouvert.\n".encode("latin-1"))
    problems = ProblemLog()
    assert len(read(tmp_path / "a", problems=problems)) == 1
    assert "may be CP1252: iconv -f CP1252 -t UTF-8" in problems.notes[0]


def test_invalid_utf8_is_replaced_counted_and_placed(tmp_path: Path) -> None:
    content = plain(made_up(400)).encode()
    middle = content.index(b"\n", len(content) // 2) + 1
    (tmp_path / "text").write_bytes(content[:middle] + b"bad \xff\xfe here\n" + content[middle:])
    problems = ProblemLog()
    found = read(tmp_path / "text", problems=problems)
    assert sum(sentence == "bad \ufffd\ufffd here" for document in found for sentence in document) == 1
    (problem,) = problems.summary()
    assert problem.count == 2
    assert problem.examples == (f"{tmp_path / 'text'}: byte {middle + 4:,}",)


@pytest.mark.parametrize("rule", ["auto", "line"])
def test_an_endless_line_is_split_at_spaces(tmp_path: Path, rule: DocumentRule) -> None:
    line = "word " * 1_000_000
    (tmp_path / "text").write_text(f"Before.\n{line}\nAfter.\n")
    problems = ProblemLog()
    found = read(tmp_path / "text", options=CorpusOptions(rule, limits=Limits(sentence=10_000)), problems=problems)
    sentences = [sentence for document in found for sentence in document]
    assert len(found) == (1 if rule == "auto" else 3)
    assert sentences[0] == "Before."
    assert sentences[-1] == "After."
    assert max(map(len, sentences)) <= 10_000
    assert " ".join(sentences[1:-1]) == line.strip()
    (problem,) = problems.summary()
    assert (problem.kind, problem.count) == ("line split, as it is too long", 1)


def test_an_endless_line_without_spaces_is_split_between_characters(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("漢字" * 500_000, encoding="utf-8")
    found = read(tmp_path / "text", options=CorpusOptions(limits=Limits(sentence=10_000)))
    assert "".join(found[0]) == "漢字" * 500_000


def test_an_endless_document_is_split(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A line of text.\n" * 1000)
    problems = ProblemLog()
    found = read(tmp_path / "text", options=CorpusOptions(limits=Limits(document=5000)), problems=problems)
    assert len(found) == 3
    assert sum(map(len, found)) == 1000
    (problem,) = problems.summary()
    assert (problem.kind, problem.count) == ("document split, as it is too long", 2)
    (tmp_path / "exact").write_text("A line of text.\n" * 10 + "\nNext.")
    assert len(read(tmp_path / "exact", options=CorpusOptions(limits=Limits(document=150)), problems=problems)) == 2
    (tmp_path / "rows").write_bytes(json_lines("word " * 5000))
    assert len(read(tmp_path / "rows", options=CorpusOptions(limits=Limits(sentence=1000, document=5000)))) == 5


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
    streams = [bytearray(COMPRESS[compression](f"Day {day}.\n".encode() * 9)) for day in range(3)]
    path = tmp_path / "days"
    path.write_bytes(b"".join(streams))
    assert sum(map(len, read(path))) == 27
    streams[1][place] ^= 0xFF
    path.write_bytes(b"".join(streams))
    with pytest.raises(DataError, match="days is damaged or cut short"):
        read(path)


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2"])
def test_streams_may_be_padded(tmp_path: Path, compression: str) -> None:
    one, other = (COMPRESS[compression](text) for text in (b"One.\n", b"Other.\n"))
    (tmp_path / "padded").write_bytes(one + bytes(8) + other + bytes(4))
    assert read(tmp_path / "padded") == [["One.", "Other."]]


@pytest.mark.parametrize("cut", [3000, 512 * 3 + 100, 10_000])
def test_a_cut_tar_is_named(tmp_path: Path, cut: int) -> None:
    whole = tar_of({f"{n}.txt": b"Some text.\n" * 80 for n in range(20)})
    (tmp_path / "a.tar").write_bytes(whole[:cut])
    with pytest.raises(DataError, match=r"a\.tar.* is damaged or cut short"):
        read(tmp_path / "a.tar")


def test_a_damaged_header_within_a_tar(tmp_path: Path) -> None:
    whole = bytearray(tar_of({f"{n}.txt": b"Some text." for n in range(3)}))
    whole[1024 + 10] ^= 255
    (tmp_path / "a.tar").write_bytes(whole)
    with pytest.raises(DataError, match="bad checksum"):
        read(tmp_path / "a.tar")


def test_errors_can_be_collected(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(os.urandom(1000))[:500])
    (tmp_path / "b").write_bytes(TEXT)
    errors: list = []
    assert list(Corpus([str(tmp_path)], CorpusOptions()).documents(ProblemLog(), errors=errors)) == TWO
    assert len(errors) == 1


def test_json_lines(tmp_path: Path) -> None:
    lines = json_lines("First.", field="body") + b"not json\n\n[1]\n" + b'{"body": 3}\n{"body": "a\\ud800b"}\n'
    (tmp_path / "rows").write_bytes(lines)
    problems = ProblemLog()
    options = CorpusOptions(text_field="body")
    assert read(tmp_path / "rows", options=options, problems=problems) == [["First."], ["a?b"]]
    assert [problem.count for problem in problems.summary()] == [1, 1, 1, 1]
    for before in (b"", b"\n"):
        (tmp_path / "rows").write_bytes(before + json_lines("First.", field="key"))
        with pytest.raises(ConfigError, match="not clear which column holds the text; its columns: key, n") as error:
            read(tmp_path / "rows")
        assert error.value.hint == "name it: --text-field NAME"
    (tmp_path / "rows.json").write_text('{"version": "1.1", "data": []}\n')
    with pytest.raises(DataError, match="is one JSON object"):
        read(tmp_path / "rows.json")


@pytest.mark.parametrize("name", ["content", "Review", "body", "text", "some_words"])
def test_the_text_is_found_by_the_same_names_in_every_format(tmp_path: Path, name: str) -> None:
    records = [{"id": f"a{number}", name: f"Some words of row {number}.", "stars": "5"} for number in range(30)]
    header = "\t".join(records[0])
    rows = ["\t".join(record.values()) for record in records]
    (tmp_path / "a.tsv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]).replace("\t", ",") + "\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = ["a.tsv", "a.csv", "a.jsonl"]
    if name != "some_words" and (parquet := pytest.importorskip("pyarrow.parquet")):
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), tmp_path / "a.parquet")
        files.append("a.parquet")
    for file in files:
        assert read(tmp_path / file) == [[record[name]] for record in records], file


def test_json_that_is_not_lines_is_text(tmp_path: Path) -> None:
    (tmp_path / "pretty").write_text(json.dumps({"text": "x"}, indent=1))
    assert read(tmp_path / "pretty") == [["{", '"text": "x"', "}"]]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz"])
def test_what_is_named_json_has_to_be_json_lines(tmp_path: Path, name: str) -> None:
    content = json.dumps([{"text": "x"}, {"text": "y"}]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "text").write_text("Text.")
    with pytest.raises(DataError, match=f"{name} is not text: it is not JSON lines") as error:
        read(tmp_path / name)
    assert "jq -c" in str(error.value.hint)
    problems = ProblemLog()
    assert read(tmp_path, problems=problems) == [["Text."]]
    assert [problem.kind for problem in problems.summary()] == ["file skipped, as it is not text"]


def test_a_part_of_a_file_may_begin_within_a_record(tmp_path: Path) -> None:
    (tmp_path / "part.jsonl").write_bytes(b'lf of a record"}\n' + json_lines("First.", "Second."))
    problems = ProblemLog()
    assert read(tmp_path / "part.jsonl", problems=problems) == [["First."], ["Second."]]
    assert [problem.kind for problem in problems.summary()] == ["line skipped, as it is not JSON"]


def test_a_long_json_record(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(json_lines("word " * 600_000, "short"))
    assert len(read(tmp_path / "rows")) == 2
    with pytest.raises(DataError, match="a record of more than"):
        read(tmp_path / "rows", options=CorpusOptions(limits=Limits(record_bytes=1_500_000)))


def test_real_archives() -> None:
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    corpus = Corpus([str(Path(folder) / "wikipedia-en" / "AA.tar.xz")], CorpusOptions())
    problems = ProblemLog()
    first = [document for document, _ in zip(corpus.documents(problems), range(200), strict=False)]
    assert len(first) == 200
    assert not any(sentence.startswith(("<doc", "</doc")) for document in first for sentence in document)
    assert problems.summary() == ()
