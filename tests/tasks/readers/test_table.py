"""Tables of one's own: every format, and every fault with the place of it."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.examples import Answer, ClassificationExample
from discern.tasks.readers.table import TableFormat, open_table
from discern.tasks.readers.user_columns import (
    ClassificationColumns,
    QuestionColumns,
    TaggingColumns,
    classification_columns,
    question_columns,
    tagging_columns,
)
from discern.tasks.readers.user_file import (
    classification_rows,
    question_rows,
    read_classification,
    read_questions,
    read_tagging,
)
from tests.tasks.data_folder import write

TEXTS = [('great, "really"', "good"), ("a waste\nof time", "bad"), ("naïve 中文", "good")]
WANTED = [('great, "really"', "good"), ("a waste\nof time", "bad"), ("naïve 中文", "good")]
STARS = ClassificationColumns("review", label="stars")


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
        assert rows(tmp_path / name) == WANTED, name
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.data")
    assert rows(tmp_path / "a.data") == WANTED


def test_tsv_takes_quotes_as_text_unless_a_field_is_quoted_as_a_spreadsheet_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "review\tstars", '"open\t1', '"said ""yes"""\t2', 'a "b" c\t3', '"a" and "b"\t4')
    assert [text for text, _ in rows(path)] == ['"open', 'said "yes"', 'a "b" c', '"a" and "b"']


def test_a_csv_file_with_one_column_needs_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text('review\ngreat film, loved it\na; b|c\n"quoted, ""twice""\nin two lines"\n')
    texts = [row.values["review"] for row in open_table(path).rows]
    assert texts == ["great film, loved it", "a; b|c", 'quoted, "twice"\nin two lines']


def test_standard_input_and_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "", "One, two.", "", "Three.", "", "")
    assert [row.values["text"] for row in open_table(path).rows] == ["", "One, two.", "", "Three."], "aligned with the lines"

    class Standard:
        buffer = io.BytesIO(b'{"text": "x"}\n{"text": "y"}\n')

    monkeypatch.setattr("sys.stdin", Standard)
    table = open_table(Path("-"))
    assert [example.text for example in classification_rows(table, ClassificationColumns("text"))] == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('review,stars\n"never closed,1\nnext,2\n', r"a\.csv:2: unbalanced quotation marks .* detected in line 3"),
        ('review,stars\nfine,1\n"open,1\nthen "closed" late,2\n', r"a\.csv:3: unbalanced quotation marks"),
        ("review,stars\nfine,1\na \rfilm,1\n", r"a\.csv:3: the line contains a carriage return"),
        ("review,stars\rfine,1\rpoor,2\r", r"a\.csv:1: the line contains a carriage return"),
        ('review,stars\n"' + 11 * ("x" * 999_999 + "\n"), r"a\.csv:2: a field of more than 10,000,000 .* detected in line 1[12]"),
        ("review,stars\na;1\n", r"a\.csv:2: 1 fields, but .*\n.*this row is separated by ';', but the header by ','"),
        ("review,stars\na,b,1\n", r"a\.csv:2: 3 fields, but the header has 2 \(review, stars\)"),
        ("review,stars\n,1\n", r"a\.csv:2: 'review' is empty"),
        ("review,stars\n  ,1\n", r"a\.csv:2: 'review' is empty"),
        ("review,stars\nfine,\n", r"a\.csv:2: 'stars' is empty"),
        ("review,review\nfine,1\n", "two columns are named 'review'"),
        ("review,stars\n", "has a header but no rows"),
        ("", "is empty"),
    ],
)
def test_faults_of_a_csv_file_name_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    with pytest.raises(DataError, match=message) as error:
        read_classification(tmp_path / "a.csv", STARS)
    assert error.value.hint


def test_a_text_may_be_long(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "review,stars", f'"{"word " * 30_000}",1')
    assert len(read_classification(path, STARS).examples[0].text) == 149_999


def test_other_encodings_are_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("review,stars\nfine,1\ncafé,2\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"a\.csv:3: not UTF-8: byte 0xe9\n.*iconv -f CP1252 -t UTF-8 a\.csv"):
        rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes("review,stars\nfine,1\n".encode("utf-16"))
    with pytest.raises(DataError, match="it is UTF-16"):
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
        read_classification(write(tmp_path / "a.jsonl", *lines), STARS)


@pytest.mark.parametrize("line", ["{{name}} liked it", "[Spoiler] a great film", "[] and {} are brackets", "{} [] too"])
def test_a_text_may_begin_with_a_bracket(tmp_path: Path, line: str) -> None:
    path = tmp_path / "texts"
    path.write_text(f"{line}\nA fine film.\n", encoding="utf-8")
    assert [row.values["text"] for row in open_table(path).rows] == [line, "A fine film."]


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "review,stars", "fine,1")
    with pytest.raises(ConfigError, match="no column 'reviw'; its columns: review, stars") as error:
        classification_columns(path, text="reviw", label="stars")
    assert error.value.hint == "--text: did you mean 'review'?"
    with pytest.raises(ConfigError, match="--pair"):
        classification_columns(path, text="review", pair="other", label="stars")
    tagged = write(tmp_path / "train.txt", "One NN B-NP", "word NN I-NP")
    with pytest.raises(ConfigError, match="read as plain text") as error:
        open_table(tagged).require("0", "--words")
    assert "files.format=conll" in str(error.value.hint)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Review,Stars", ("Review", None, "Stars")),
        ("premise,hypothesis,gold_label", ("premise", "hypothesis", "gold_label")),
        ("words,what", None),
        ("comment,kind", ("comment", None, "kind")),
        (",text,label", ("text", None, "label")),
    ],
)
def test_columns_are_recognized_by_name(tmp_path: Path, header: str, expected: tuple[str, str | None, str] | None) -> None:
    path = write(tmp_path / "a.csv", header, ",".join("xyz"[: header.count(",") + 1]))
    if expected is None:
        with pytest.raises(ConfigError, match="cannot recognize the column for --text; its columns: words, what") as error:
            classification_columns(path)
        assert error.value.hint == "name it: --text COLUMN"
        return
    found = classification_columns(path)
    assert (found.text, found.pair, found.label) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "context,question,answer\na,b,c\n",
            "to fine-tune on answers: --question question --context context --answer answer",
        ),
        ("a.csv", "id,tokens,ner_tags\n1,a,O\n", "to fine-tune on tags: --words tokens --tags ner_tags"),
        ("a.csv", "the film was very bad;bad\nthe film was good;good\n", "the first line is not a header"),
        ("a.csv", "A fine film\t1\nA bad film\t0\n", "the first line is not a header"),
        ("a.csv", "The only text of this file is lost.\n", "the first line is not a header"),
        ("a.tsv", "text;label\na;b\n", "has a single column, but its first line has several separated by ';'"),
        ("a.json", '{"version": "1.1", "data": []}\n', "is one JSON object"),
        ("a.json", '{\n "model": "x",\n "size": 3\n}\n', "is one JSON object"),
        (
            "a.csv",
            "text,labels\nx,a;b\ny,\nz,b\n",
            r"'labels' is empty in 1 of 3 rows, and 'a;b' .*\n.*files.label_separator=';'",
        ),
    ],
)
def test_advice_follows_from_what_the_file_is(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises((ConfigError, DataError), match=message):
        classification_columns(path)


@pytest.mark.parametrize(
    ("values", "kind", "labels"),
    [
        ([5, 3, 5], "label", ["5", "3", "5"]),
        ([5.0, 3.0], "label", ["5", "3"]),
        ([True, False], "label", ["true", "false"]),
        ([4.5, 3], "number", [4.5, 3.0]),
        ([["a", "b"], []], "labels", [("a", "b"), ()]),
        (['["a", "a"]', "[]"], "labels", [("a",), ()]),
        (["4.5", "often"], "label", ["4.5", "often"]),
    ],
)
def test_the_kind_of_label_follows_the_values(tmp_path: Path, values: list[object], kind: str, labels: list[object]) -> None:
    path = write(tmp_path / "a.jsonl", *[json.dumps({"text": "x", "label": value}) for value in values])
    columns = classification_columns(path)
    assert columns.kind == kind
    assert [example.label for example in read_classification(path, columns).examples] == labels


def test_several_labels_parted_by_a_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label", "x,a; b", "y,")
    columns = classification_columns(path, separator=";")
    assert [example.label for example in read_classification(path, columns).examples] == [("a", "b"), ()]
    with pytest.raises(DataError, match=r"a\.csv:2: 'label' is not a list") as error:
        read_classification(path, ClassificationColumns("text", label="label", kind="labels"))
    assert "--set files.label_separator=" in str(error.value.hint)


@pytest.mark.parametrize("wrong", ["nan", "inf", "", "4,5"])
def test_a_score_that_is_no_finite_number_is_an_error(tmp_path: Path, wrong: str) -> None:
    path = write(tmp_path / "a.csv", "text,score", "x,1.5", f'y,"{wrong}"')
    with pytest.raises(DataError, match=r"a\.csv:3: 'score' is .*expected a finite number") as error:
        read_classification(path, classification_columns(path, kind="number"))
    assert "--set files.label_kind=label" in str(error.value.hint)


def test_nan_among_numbers_is_no_class(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,score", "x,1", "y,nan")
    with pytest.raises(DataError, match=r"a\.csv:3"):
        read_classification(path, classification_columns(path))


def test_what_was_read_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "review,stars,other", "fine,good,", "bad,poor,", "nice,good,")
    reading = read_classification(path, classification_columns(path))
    assert reading.examples[1] == ClassificationExample("1", "bad", None, "poor")
    assert reading.notes == ("columns: text = 'review', label = 'stars'", "2 labels: good 2, poor 1")
    assert reading.places == tuple(f"{path}:{line}" for line in (2, 3, 4))
    without = read_classification(path, STARS, labeled=False)
    assert {example.label for example in without.examples} == {None}


def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"review": "a\\ud83d b", "stars": "1"}')
    assert read_classification(path, STARS).examples[0].text == "a\ufffd b"
    path = write(tmp_path / "q.jsonl", '{"question": "\\ud83d?", "context": "a\\ud83d b", "answer": "b"}')
    columns = question_columns(path)
    for example in (*read_questions(path, columns).examples, *question_rows(open_table(path), columns)):
        assert (example.question, example.context) == ("\ufffd?", "a\ufffd b")


def test_tags_as_lists_and_as_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"tokens": ["New York", "sleeps"], "ner_tags": ["B-LOC", "O"]}',
        '{"tokens": "It rains", "ner_tags": [0, 1]}',
    )
    columns = tagging_columns(path)
    assert columns == TaggingColumns("tokens", "ner_tags")
    assert [(example.words, example.tags) for example in read_tagging(path, columns).examples] == [
        (("New York", "sleeps"), ("B-LOC", "O")),
        (("It", "rains"), ("0", "1")),
    ]
    path = write(tmp_path / "a.csv", "words,tags", "It rains,O O", "It rains a lot,O O O")
    with pytest.raises(DataError, match=r"a\.csv:3: 4 words in 'words' but 3 tags in 'tags'"):
        read_tagging(path, tagging_columns(path))


def test_questions_of_ones_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "question,context,answer,answer_start",
        "Which?, the red and the red one,red,17",
        "Which?,the red and the red one,red,",
        "Which?,the red one,blue,",
        "Which?,the red one,,",
    )
    columns = question_columns(path)
    assert columns == QuestionColumns("question", "context", "answer", "answer_start")
    reading = read_questions(path, columns)
    first, second, fourth = reading.examples
    assert (first.context, first.answers) == (" the red and the red one", (Answer("red", 17),))
    assert second.answers == (Answer("red", 4),)
    assert (fourth.id, fourth.answers, fourth.impossible) == ("3", (), True)
    assert [problem.count for problem in reading.problems] == [1, 1]
    assert f"{path}:4 question 2: 'blue'" in str(reading.problems[0])
    assert "1 of 3 questions have no answer" in reading.notes
    kept = read_questions(path, columns, keep_unfound=True).examples
    assert (kept[2].answers, kept[2].golds) == ((), ("blue",))


def test_questions_with_answers_as_objects(tmp_path: Path) -> None:
    answers = {"text": ["red", "the red"], "answer_start": [4, 0]}
    path = write(tmp_path / "a.jsonl", json.dumps({"question": "Which?", "context": "the red one", "answers": answers}))
    (example,) = read_questions(path, question_columns(path)).examples
    assert example.answers == (Answer("red", 4), Answer("the red", 0))


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b")
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        open_table(path, "jsonll")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot be read"):
        open_table(tmp_path / "missing.csv")
