"""Which files are input, and how text is cut into documents."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from discern.data.sources import documents
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, Document, DocumentRule, ProblemLog
from discern.errors import DataError
from tests.data.small_text import made_up, plain, read

TWO: list[Document] = [["One is first.", "It has two lines."], ["Another follows."]]
TEXT = plain(TWO).encode()  # type: ignore[arg-type]
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


def test_data_sets_and_models_are_not_input(tmp_path: Path) -> None:
    inside = ("data/manifest.json", "data/tokenizer.json", "data/x.txt", "runs/one/run.json", "runs/one/logs/deep/b.txt")
    for name in ("a.txt", *inside):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Text.")
    for pattern in ("", "*", "**", "**/*", "**/*.txt"):
        corpus = Corpus([str(tmp_path / pattern)], CorpusOptions())
        assert [item.path for item in corpus.inputs] == [tmp_path / "a.txt"], pattern
        assert corpus.note == f"left out, as they are data sets, runs or models: {tmp_path / 'data'}, {tmp_path / 'runs' / 'one'}"
    for out, left_out in (("data", ("runs/one",)), ("runs", ("data",))):  # the output is not input, without a note
        corpus = Corpus([str(tmp_path / "*")], CorpusOptions(), exclude=tmp_path / out)
        assert [item.path for item in corpus.inputs] == [tmp_path / "a.txt"]
        assert str(corpus.note).endswith(": " + ", ".join(str(tmp_path / name) for name in left_out))
    assert read(tmp_path / "runs" / "one" / "logs" / "**" / "*.txt") == [["Text."]], "named by the user"
    with pytest.raises(DataError, match="is a data set, a run or a model, not text"):
        Corpus([str(tmp_path / "data")], CorpusOptions())


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
    assert list(map(len, read(tmp_path / "wiki", options=CorpusOptions(rule)))) == wiki
    if text is None:
        with pytest.raises(DataError, match="text has no records"):
            read(tmp_path / "text", options=CorpusOptions(rule))
    else:
        assert list(map(len, read(tmp_path / "text", options=CorpusOptions(rule)))) == text


def test_line_ends_byte_order_mark_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("a\n\n\n \n\t\n\nb\nc\n\n\n\n" + "\n" * 100_000 + "d")
    assert read(tmp_path / "blank") == [["a"], ["b", "c"], ["d"]]
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfOne. \r\n\tTwo.\r\n \t\r\nThree.\xc2\xa0\n")
    assert read(tmp_path / "text") == [["One.", "Two."], ["Three."]]


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no files"):
        read(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "absent.txt")


def test_invalid_utf8_is_replaced_counted_and_placed(tmp_path: Path) -> None:
    content = plain(made_up(400)).encode()
    middle = content.index(b"\n", len(content) // 2) + 1
    (tmp_path / "text").write_bytes(content[:middle] + b"bad \xff\xfe here\n" + content[middle:])
    problems = ProblemLog()
    found = read(tmp_path / "text", problems=problems)
    assert sum(sentence == "bad \ufffd\ufffd here" for document in found for sentence in document) == 1
    (problem,) = problems.summary()
    assert problem.count == 2
    line = content.count(b"\n", 0, middle) + 1
    assert problem.examples == (f"{tmp_path / 'text'}:{line}",)


@pytest.mark.parametrize("rule", ["auto", "line"])
def test_an_endless_line_is_split_at_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: DocumentRule) -> None:
    monkeypatch.setattr(documents, "LONGEST_SENTENCE", 10_000)
    line = "word " * 1_000_000
    (tmp_path / "text").write_text(f"Before.\n{line}\nAfter.\n")
    problems = ProblemLog()
    found = read(tmp_path / "text", options=CorpusOptions(rule), problems=problems)
    sentences = [sentence for document in found for sentence in document]
    assert len(found) == 1 or rule == "line"
    assert sentences[0] == "Before."
    assert sentences[-1] == "After."
    assert max(map(len, sentences)) <= 10_000
    assert " ".join(sentences[1:-1]) == line.strip()
    (problem,) = problems.summary()
    assert problem.kind == "line split, as it is too long"


def test_an_endless_line_without_spaces_is_split_between_characters(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("漢字" * 500_000, encoding="utf-8")
    (document,) = read(tmp_path / "text")
    assert "".join(document) == "漢字" * 500_000
    assert max(map(len, document)) == documents.LONGEST_SENTENCE


def test_an_endless_document_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_DOCUMENT", 5000)
    (tmp_path / "text").write_text("A line of text.\n" * 1000)
    problems = ProblemLog()
    found = read(tmp_path / "text", problems=problems)
    assert len(found) == 3
    assert sum(map(len, found)) == 1000
    (problem,) = problems.summary()
    assert (problem.kind, problem.count) == ("document split, as it is too long", 2)
    monkeypatch.setattr(documents, "LONGEST_DOCUMENT", 150)
    (tmp_path / "exact").write_text("A line of text.\n" * 10 + "\nNext.")
    assert len(read(tmp_path / "exact")) == 2


def test_errors_can_be_collected(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(os.urandom(1000))[:500])
    (tmp_path / "b").write_bytes(TEXT)
    errors: list = []
    assert list(Corpus([str(tmp_path)], CorpusOptions()).documents(ProblemLog(), errors=errors)) == TWO
    assert len(errors) == 1


@pytest.mark.parametrize("where", ["", "*", "**/*.txt"])
def test_excluded_files_are_left_out_of_folders_and_patterns(tmp_path: Path, where: str) -> None:
    for name in ("a.txt", "drafts/b.txt", "c/drafts.txt", "c/d.js.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"From {name}.")
    options = CorpusOptions(exclude=("drafts/*", "*.js.txt"))
    assert read(tmp_path / where, options=options) == [["From a.txt."], ["From c/drafts.txt."]]
    assert read(tmp_path / "c" / "d.js.txt", options=options) == [["From c/d.js.txt."]], "named by the user"
    with pytest.raises(DataError, match=r"(?s)no file.*--exclude"):
        read(tmp_path / where, options=CorpusOptions(exclude=("*",)))


def test_real_archives() -> None:
    folder = os.environ.get("DISCERN_TEST_DATA")
    if not folder:
        pytest.skip("DISCERN_TEST_DATA is not set")
    problems = ProblemLog()
    documents = Corpus([f"{folder}/wikipedia-en/AA.tar.xz"], CorpusOptions()).documents(problems)
    first = [document for document, _ in zip(documents, range(200), strict=False)]
    assert not any(sentence.startswith(("<doc", "</doc")) for document in first for sentence in document)
    assert len(first) == 200
    assert problems.summary() == ()
