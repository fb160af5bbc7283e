"""SQuAD, MRQA and CMRC files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import DataError
from discern.tasks.base import Answer
from discern.tasks.readers.questions import locate, read_mrqa, read_squad
from tests.tasks.data_folder import data_folder, write

CONTEXT = "Élan  vital: the Rhine, the Rhône and the Rhine."


def squad(path: Path, *questions: dict[str, Any], context: str = CONTEXT) -> Path:
    qas = [{"id": number, "question": "Which?", **question} for number, question in enumerate(questions)]
    return write(path, json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]}))


@pytest.mark.parametrize(
    ("text", "start", "answer"),
    [
        ("Rhine", 17, Answer("Rhine", 17)),
        ("Rhine", 40, Answer("Rhine", 42)),
        ("Rhine", 999, Answer("Rhine", 42)),
        ("Rhine", -5, Answer("Rhine", 17)),
        ("Rhine", None, Answer("Rhine", 17)),
        (" Rhône ", 3, Answer(" Rhône ", 27)),
        ("\nRhône", 3, Answer("Rhône", 28)),
        ("Rhein", 3, None),
        ("", 0, None),
    ],
)
def test_answers_are_located_nearest_to_their_start(text: str, start: int | None, answer: Answer | None) -> None:
    assert locate(CONTEXT, text, start) == answer


def test_squad_answers_are_exact_to_the_character(tmp_path: Path) -> None:
    answers = [{"text": "Élan  vital", "answer_start": 0}, *[{"text": "Rhine", "answer_start": 42}] * 2]
    reading = read_squad(squad(tmp_path / "a.json", {"answers": answers}, {"answers": [], "is_impossible": True}, {}))
    example, impossible, unknown = reading.examples
    assert example.answers == (Answer("Élan  vital", 0), Answer("Rhine", 42))
    assert example.golds == ("Élan  vital", "Rhine", "Rhine")
    assert [question.impossible for question in reading.examples] == [False, True, None]
    assert impossible.golds == unknown.golds == ()
    assert not reading.problems


def test_wrong_starts_are_corrected_and_missing_answers_counted(tmp_path: Path) -> None:
    path = squad(
        tmp_path / "a.json",
        {"answers": [{"text": "Rhône", "answer_start": 3}]},
        {"answers": [{"text": "Danube", "answer_start": 3}]},
        {"answers": [{"text": "Danube", "answer_start": 3}, {"text": "Rhine", "answer_start": 17}]},
    )
    reading = read_squad(path)
    assert [example.answers for example in reading.examples] == [(Answer("Rhône", 28),), (), (Answer("Rhine", 17),)]
    assert [problem.count for problem in reading.problems] == [1, 2]
    assert reading.examples[2].golds == ("Danube", "Rhine")
    assert f"{path} question 1: 'Danube'" in str(reading.problems[1])


def test_unlabeled_files_have_no_answers(tmp_path: Path) -> None:
    path = squad(tmp_path / "a.json", {"answers": [{"text": "Danube", "answer_start": 3}]}, {"is_impossible": True})
    reading = read_squad(path, labeled=False)
    assert {(example.golds, example.answers, example.impossible) for example in reading.examples} == {((), (), None)}
    assert not reading.problems


def test_cmrc_in_its_own_format(tmp_path: Path) -> None:
    question = {"query_id": "Q", "query_text": "多少？", "answers": ["39人", 39764.0]}
    path = write(tmp_path / "a.json", json.dumps([{"context_id": "D", "context_text": "共39764人，39人。", "qas": [question]}]))
    (example,) = read_squad(path).examples
    assert example.answers == (Answer("39人", 8), Answer("39764", 1))
    assert example.golds == ("39人", "39764")


def paragraph(**question: Any) -> str:
    return json.dumps([{"context": "c", "qas": [{"id": 1, "question": "q", **question}]}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"dta": []}', "data: Field required; found the keys dta"),
        ("{", "not JSON"),
        ('[{"contxt": ""}]', "data.0.paragraphs.0.context: Field required; found the keys contxt"),
        (paragraph(question=[7]), r"qas.0.question: Input should be a valid string; found \[7\]"),
        (paragraph(answers=["c"], is_impossible=True), "question 1: 'is_impossible' is true, but there are answers"),
        ("[]", "no questions"),
        (json.dumps(json.loads(paragraph()) * 2), "question 1: the id occurs twice"),
    ],
)
def test_errors_in_squad_files(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.json.*{message}") as error:
        read_squad(write(tmp_path / "a.json", content))
    assert error.value.hint


NORTH_SEA = {"text": "North Sea", "char_spans": [[32, 40]], "token_spans": [[0, 0]]}
MRQA_QUESTIONS = [
    {"qid": "a", "question": "Where to ?", "answers": ["North Sea", "the North Sea"], "detected_answers": [NORTH_SEA]},
    {
        "qid": "b",
        "question": "What ?",
        "answers": ["The Rhine"],
        "detected_answers": [{"text": "The Rhine", "char_spans": [[6, 15]]}, NORTH_SEA],
    },
    {"qid": "c", "question": "What ?", "answers": ["Danube"], "detected_answers": [{"text": "Danube", "char_spans": [[6, 11]]}]},
]
MRQA = [
    json.dumps({"header": {"dataset": "made", "split": "dev"}}),
    json.dumps({"context": "[PAR] The  Rhine flows into the North Sea .", "context_tokens": [], "qas": MRQA_QUESTIONS}),
]


def test_mrqa_spans_include_their_last_character(tmp_path: Path) -> None:
    reading = read_mrqa(write(tmp_path / "dev.jsonl", *MRQA))
    first, second, third = reading.examples
    assert first.answers == (Answer("North Sea", 32),)
    assert first.golds == ("North Sea", "the North Sea")
    assert second.answers == (Answer("The  Rhine", 6), Answer("North Sea", 32))
    assert (third.answers, third.golds) == ((), ("Danube",))
    assert [problem.count for problem in reading.problems] == [1]
    assert f"{tmp_path / 'dev.jsonl'}:2 question c: 'Danube'" in str(reading.problems[0])


def test_mrqa_compressed_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl.gz"
    path.write_bytes(gzip.compress(MRQA[1].encode()))
    assert len(read_mrqa(path).examples) == 3


def test_errors_in_mrqa_files_name_the_line(tmp_path: Path) -> None:
    detected = {"text": "c", "char_spans": [[1]]}
    question = {"qid": "1", "question": "q", "detected_answers": [detected]}
    path = write(tmp_path / "a.jsonl", json.dumps({"context": "c", "qas": [question]}))
    with pytest.raises(DataError, match=r"a\.jsonl:1.*char_spans.0.1: Field required; found \[1\]"):
        read_mrqa(path)


def test_real_files() -> None:
    reading = read_squad(data_folder("squad2", "dev.json"))
    assert len(reading.examples) == 1629
    assert sum(example.impossible is True for example in reading.examples) == 826
    assert not reading.problems
    reading = read_squad(data_folder("zh", "cmrc2018", "cmrc2018_dev.json"))
    missing = next(problem for problem in reading.problems if "does not occur" in problem.kind)
    assert 150 < missing.count < 200  # numbers written as numbers are found
    # Every question has another answer that does occur.
    assert len(reading.examples) == 3219
    assert all(example.answers for example in reading.examples)
