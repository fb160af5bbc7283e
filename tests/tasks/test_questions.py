"""Questions from files to scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import DataError
from discern.tasks import tasks
from discern.tasks.base import Answer, QuestionExample, Reading, TextEncoder
from discern.tasks.features import Features
from discern.tasks.questions import CmrcQuestions, QuestionConfig, Questions, Squad2Questions
from tests.tasks.data_folder import data_folder, write
from tests.tasks.support import text_encoder

CONTEXT = "Élan  vital: the Rhône (北京) and 👍🏽 flow to nai\u0308ve seas."


def question(identity: str, text: str, context: str, *answers: str) -> QuestionExample:
    """A question whose answers are at their first occurrence in the context."""
    located = tuple(Answer(answer, context.index(answer)) for answer in answers)
    return QuestionExample(identity, text, context, located, answers, not answers)


EXAMPLES = [
    question("a", "Which river?", CONTEXT, "Rhône", "the Rhône"),
    question("b", "Which force?", CONTEXT, "Élan  vital"),
    question("c", "Which city?", CONTEXT, "北京"),
    question("d", "Which sign?", CONTEXT, "👍🏽"),
    question("e", "Which seas?", CONTEXT, "nai\u0308ve"),
    question("f", "Which color?", CONTEXT),
]
UNFOUND = QuestionExample("g", "Which?", CONTEXT, (), ("Danube",), False)
TEXT = text_encoder(CONTEXT, *(example.question for example in EXAMPLES))


def make(family: type[Questions] = Squad2Questions, **settings: Any) -> Questions:
    labels = family.learn(Reading(tuple(EXAMPLES), "a file"), QuestionConfig(), ())
    return family("squad", QuestionConfig(**settings), ("f1", "exact_match"), labels)


def gold_outputs(features: Features) -> list[dict[str, Any]]:
    """The outputs of a head that is certain of the targets."""
    zeros = [0.0] * len(features)
    starts, ends, impossible = (np.asarray(features.targets.get(name, zeros)) for name in ("start", "end", "impossible"))
    return [
        {"starts": start, "start_scores": np.zeros(1), "ends": end, "end_scores": np.zeros(1), "null": null}
        for start, end, null in zip(starts[:, None], ends[:, None], impossible * 200 - 100, strict=True)
    ]


def test_rows_by_hand() -> None:
    text = text_encoder("abcdefghij?")
    example = question("1", "a b?", "cdefghij", "ef")
    task = make(sequence_length=11, doc_stride=2, max_answer_length=2)
    features = task.encode([example], text, labeled=True)
    asked, context = text.ids(["a b?", "cdefghij"])
    prefix, sep = [text.special.cls, *asked, text.special.sep], text.special.sep
    # A third of 11 positions holds the whole question; five tokens are left, and windows overlap by two or more.
    for row, (start, stop) in enumerate([(0, 5), (2, 7), (4, 8)]):
        assert features.input_ids[row].tolist() == [*prefix, *context[start:stop], sep]
        assert features.token_types[row].tolist() == [0] * 5 + [1] * (stop - start + 1)
    # The window without the answer counts as answerable, as its question does.
    expected = {"start": [7, 5, 0], "end": [8, 6, 0], "impossible": [0, 0, 0]}
    assert {name: np.asarray(column).tolist() for name, column in features.targets.items()} == expected
    assert features.example.tolist() == [0, 0, 0]
    assert task.encode([example], text, labeled=False).targets == {}


def test_notes_say_what_was_cut() -> None:
    example = question("1", "which of all the words is it?", "abcdefghij " * 4, "abcdefghij abcdefghij")
    text = text_encoder(example.question, example.context)
    assert make(sequence_length=24, max_answer_length=20).encode([example], text, labeled=True).notes == (
        "1 of 1 contexts do not fit into a row: 6 rows in total. If the model has the positions, longer rows are fewer: --set "
        "task.sequence_length=48",
        "1 of 1 questions were cut: a question has at most 64 tokens (task.max_query_length) and a third of the row",
        "1 of 1 answers cannot be predicted, because they are longer than task.max_answer_length (20 tokens) or than the window "
        "of a row",
    )
    (note,) = make(max_answer_length=19).encode([example], text, labeled=True).notes
    assert note.startswith("1 of 1 answers cannot be predicted")
    assert not make(max_answer_length=20).encode([example], text, labeled=True).notes


@pytest.mark.parametrize("head", ["joint", "span"])
@pytest.mark.parametrize("length", [48, 384])
def test_gold_positions_give_the_answers_to_the_character(head: str, length: int) -> None:
    task = make(sequence_length=length, head=head)
    features = task.encode(EXAMPLES, TEXT, labeled=True)
    predictions = task.predict(EXAMPLES, features, gold_outputs(features))
    for example, prediction in zip(EXAMPLES, predictions, strict=True):
        located = [Answer(record["text"], record["start"]) for record in prediction["nbest"]]
        assert located == list(example.answers[:1])
        assert prediction["answer"] == prediction["best_answer"] == (example.golds or ("",))[0]
    assert task.mistakes(EXAMPLES, predictions) == []
    json.dumps(predictions, allow_nan=False)


def test_a_question_without_its_answer_in_the_context_is_not_impossible() -> None:
    features = make().encode([EXAMPLES[5], UNFOUND], TEXT, labeled=True)
    assert [np.asarray(features.targets[name]).tolist() for name in ("start", "end", "impossible")] == [[0, 0], [0, 0], [1, 0]]


def test_a_context_without_tokens_has_a_row_and_no_answer() -> None:
    example = replace(UNFOUND, context="\u200d")
    task = make(Questions)
    features = task.encode([example], TEXT, labeled=True)
    (prediction,) = task.predict([example], features, gold_outputs(features))
    assert prediction == {"id": "g", "answer": "", "best_answer": "", "nbest": []}


@pytest.mark.parametrize(
    ("head", "null", "answer"), [("joint", -2.7, ""), ("joint", -2.8, "Rhône"), ("span", 1.1, ""), ("span", 0.9, "Rhône")]
)
def test_the_threshold_decides_what_is_answered(head: str, null: float, answer: str) -> None:
    task = make(head=head, sequence_length=48)
    features = task.encode(EXAMPLES[:1], TEXT, labeled=True)
    row = gold_outputs(features)[0]
    # The window that says least that there is no answer counts.
    answered = row | {"ends": row["ends"] - [0, 1], "end_scores": np.log([3.0, 1.0]), "null": null}
    outputs = [answered] + [row | {"ends": np.zeros(1), "null": null + 1}] * (len(features) - 1)
    (prediction,) = task.predict(EXAMPLES[:1], features, outputs)
    assert prediction["answer"] == answer
    assert prediction["best_answer"] == "Rhône"
    assert prediction["no_answer"] == pytest.approx(null if head == "joint" else null - np.log(3), abs=1e-6)
    assert [record["probability"] for record in prediction["nbest"]] == [0.75, 0.25]


@pytest.mark.parametrize("family", [Questions, Squad2Questions])
def test_scores(family: type[Questions]) -> None:
    predictions = [{"answer": text, "best_answer": text, "no_answer": -9.0} for text in ("the Rhône", "vital")]
    values = make(family).score(EXAMPLES[:2], predictions).values
    assert list(values.items())[:2] == [("f1", pytest.approx(5 / 6)), ("exact_match", 0.5)]
    assert ("best_f1" in values) is family.has_impossible
    assert make(CmrcQuestions).score([EXAMPLES[2]], [{"answer": "北"}]).values["f1"] == pytest.approx(2 / 3)


def test_mistakes_are_worst_first_and_show_the_context() -> None:
    example = question("b", "Which force?", f"{'x' * 100} Élan  vital {'y' * 100}", "Élan  vital")
    answers = ("Rhône", "vital", "Rhône")
    predictions: list[dict[str, Any]] = [{"id": text, "answer": text, "nbest": []} for text in answers]
    scored = [prediction | {"best_answer": prediction["answer"], "no_answer": -9.0} for prediction in predictions]
    partly, wrong = reversed(make().mistakes([EXAMPLES[0], example, EXAMPLES[5]], scored))
    assert (wrong["id"], wrong["gold"], wrong["badness"]) == ("Rhône", [""], 1.0)
    assert partly["text"] == "Which force?"
    assert partly["gold"] == ["Élan  vital"]
    assert partly["context"] == f"...{'x' * 79} Élan  vital {'y' * 68}..."
    assert partly["badness"] == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("examples", "answers", "message"),
    [
        (EXAMPLES[:2], ("", ""), "every answer is empty"),
        (EXAMPLES[:2], ("x", "x"), "every answer is 'x'"),
        (EXAMPLES[:2], ("x", "y"), None),
        (EXAMPLES[:1], ("",), None),
        ([EXAMPLES[5]] * 2, ("", ""), None),
    ],
)
def test_equal_wrong_answers_are_a_failure(
    examples: list[QuestionExample], answers: tuple[str, ...], message: str | None
) -> None:
    predictions = [{"answer": answer, "best_answer": answer, "no_answer": -9.0, "nbest": []} for answer in answers]
    assert make().failure(examples, predictions) == message


def test_files_that_do_not_fit_are_refused() -> None:
    reading = Reading(tuple(EXAMPLES), "a file")
    with pytest.raises(DataError, match="question f has no answer") as error:
        make(Questions).check(reading)
    assert "to the training file too; in SQuAD's format, use --task squad2" in str(error.value.hint)
    with pytest.raises(DataError, match="question x has no answer"):
        make().check(Reading((QuestionExample("x", "?", "c"),), "a file"))
    make().check(reading)


def test_only_training_files_leave_out_what_cannot_be_learned(tmp_path: Path) -> None:
    task = tasks.load("newsqa")
    rows = (("Which river?", "Rhône"), ("Which river?", "Danube"), (" ", "Rhône"))
    qas = [{"qid": number, "question": text, "answers": [answer]} for number, (text, answer) in enumerate(rows)]
    path = write(tmp_path / "a.jsonl", json.dumps({"context": CONTEXT, "qas": qas}))
    train = task.read(path, "train", task.family.Config())
    assert [example.id for example in train.examples] == ["0"]
    assert str(train.problems[1]) == (
        f"question without text, or without an answer that occurs in its context, left out: 2 ({path}, example 1, {path}, "
        "example 2)"
    )
    assert len(task.read(path, "dev", task.family.Config()).examples) == 3
    path = write(tmp_path / "a.jsonl", json.dumps({"context": CONTEXT, "qas": qas[1:2]}))
    with pytest.raises(DataError, match=r"a\.jsonl has no answers to learn from.*'Danube'"):
        task.read(path, "train", task.family.Config())


@pytest.mark.parametrize(
    ("name", "file", "vocabulary"),
    [
        ("squad2", "squad2/dev.json", "bert-uncased-en.txt"),
        ("cmrc2018", "zh/cmrc2018/cmrc2018_dev.json", "bert-zh.txt"),
    ],
)
def test_encoding_real_files_loses_nearly_no_answer(name: str, file: str, vocabulary: str) -> None:
    definition = tasks.load(name)
    tokenizer = load_tokenizer(data_folder("vocab", vocabulary))
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    examples = definition.read(data_folder(file), "dev", QuestionConfig()).examples[:1500]
    task = make(definition.family, max_answer_length=200)
    features = task.encode(examples, text, labeled=True)
    predictions = task.predict(examples, features, gold_outputs(features))
    assert task.score(examples, predictions).values["exact_match"] > 0.97
