"""Users' tables: which columns have which role, what kind the labels are, and every fault with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.data.tables import open_table
from discern.errors import ConfigError, DataError
from discern.tasks.base import Answer, ClassificationExample, Layout, Reading
from discern.tasks.questions import Questions
from discern.tasks.rows import read_tags, read_texts, recognize_layout
from tests.tasks.data_folder import write


def columns(path: Path, given: dict[str, str] | None = None, **options: Any) -> dict[str, str]:
    family, layout = recognize_layout(path, given or {}, **options)
    return {"family": family, "kind": layout.kind, **{role: names[0] for role, names in layout.columns.items()}}


def texts(path: Path, *, labeled: bool = True, **options: Any) -> Reading[ClassificationExample]:
    return read_texts(path, recognize_layout(path, {}, **options)[1], (), labeled=labeled)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Review,Stars", {"text": "Review", "label": "Stars"}),
        ("premise,hypothesis,gold_label", {"text": "premise", "pair": "hypothesis", "label": "gold_label"}),
        ("comment,kind", {"text": "comment", "label": "kind"}),
        (",text,label", {"text": "text", "label": "label"}),
        ("context,question,answer", {"question": "question", "context": "context", "answer": "answer"}),
        ("id,tokens,ner_tags", {"words": "tokens", "tags": "ner_tags"}),
        ("text,tags", {"text": "text", "label": "tags"}),
    ],
)
def test_the_names_of_the_columns_decide_the_family(tmp_path: Path, header: str, expected: dict[str, str]) -> None:
    path = write(tmp_path / "a.csv", header, ",".join("xyz"[: header.count(",") + 1]))
    recognized = columns(path)
    family = "questions" if "question" in expected else "tagging" if "words" in expected else "classification"
    assert recognized == {"family": family, "kind": "label", **expected}


def test_given_columns_decide_the_family_and_missing_ones_name_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "review,stars", "fine,1")
    assert columns(path, {"words": "review", "tags": "stars"})["family"] == "tagging"
    with pytest.raises(ConfigError, match="no column 'reviw'; its columns: review, stars") as error:
        columns(path, {"text": "reviw", "label": "stars"})
    assert error.value.hint == "--text: did you mean 'review'?"
    with pytest.raises(ConfigError, match="--pair"):
        columns(path, {"text": "review", "pair": "other", "label": "stars"})
    with pytest.raises(ConfigError, match="the columns are for different tasks: tagging and classification"):
        columns(path, {"text": "review", "tags": "stars"})
    tagged = write(tmp_path / "train.txt", "One NN B-NP", "word NN I-NP")
    with pytest.raises(ConfigError, match="read as plain text") as error:
        open_table(tagged).require("0", "--words")
    assert "files.format=conll" in str(error.value.hint)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "words,what\na,b\n", "cannot recognize the column for --text; its columns: words, what\n.*--text COLUMN"),
        ("a.csv", "the film was very bad;bad\nthe film was good;good\n", "the first line is not a header"),
        ("a.csv", "A fine film\t1\nA bad film\t0\n", "the first line is not a header"),
        ("a.csv", "The only text of this file is lost.\n", "the first line is not a header"),
        ("a.csv", "text,labels\nx,a;b\ny,\nz,b\n", r"'labels' is empty in 1 of 3 rows, and 'a;b' .*\n.*--label-separator ';'"),
    ],
)
def test_advice_follows_from_what_the_file_is(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((ConfigError, DataError), match=message):
        columns(tmp_path / name)


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
    assert columns(path)["kind"] == kind
    assert [example.label for example in texts(path).examples] == labels


def test_several_labels_in_a_cell_need_their_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label", "x,a; b", "y,")
    assert [example.label for example in texts(path, separator=";").examples] == [("a", "b"), ()]
    with pytest.raises(DataError, match=r"a\.csv:2: 'label' is not a list.*\n.*--label-separator"):
        texts(path, kind="labels")
    heard: list[str] = []
    columns(write(tmp_path / "b.csv", "text,label", "x,a;b", "y,b"), warn=heard.append)
    assert "the column 'label' has labels such as 'a;b', each treated as one class" in heard[0]
    assert "--label-separator ';'" in heard[0]


@pytest.mark.parametrize(("prefix", "hint"), [("", "--set files.label_kind=number"), ("x", "--label COLUMN")])
def test_nearly_as_many_classes_as_rows_are_refused_unless_the_kind_is_given(tmp_path: Path, prefix: str, hint: str) -> None:
    path = write(tmp_path / "a.csv", "text,label", *(f"text {n},{prefix}{n}" for n in range(30)))
    with pytest.raises(DataError, match=r"the column 'label' has 30 different labels in 30 rows, such as .*too many") as caught:
        columns(path)
    assert hint in str(caught.value.hint)
    assert columns(path, kind="label")["kind"] == "label"
    half = write(tmp_path / "b.csv", "text,label", *(f"text {n},{n % 20}" for n in range(40)))
    assert columns(half)["kind"] == "label"


@pytest.mark.parametrize("wrong", ["nan", "inf", "", "4,5"])
def test_a_score_that_is_no_finite_number_is_an_error(tmp_path: Path, wrong: str) -> None:
    path = write(tmp_path / "a.csv", "text,score", "x,1.5", f'y,"{wrong}"')
    with pytest.raises(DataError, match=r"a\.csv:3: 'score' is .*expected a finite number") as error:
        texts(path, kind="number")
    assert "--set files.label_kind=label" in str(error.value.hint)


def test_nan_among_numbers_is_no_class(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,score", "x,1", "y,nan")
    with pytest.raises(DataError, match=r"a\.csv:3"):
        texts(path)


def test_what_was_read_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "review,stars,other", "fine,good,", "bad,poor,", "nice,good,")
    reading = texts(path)
    assert reading.examples[1] == ClassificationExample("1", "bad", None, "poor")
    assert reading.notes == ("columns: text = 'review', label = 'stars'", "2 labels: good 2, poor 1")
    assert reading.places == tuple(f"{path}:{line}" for line in (2, 3, 4))
    assert {example.label for example in texts(path, labeled=False).examples} == {None}


def test_the_record_of_a_layout_reads_the_same(tmp_path: Path) -> None:
    from dataclasses import asdict

    conll = write(tmp_path / "a.conll", "the DT B-NP", "model NN I-NP")
    table = write(tmp_path / "a.csv", "words,tags", "it rains,O B-X")
    for path, given in ((conll, {"tags": "1"}), (table, {})):
        _, layout = recognize_layout(path, given)
        assert Layout.of_record(json.loads(json.dumps(asdict(layout)))) == layout


def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud83d b", "label": "1"}')
    assert texts(path).examples[0].text == "a\ufffd b"
    path = write(tmp_path / "q.jsonl", '{"question": "\\ud83d?", "context": "a\\ud83d b", "answer": "b"}')
    _, layout = recognize_layout(path, {})
    (example,) = Questions.rows(open_table(path), layout)
    assert (example.question, example.context) == ("\ufffd?", "a\ufffd b")


def test_tags_as_lists_and_as_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"tokens": ["New York", "sleeps"], "ner_tags": ["B-LOC", "O"]}',
        '{"tokens": "It rains", "ner_tags": [0, 1]}',
    )
    _, layout = recognize_layout(path, {})
    assert [(example.words, example.tags) for example in read_tags(path, layout, training=True).examples] == [
        (("New York", "sleeps"), ("B-LOC", "O")),
        (("It", "rains"), ("0", "1")),
    ]
    path = write(tmp_path / "a.csv", "words,tags", "It rains,O O", "It rains a lot,O O O")
    with pytest.raises(DataError, match=r"a\.csv:3: 4 words in 'words' but 3 tags in 'tags'"):
        read_tags(path, recognize_layout(path, {})[1], training=True)


def questions(path: Path, split: str = "train") -> Reading[Any]:
    from discern.tasks.base import Definition

    _, layout = recognize_layout(path, {})
    definition: Definition[Any] = Definition("own", Questions, ("exact_match",), layout=layout)
    return definition.read(path, split, Questions.Config())


def test_questions_of_ones_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "question,context,answer,answer_start",
        "Which?, the red and the red one,red,17",
        "Which?,the red and the red one,red,",
        "Which?,the red one,blue,",
        "Which?,the red one,,",
    )
    assert columns(path)["start"] == "answer_start"
    reading = questions(path)
    first, second, fourth = reading.examples
    assert (first.context, first.answers) == (" the red and the red one", (Answer("red", 17),))
    assert second.answers == (Answer("red", 4),)
    assert (fourth.id, fourth.answers, fourth.impossible) == ("3", (), True)
    assert [problem.count for problem in reading.problems] == [1, 1]
    assert f"{path}:4 question 2: 'blue'" in str(reading.problems[0])
    assert "1 of 3 questions have no answer" in reading.notes
    kept = questions(path, "dev").examples
    assert (kept[2].answers, kept[2].golds) == ((), ("blue",))


def test_questions_with_answers_as_objects(tmp_path: Path) -> None:
    answers = {"text": ["red", "the red"], "answer_start": [4, 0]}
    path = write(tmp_path / "a.jsonl", json.dumps({"question": "Which?", "context": "the red one", "answers": answers}))
    (example,) = questions(path).examples
    assert example.answers == (Answer("red", 4), Answer("the red", 0))
