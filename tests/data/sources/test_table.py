"""CSV and TSV as input: which files are tables, which column is the text, and what is asked where that is unclear."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from discern.data.sources.documents import CorpusOptions, ProblemLog
from discern.data.tables import open_table
from discern.errors import ConfigError, DataError
from tests.data.small_text import read, tar_of

ROWS = ["The film was fine and long.", "A dull evening, with nobody in it.", "We liked it very much."]
DOCUMENTS = [[row] for row in ROWS]


def table(header: str, row: str) -> str:
    return "\n".join([header, *(row.format(number=number, text=text) for number, text in enumerate(ROWS))]) + "\n"


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("a.tsv", "label\ttext_a", "{number}\t{text}"),
        ("a.tsv", "sentence", "{text}"),
        ("a.csv", "id,review,stars", '{number},"{text}",5'),
        ("a.csv", "id;whatever;stars", "{number};{text};5"),
        ("a.csv", ",words of people,kind", '{number},"{text}",good'),
        ("a.csv", "title,text", 'A fine long title,"{text}"'),
        ("a.txt", "label\tsentence", "{number}\t{text}"),
        ("noending", "id;comment", "{number};{text}"),
        ("a.tsv", "gj04\t1\t\tThe first of the texts.", "gj04\t{number}\t\t{text}"),
    ],
)
def test_the_column_of_text_is_read(tmp_path: Path, name: str, header: str, row: str) -> None:
    (tmp_path / name).write_text(table(header, row))
    first = [["The first of the texts."]] if "\t\t" in header else []
    problems = ProblemLog()
    assert read(tmp_path / name, problems=problems) == first + DOCUMENTS
    assert problems.summary() == ()
    (note,) = problems.notes
    assert ("taken as the header" in note) == (header == "sentence")


def test_commas_do_not_part_the_texts_of_a_table_with_one_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(ROWS) + "\n")
    problems = ProblemLog()
    assert read(tmp_path / "a.csv", problems=problems) == DOCUMENTS
    assert problems.summary() == ()


def test_the_column_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body\nA,B\nC,D\n")
    assert read(tmp_path / "a.csv", options=CorpusOptions(text_field="title")) == [["A"], ["C"]]
    with pytest.raises(ConfigError, match="no column 'titel'; its columns: title, body") as error:
        read(tmp_path / "a.csv", options=CorpusOptions(text_field="titel"))
    assert "did you mean 'title'?" in str(error.value.hint)


@pytest.mark.parametrize("columns", ["sentence1,sentence2", "one thing,another thing"])
def test_two_columns_of_text_are_asked_about(tmp_path: Path, columns: str) -> None:
    (tmp_path / "a.csv").write_text(f"{columns},label\n" + "some words of one,some words of two,1\n" * 3)
    with pytest.raises(ConfigError, match="not clear which column holds the text") as error:
        read(tmp_path / "a.csv")
    assert columns.replace(",", ", ") + ", label" in error.value.message
    assert f"--text-field '{columns.split(',')[0]}'" in str(error.value.hint)


def test_a_table_without_text_stops_only_who_named_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "b.txt").write_text("Text.\n")
    with pytest.raises(ConfigError, match="its columns: x, y"):
        read(tmp_path / "a.csv")
    problems = ProblemLog()
    assert read(tmp_path, problems=problems) == [["Text."]]
    (problem,) = problems.summary()
    assert problem.kind.startswith("table skipped")


def test_packed_tables_and_fields_with_line_ends(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbftext,n\r\n"One line,\nand another",1\r\n,2\r\nshort\r\n"He said ""yes"".",3\r\n'
    expected = [["One line,", "and another"], ['He said "yes".']]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(content))
    problems = ProblemLog()
    assert read(tmp_path / "a.csv.gz", problems=problems) == expected
    assert [problem.kind for problem in problems.summary()] == [
        "record skipped, as it has no text in 'text'",
        "row skipped, as its number of fields differs from the header",
    ]
    (tmp_path / "b.tar").write_bytes(tar_of({"x/a.csv": content}))
    assert read(tmp_path / "b.tar") == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", 'text,n\nfine,1\n"never closed,2\nmore,3\n', r"a\.csv:3: unbalanced quotation marks in the row that begins"),
        ("a.csv", "text,label,text\nsome words,x,y\n", r"a\.csv:1: two columns are named 'text'"),
        ("a.tsv", "id\t sentence\tsentence \n1\tsome words\tmore words\n", r"a\.tsv:1: two columns are named 'sentence'"),
        ("a.txt", "text|n|n\na b|1|2\nc d|3|4\n", r"a\.txt:1: two columns are named 'n'"),
    ],
)
def test_a_table_that_cannot_be_read_is_told_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "noending"])
@pytest.mark.parametrize(("first", "mark"), [("sep=;", ";"), ('\ufeff"sep=|"\r', "|"), ("\nSEP=\t", "\t"), ("sep=,", ",")])
def test_the_line_in_which_excel_names_the_delimiter_is_skipped(tmp_path: Path, name: str, first: str, mark: str) -> None:
    (tmp_path / name).write_text(f"{first}\ntext{mark}label\n" + "".join(f'"{row}"{mark}1\n' for row in ROWS))
    assert read(tmp_path / name) == DOCUMENTS
    table = open_table(tmp_path / name)
    assert (table.columns, [row.values["text"] for row in table.rows]) == (("text", "label"), ROWS)


@pytest.mark.parametrize(
    "text",
    [
        "Well, text, yes.\nOne, two.\nThree, four, five.\n",
        "word\tDT\nother\tNN\n\nthird\tVB\n",
        "text\n\nA document.\n",
        "question, answer\nno commas here\nnor here\n",
    ],
)
def test_prose_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    problems = ProblemLog()
    found = read(tmp_path / "a.txt", problems=problems)
    assert [line for document in found for line in document] == [line for line in text.split("\n") if line]
    assert problems.notes == ()
