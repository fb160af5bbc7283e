"""Pairs of texts, texts alone, and folders of queries and documents: their columns, and what is left out or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.base import Reading, TextGroup
from discern.tasks.readers.text_groups import read_groups, read_retrieval
from tests.tasks.data_folder import write


def read(path: Path, *names: str, training: bool = True, **options: Any) -> Reading[TextGroup]:
    return read_groups(path, dict(zip(("text", "pair", "label"), names, strict=False)), training=training, **options)


def texts_of(reading: Reading[TextGroup]) -> list[tuple[str, ...]]:
    return [example.texts for example in reading.examples]


@pytest.mark.parametrize(
    ("header", "row", "names", "expected"),
    [
        ("anchor,positive,negative_1,negative_2", "a,b,c,", (), (("a", "b", "c"), None)),
        ("sentence1,sentence2,score,negative", "a,b,1,c", (), (("a", "b"), 1.0)),
        ("id,text", "1,a", (), (("a", "a"), None)),
        ("x,y,z", "a,b,3", ("x", "y", "z"), (("a", "b"), 3.0)),
        ("x,text", "a,b", ("x",), (("a", "a"), None)),
        ("sentence1,sentence2,score", "a,b,1", ("x", "y", "z"), (("a", "b"), 1.0)),
    ],
)
def test_columns_are_named_or_recognized(
    tmp_path: Path, header: str, row: str, names: tuple[str, ...], expected: tuple[tuple[str, ...], float | None]
) -> None:
    (example,) = read(write(tmp_path / "a.csv", header, row), *names).examples
    assert (example.texts, example.score) == expected


def test_records_of_json_have_the_negatives_that_they_have(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"anchor": "a", "positive": "b"},
        {"anchor": "c", "positive": "d", "negative": "e"},
        {"anchor": "f", "positive": "g", "negatives": ["h", "", "i"]},
    ]
    reading = read(write(tmp_path / "a.jsonl", *map(json.dumps, records)))
    assert texts_of(reading) == [("a", "b"), ("c", "d", "e"), ("f", "g", "h", "i")]
    assert reading.notes == ("columns: anchor = 'anchor', positive = 'positive', negative = 'negative', negative = 'negatives'",)


def test_lines_of_text_are_their_own_positives(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one", "", "two")
    assert texts_of(read(path)) == [("one", "one"), ("two", "two")]
    with pytest.raises(ConfigError, match="single texts, but an evaluation needs pairs"):
        read(path, training=False)


def test_scores_choose_the_positives_of_a_training_file_and_equal_texts_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "sentence1,sentence2,score", "a,b,5", "c,d,1", "e,e,5")
    reading = read(path, positive_score=4)
    assert texts_of(reading) == [("a", "b")]
    assert [str(problem) for problem in reading.problems] == [
        f"pair with a score below 4, left out: 1 ({path}:3)",
        f"anchor and positive are the same text, left out: 1 ({path}:4)",
    ]
    judged = [(example.texts, example.score) for example in read(path).examples]
    assert judged == [(("a", "b"), 5), (("c", "d"), 1), (("e", "e"), 5)]


@pytest.mark.parametrize(
    ("lines", "options", "error", "said"),
    [
        (["anchor,positive", "a,"], {}, DataError, "'positive' is empty"),
        (["anchor,positive", "a,a"], {}, DataError, "no pairs to use: anchor and positive are the same text, left out: 1"),
        (["anchor,positive"], {}, DataError, "a header but no rows"),
        (["left,right", "a,b"], {}, ConfigError, "its columns: left, right"),
        (["anchor,positive,score", "a,b,high"], {}, DataError, r"a\.csv:2: 'score' is 'high', expected a number"),
        (["anchor,positive", "a,b"], {"positive_score": 4}, ConfigError, "positive_score is 4, but .* has no column of scores"),
        (
            ['{"anchor": "a", "positive": "b", "negative": {"x": 1}}'],
            {},
            DataError,
            "'negative' is .*, expected a text or a list",
        ),
    ],
)
def test_bad_tables_are_refused(
    tmp_path: Path, lines: list[str], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        read(write(tmp_path / "a.csv", *lines), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "queries.jsonl", *(json.dumps({"_id": name, "text": f"query {name}"}) for name in ("q1", "q2")))
    documents = [{"_id": "d1", "text": "one", "title": "The"}, {"_id": "d2", "text": "", "title": "Two"}]
    write(tmp_path / "corpus.jsonl", *map(json.dumps, documents))
    return judge(tmp_path, "q1\td1\t2", "q2\td2\t1", "q2\td1\t0")


def judge(folder: Path, *rows: str, split: str = "test") -> Path:
    write(folder / "qrels" / f"{split}.tsv", "query-id\tcorpus-id\tscore", *rows)
    return folder


def test_a_folder_has_queries_and_then_documents(folder: Path) -> None:
    reading = read_retrieval(folder)
    assert [(example.id, example.texts, example.relevant) for example in reading.examples] == [
        ("q1", ("query q1",), (("d1", 2.0),)),
        ("q2", ("query q2",), (("d2", 1.0),)),
        ("d1", ("The one",), None),
        ("d2", ("Two",), None),
    ]
    assert reading.indivisible
    judge(folder, "q1\td2\t1", "q2\td2\t1", split="dev")
    assert read_retrieval(folder).examples[0].relevant == (("d2", 1.0),)
    assert read_retrieval(folder / "qrels" / "test.tsv").examples == reading.examples


def test_a_query_without_a_relevant_document_is_refused(folder: Path) -> None:
    judge(folder, "q1\td1\t1", "q2\td1\t0")
    with pytest.raises(DataError, match=r"1 of 2 queries have no relevant document in .*, such as 'q2'"):
        read_retrieval(folder)
    reading = read_retrieval(folder, "leave-out")
    assert [example.id for example in reading.examples] == ["q1", "d1", "d2"]
    assert reading.notes == ("1 of 2 queries, which have a relevant document in test.tsv; 2 documents",)


def test_wrong_folders_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"test\.tsv:2: there is no query 'q1' or no document 'd9'"):
        read_retrieval(judge(folder, "q1\td9\t1"))
    write(folder / "corpus.jsonl", '{"_id": "d1", "text": ""}')
    with pytest.raises(DataError, match="'text' is empty"):
        read_retrieval(folder)
    write(folder / "corpus.jsonl", *['{"_id": "d1", "text": "one"}'] * 2)
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: the id 'd1' occurs twice"):
        read_retrieval(folder)
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no corpus\.jsonl"):
        read_retrieval(folder)
