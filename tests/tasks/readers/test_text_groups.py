"""Pairs of texts, texts alone, and folders of queries and documents: their columns, and what is left out or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.tasks.readers.text_groups import GroupColumns, read_groups, read_retrieval
from tests.tasks.data_folder import write


def texts_of(path: Path, *, training: bool = True, **options: Any) -> list[tuple[str, ...]]:
    return [each.texts for each in read_groups(path, GroupColumns(), training=training, **options).examples]


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("anchor,positive", "a,b", ("a", "b")),
        ("anchor,positive,negative", "a,b,c", ("a", "b", "c")),
        ("anchor,positive,negative_1,negative_2", "a,b,c,", ("a", "b", "c")),
        ("query,document", "a,b", ("a", "b")),
        ("Premise,Hypothesis,id", "a,b,1", ("a", "b")),
        ("text", "a", ("a", "a")),
        ("id,content", "1,a", ("a", "a")),
    ],
)
def test_columns_are_recognized(tmp_path: Path, header: str, row: str, expected: tuple[str, ...]) -> None:
    assert texts_of(write(tmp_path / "a.csv", header, row)) == [expected]


def test_records_of_json_have_the_negatives_that_they_have(tmp_path: Path) -> None:
    records = [
        {"anchor": "a", "positive": "b"},
        {"anchor": "c", "positive": "d", "negative": "e"},
        {"anchor": "f", "positive": "g", "negatives": ["h", "", "i"]},
    ]
    path = write(tmp_path / "a.jsonl", *map(json.dumps, records))
    found = read_groups(path, GroupColumns(), training=True)
    assert [each.texts for each in found.examples] == [("a", "b"), ("c", "d", "e"), ("f", "g", "h", "i")]
    assert found.notes == (
        "columns: anchor = 'anchor', positive = 'positive', negative 1 = 'negative', negative 2 = 'negatives'",
    )
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'negative' is \{'x': 1\}, expected a text or a list of texts"):
        texts_of(write(tmp_path / "a.jsonl", json.dumps({"anchor": "a", "positive": "b", "negative": {"x": 1}})))


def test_lines_of_text_are_their_own_positives(tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / "a.txt", "one", "", "two")) == [("one", "one"), ("two", "two")]


def test_named_columns_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,y,z", "a,b,3")
    (example,) = read_groups(path, GroupColumns("x", "y", "z"), training=False).examples
    assert (example.texts, example.score) == (("a", "b"), 3.0)


def test_the_partner_of_a_named_second_text_is_recognized(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,anchor,positive", "1,a,b")
    (example,) = read_groups(path, GroupColumns(pair="positive"), training=True).examples
    assert example.texts == ("a", "b")
    with pytest.raises(ConfigError, match="no columns for pairs"):
        read_groups(write(tmp_path / "b.csv", "one,two", "a,b"), GroupColumns(pair="two"), training=True)


@pytest.mark.parametrize(("header", "judged"), [("sentence1,sentence2,score", False), ("sentence1,sentence2,other", True)])
def test_judged_pairs_to_predict_are_all_kept(tmp_path: Path, header: str, judged: bool) -> None:
    path = write(tmp_path / "a.csv", header, "a cat,a cat,5", "a cat,a dog,1")
    found = read_groups(path, GroupColumns(), training=False, labeled=False, judged=judged).examples
    assert [(each.texts, each.score, each.judged) for each in found] == [
        (("a cat", "a cat"), None, True),
        (("a cat", "a dog"), None, True),
    ]


def test_what_teaches_nothing_is_left_out_and_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "anchor,positive,negative", "a,a,c", "a,b,b", "a,b,c")
    found = read_groups(path, GroupColumns(), training=True)
    assert [each.texts for each in found.examples] == [("a", "b"), ("a", "b", "c")]
    assert [problem.kind for problem in found.problems] == [
        "anchor and positive are the same text, left out",
        "negative that is also another text of its row, left out",
    ]
    assert found.place(0) == f"{path}:3"


def test_scores_choose_the_positives_of_a_training_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "sentence1,sentence2,score", "a,b,5", "c,d,1", "e,e,5")
    assert texts_of(path, positive_score=4) == [("a", "b")]
    assert [each.score for each in read_groups(path, GroupColumns(), training=False).examples] == [5, 1, 5]
    judged = read_groups(path, GroupColumns(), training=True).examples
    assert [(each.texts, each.score) for each in judged] == [(("a", "b"), 5), (("c", "d"), 1), (("e", "e"), 5)]
    without = write(tmp_path / "b.csv", "sentence1,sentence2", "a,b")
    with pytest.raises(ConfigError, match=r"positive_score is 4, but .* has no column of scores"):
        texts_of(without, positive_score=4)


@pytest.mark.parametrize(
    ("lines", "error", "said"),
    [
        (["anchor,positive", "a,"], DataError, "'positive' is empty"),
        (["anchor,positive", ",b"], DataError, "'anchor' is empty"),
        (["anchor,positive", "a,a"], DataError, "no pairs to use: anchor and positive are the same text, left out: 1"),
        (["left,right", "a,b"], ConfigError, "its columns: left, right"),
        (["anchor,positive"], DataError, "a header but no rows"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, lines: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        texts_of(write(tmp_path / "a.csv", *lines))


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv:2: 'score' is 'high', expected a number"):
        texts_of(write(tmp_path / "a.csv", "anchor,positive,score", "a,b,high"), training=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "qrels").mkdir()
    write(tmp_path / "queries.jsonl", *(json.dumps({"_id": name, "text": f"query {name}"}) for name in ("q1", "q2")))
    documents = [{"_id": "d1", "text": "one", "title": "The"}, {"_id": "d2", "text": "two"}]
    write(tmp_path / "corpus.jsonl", *map(json.dumps, documents))
    write(tmp_path / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "q1\td1\t2", "q2\td2\t1", "q2\td1\t0")
    return tmp_path


def test_a_folder_has_queries_and_then_documents(folder: Path) -> None:
    found = read_retrieval(folder, "dev")
    assert [each.id for each in found.examples] == ["q1", "q2", "d1", "d2"]
    assert found.examples[0].relevant == (("d1", 2.0),)
    assert found.examples[1].relevant == (("d2", 1.0),)
    assert found.examples[2].texts == ("The one",)
    assert found.indivisible


def test_a_document_may_be_a_title_alone(folder: Path) -> None:
    write(folder / "corpus.jsonl", '{"_id": "d1", "title": "The", "text": ""}', '{"_id": "d2", "title": "", "text": "two"}')
    assert [each.texts for each in read_retrieval(folder, "dev").examples[2:]] == [("The",), ("two",)]
    write(folder / "corpus.jsonl", '{"_id": "d1", "title": "", "text": ""}')
    with pytest.raises(DataError, match="'text' is empty"):
        read_retrieval(folder, "dev")


def test_a_judgment_that_is_repeated_counts_once(folder: Path) -> None:
    rows = ["query-id\tcorpus-id\tscore", "q1\td1\t2", "q1\td1\t2", "q2\td2\t1"]
    write(folder / "qrels" / "test.tsv", *rows)
    assert read_retrieval(folder, "test").examples[0].relevant == (("d1", 2.0),)
    write(folder / "qrels" / "test.tsv", *rows, "q1\td1\t1")
    with pytest.raises(DataError, match=r"5: document 'd1' has grade 1 for query 'q1', but 2 in an earlier row"):
        read_retrieval(folder, "test")


def test_a_query_without_a_relevant_document_is_refused(folder: Path) -> None:
    write(folder / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "q1\td1\t1", "q2\td1\t0")
    with pytest.raises(DataError, match=r"1 of 2 queries have no relevant document in .*, such as 'q2'"):
        read_retrieval(folder, "test")
    found = read_retrieval(folder, "test", "leave-out")
    assert [each.id for each in found.examples] == ["q1", "d1", "d2"]
    assert "queries without a relevant document, left out: 1" in found.notes


def test_unknown_ids_and_missing_files_are_refused(folder: Path) -> None:
    write(folder / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "q1\td9\t1")
    with pytest.raises(DataError, match=r"test\.tsv:2: there is no document 'd9'"):
        read_retrieval(folder, "test")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no corpus\.jsonl"):
        read_retrieval(folder, "test")
