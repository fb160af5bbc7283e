"""SQuAD, MRQA and CMRC files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import DataError
from discern.tasks.examples import Answer
from discern.tasks.mrqa import read_mrqa
from discern.tasks.readers.answers import locate
from discern.tasks.readers.files import split_file
from discern.tasks.squad import SQUAD_FILES, read_squad
from tests.tasks.data_folder import data_folder, write

CONTEXT = "Élan  vital: the Rhine, the Rhône and the Rhine."


def squad(path: Path, *questions: dict[str, Any], context: str = CONTEXT) -> Path:
    asked = [{"id": str(number), "question": "Which?", **question} for number, question in enumerate(questions)]
    return write(
        path, json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": asked}]}]})
    )


def test_answers_are_found_nearest_to_where_they_should_be() -> None:
    assert locate(CONTEXT, "Rhine", 17) == Answer("Rhine", 17)
    assert locate(CONTEXT, "Rhine", 18) == Answer("Rhine", 17)
    assert locate(CONTEXT, "Rhine", 40) == Answer("Rhine", 42)
    assert locate(CONTEXT, "Rhine", 999) == Answer("Rhine", 42)
    assert locate(CONTEXT, "Rhine", -5) == Answer("Rhine", 17)
    assert locate(CONTEXT, "Rhine") == Answer("Rhine", 17)
    assert locate(CONTEXT, " Rhône ", 3) == Answer(" Rhône ", CONTEXT.index(" Rhône"))
    assert locate(CONTEXT, "\nRhône", 3) == Answer("Rhône", CONTEXT.index("Rhône"))
    assert locate(CONTEXT, "Rhein", 3) is None
    assert locate(CONTEXT, " ", 3) == Answer(" ", 4)
    assert locate("abc", "", 0) is None


def test_squad_answers_are_exact_to_the_character(tmp_path: Path) -> None:
    answers = [
        {"text": "Élan  vital", "answer_start": 0},
        {"text": "Rhine", "answer_start": 42},
        {"text": "Rhine", "answer_start": 42},
    ]
    reading = read_squad(squad(tmp_path / "a.json", {"answers": answers}))
    (example,) = reading.examples
    assert example.answers == (Answer("Élan  vital", 0), Answer("Rhine", 42))
    assert example.golds == ("Élan  vital", "Rhine", "Rhine")
    assert example.impossible is False
    assert not reading.problems
    for answer in example.answers:
        assert example.context[answer.start : answer.start + len(answer.text)] == answer.text


def test_wrong_starts_are_put_right_and_missing_answers_counted(tmp_path: Path) -> None:
    path = squad(
        tmp_path / "a.json",
        {"answers": [{"text": "Rhône", "answer_start": 3}]},
        {"answers": [{"text": "Danube", "answer_start": 3}]},
        {"answers": [{"text": "Danube", "answer_start": 3}, {"text": "Rhine", "answer_start": 17}]},
    )
    reading = read_squad(path)
    assert [(example.id, example.answers[0].text) for example in reading.examples] == [("0", "Rhône"), ("2", "Rhine")]
    assert [problem.count for problem in reading.problems] == [1, 2, 1]
    assert reading.examples[1].golds == ("Danube", "Rhine")
    assert "'Danube'" in str(reading.problems[1])
    assert len(read_squad(path, keep_unfound=True).examples) == 3


def test_a_start_that_is_no_number_is_searched_for(tmp_path: Path) -> None:
    answer = {"text": "c", "answer_start": float("nan")}
    path = squad(tmp_path / "a.json", {"id": "1", "question": "q", "answers": [answer]}, context="a b c")
    (example,) = read_squad(path).examples
    assert [each.start for each in example.answers] == [4]


def test_questions_without_answers(tmp_path: Path) -> None:
    path = squad(tmp_path / "a.json", {"answers": [], "is_impossible": True}, {})
    impossible, unknown = read_squad(path).examples
    assert (impossible.impossible, impossible.golds) == (True, ())
    assert unknown.impossible is None


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"is_impossible": "false", "answers": []}, "'is_impossible' is 'false', expected true or false"),
        ({"is_impossible": True, "answers": [{"text": "c", "answer_start": 0}]}, "true, but there are answers"),
    ],
)
def test_marks_that_contradict_the_answers_are_refused(tmp_path: Path, question: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_squad(squad(tmp_path / "a.json", question, context="c"))


def test_answers_that_are_not_looked_at(tmp_path: Path) -> None:
    answers = [{"text": "Danube", "answer_start": 3}]
    path = squad(tmp_path / "a.json", {"answers": answers}, {"answers": [], "is_impossible": True})
    for reading in (
        read_squad(path, keep_unfound=True, labeled=False),
        read_mrqa(write(tmp_path / "a.jsonl", *mrqa_lines()), keep_unfound=True, labeled=False),
    ):
        assert {(example.golds, example.answers, example.impossible) for example in reading.examples} == {((), (), None)}
        assert not reading.problems


def test_cmrc_in_its_own_form(tmp_path: Path) -> None:
    question = {"query_id": "Q", "query_text": "多少？", "answers": ["39人", 39764.0]}
    path = write(tmp_path / "a.json", json.dumps([{"context_id": "D", "context_text": "共39764人，39人。", "qas": [question]}]))
    (example,) = read_squad(path).examples
    assert example.answers == (Answer("39人", 8), Answer("39764", 1))
    assert example.golds == ("39人", "39764")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"dta": []}', "not in SQuAD's format: its keys: dta"),
        ("{", "not JSON"),
        ("[1]", "not in SQuAD's format"),
        ('{"data": [{"paragraphs": [{"contxt": ""}]}]}', "article 0 paragraph 0: no 'context'; it has: contxt"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": 7}]}]}]}', "question 1: 'question' is empty"),
        ('{"data": []}', "has no usable questions"),
        ('{"data": [{"paragraphs": null}]}', "article 0: 'paragraphs' is not a list"),
        (
            json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": "q"}] * 2}]}]}),
            "the id occurs twice",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_squad(write(tmp_path / "a.json", content))
    assert error.value.hint


def mrqa_lines(header: bool = True) -> list[str]:
    context = "[PAR] The  Rhine flows into the North Sea ."
    start = context.index("North")
    answer = {"text": "North Sea", "char_spans": [[start, start + 8]], "token_spans": [[0, 0]]}
    spaced = {"text": "The Rhine", "char_spans": [[6, 15]]}
    questions = [
        {"qid": "a", "question": "Where to ?", "answers": ["North Sea", "the North Sea"], "detected_answers": [answer]},
        {"qid": "b", "question": "What ?", "answers": ["The Rhine"], "detected_answers": [spaced, answer]},
        {
            "qid": "c",
            "question": "What ?",
            "answers": ["Danube"],
            "detected_answers": [{"text": "Danube", "char_spans": [[6, 11]]}],
        },
    ]
    lines = [json.dumps({"header": {"dataset": "made", "split": "dev"}})] if header else []
    return [*lines, json.dumps({"context": context, "context_tokens": [], "qas": questions})]


def test_mrqa_spans_include_their_last_character(tmp_path: Path) -> None:
    reading = read_mrqa(write(tmp_path / "dev.jsonl", *mrqa_lines()))
    first, second = reading.examples
    assert first.answers == (Answer("North Sea", 32),)
    assert first.golds == ("North Sea", "the North Sea")
    assert second.answers == (Answer("The  Rhine", 6), Answer("North Sea", 32))
    assert reading.notes == ("data set made, split dev",)
    assert [problem.count for problem in reading.problems] == [1, 1]
    assert f"{tmp_path / 'dev.jsonl'}:2 question c: 'Danube'" in str(reading.problems[0])


def test_mrqa_compressed_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(mrqa_lines(header=False)).encode()))
    assert len(read_mrqa(path).examples) == 2
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged or cut short"):
        read_mrqa(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "not a JSON object"),
        ('{"context": "c"}', "no list 'qas'"),
        ('{"qas": []}', "'context' is missing"),
        ('{"context": "c", "qas": [{"question": "q"}]}', "without 'qid'"),
        ('{"context": "c", "qas": [{"qid": "1", "question": "q", "answers": "Paris"}]}', "'answers' is not a list"),
        ('{"context": "c", "qas": [{"qid": "1", "question": "q", "detected_answers": {"text": "c"}}]}', "is not a list"),
        (
            '{"context": "c", "qas": [{"qid": "1", "question": "q", "detected_answers": [{"text": "c", "char_spans": [[1]]}]}]}',
            "not a pair",
        ),
        (
            '{"context": "c", "qas": [{"qid": "1", "question": "q", "detected_answers": [{"text": "c", "char_spans": 5}]}]}',
            "'char_spans' is 5, expected a list",
        ),
    ],
)
def test_faults_of_mrqa_files_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:1.*{message}"):
        read_mrqa(write(tmp_path / "a.jsonl", line))


@pytest.mark.parametrize(
    ("folder", "split", "questions", "impossible"),
    [("squad1", "train", 4961, 0), ("squad1", "dev", 5609, 0), ("squad2", "train", 4449, 2342), ("squad2", "dev", 1629, 826)],
)
def test_real_squad_files(folder: str, split: str, questions: int, impossible: int) -> None:
    reading = read_squad(split_file(data_folder(folder), SQUAD_FILES[split], folder))
    assert len(reading.examples) == questions
    assert sum(bool(example.impossible) for example in reading.examples) == impossible
    assert not reading.problems


def test_real_cmrc_answers_that_do_not_occur_are_counted() -> None:
    folder = data_folder("zh", "cmrc2018")
    reading = read_squad(folder / "cmrc2018_dev.json", keep_unfound=True)
    assert len(reading.examples) == 3219
    missing = next(problem for problem in reading.problems if "does not occur" in problem.kind)
    assert 150 < missing.count < 200  # numbers written as numbers are found
    trained = read_squad(folder / "cmrc2018_dev.json").examples
    # Every question has another answer that does occur.
    assert len(trained) == 3219
    assert all(example.answers for example in trained)
    # Two of its 1,002 questions have no text.
    assert len(read_squad(folder / "cmrc2018_trial.json").examples) == 1000
    assert len(read_squad(folder / "cmrc2018_trial.json", keep_unfound=True).examples) == 1002
