"""Questions from files to scores."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import DataError
from discern.tasks import families, tasks
from discern.tasks.base import Definition, Labels, TextEncoder
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.features import Features, TaskRowsInOrder, TaskStream
from discern.tasks.mrqa import MrqaQuestions
from discern.tasks.questions import QuestionConfig, Questions
from discern.tasks.squad import CmrcQuestions, Squad1Questions, Squad2Questions
from discern.tasks.supervised import Split, SupervisedObjective
from tests.tasks.data_folder import data_folder, write
from tests.tasks.question_support import ask, small_encoder, text_encoder

CONTEXT = "Élan  vital: the Rhône (北京) and 👍🏽 flow to nai\u0308ve seas."
EXAMPLES = [
    ask("a", "Which river?", CONTEXT, "Rhône", "the Rhône"),
    ask("b", "Which force?", CONTEXT, "Élan  vital"),
    ask("c", "Which city?", CONTEXT, "北京"),
    ask("d", "Which sign?", CONTEXT, "👍🏽"),
    ask("e", "Which seas?", CONTEXT, "nai\u0308ve"),
    ask("f", "Which color?", CONTEXT, impossible=True),
]
TEXT = text_encoder(CONTEXT, *(example.question for example in EXAMPLES))


def make(family: type[Questions] = Squad2Questions, **settings: Any) -> Questions:
    labels = family.learn(Reading(tuple(EXAMPLES), "a file"), QuestionConfig(), ())
    return family("squad", QuestionConfig(**settings), ("exact_match", "f1"), labels)


def gold_outputs(features: Features, task: Questions) -> list[dict[str, Any]]:
    """As if a head were sure of the targets."""
    starts, ends = (np.asarray(features.targets[name], np.float32) for name in ("start", "end"))
    impossible = features.targets.get("impossible", np.zeros(len(features)))
    return [
        {
            "starts": starts[row : row + 1],
            "start_scores": np.zeros(1, np.float32),
            "ends": ends[row : row + 1],
            "end_scores": np.zeros(1, np.float32),
            "null": np.float32(100 if impossible[row] else -100),
        }
        for row in range(len(features))
    ]


def golden_scores(task: Questions, examples: list[QuestionExample], text: TextEncoder) -> dict[str, float]:
    features = task.encode(examples, text, labeled=True)
    predictions = task.predict(examples, features, gold_outputs(features, task))
    return task.score(examples, predictions).values


def test_rows_by_hand() -> None:
    text = text_encoder("abcdefghij?")
    example = ask("1", "a b?", "cdefghij", "ef")
    task = make(sequence_length=11, doc_stride=2, max_answer_length=2)
    features = task.encode([example], text, labeled=True)
    ids = text.ids(["a b?", "cdefghij"])
    cls, sep = text.special.cls, text.special.sep
    # A third of 11 positions holds the whole question; five tokens are left, and windows overlap by two or more.
    windows = [(0, 5), (2, 7), (4, 8)]
    assert [features.input_ids[row].tolist() for row in range(3)] == [[cls, *ids[0], sep, *ids[1][a:b], sep] for a, b in windows]
    assert [features.token_types[row].tolist() for row in range(3)] == [[0] * 5 + [1] * (b - a + 1) for a, b in windows]
    assert features.targets["start"].tolist() == [7, 5, 0]
    assert features.targets["end"].tolist() == [8, 6, 0]
    # The window without the answer counts as answerable, as its question does.
    assert features.targets["impossible"].tolist() == [0, 0, 0]
    assert features.example.tolist() == [0, 0, 0]
    assert features.notes == ("1 of 1 contexts do not fit into a row: 3 rows in total",)
    assert task.encode([example], text, labeled=False).targets == {}


def test_short_rows_say_what_was_cut() -> None:
    example = ask("1", "which of all the words is it?", "abcdefghij " * 4, "abcdefghij abcdefghij")
    text = text_encoder(example.question, example.context)
    features = make(sequence_length=24).encode([example], text, labeled=True)
    assert features.input_ids.lengths.max() == 24
    assert features.notes[1:] == (
        "1 of 1 questions were cut to 8 tokens or fewer (task.max_query_length is 64, and a question has at most a third of the "
        "row)",
        "rows of 24 tokens are too short for a doc_stride of 128: the windows of 1 context start closer together, up to every 6 "
        "tokens. If the model has the positions, longer rows are fewer: --set task.sequence_length=48; otherwise --set "
        "task.doc_stride=6",
        "1 of 1 answers do not fit into any window; longer rows may have room for them: --set task.sequence_length=48",
    )
    assert not any(
        "doc_stride" in note for note in make(sequence_length=24, doc_stride=6).encode([example], text, labeled=True).notes
    )
    (note,) = make(max_answer_length=19).encode([example], text, labeled=True).notes
    assert note == (
        "1 of 1 answers are longer than max_answer_length 19 and cannot be predicted: --set task.max_answer_length=20"
    )
    assert make(max_answer_length=20).encode([example], text, labeled=True).notes == ()
    assert make(max_answer_length=19).encode([example], text, labeled=False).notes == ()
    assert not np.asarray(features.targets["start"]).any()


@pytest.mark.parametrize("length", [8, 20, 32, 64, 200])
def test_windows_hold_every_token_of_a_context(length: int) -> None:
    task = make(sequence_length=length)
    features = task.encode(EXAMPLES, TEXT, labeled=True)
    (whole,) = TEXT.ids([CONTEXT])
    assert features.input_ids.lengths.max() <= length
    for number in range(len(EXAMPLES)):
        held: set[int] = set()
        for row in np.flatnonzero(features.example == number):
            held |= set(features.input_ids[int(row)].tolist())
        assert set(whole) <= held


@pytest.mark.parametrize("head", ["joint", "span"])
@pytest.mark.parametrize("length", [48, 384])
def test_gold_positions_give_the_answers_to_the_character(head: str, length: int) -> None:
    task = make(sequence_length=length, head=head)
    features = task.encode(EXAMPLES, TEXT, labeled=True)
    predictions = task.predict(EXAMPLES, features, gold_outputs(features, task))
    assert [prediction["best_answer"] for prediction in predictions] == [
        "Rhône",
        "Élan  vital",
        "北京",
        "👍🏽",
        "nai\u0308ve",
        "",
    ]
    assert [prediction["answer"] for prediction in predictions] == ["Rhône", "Élan  vital", "北京", "👍🏽", "nai\u0308ve", ""]
    for example, prediction in zip(EXAMPLES[:5], predictions, strict=False):
        (best,) = prediction["nbest"]
        assert example.context[best["start"] :].startswith(best["text"])
    json.dumps(predictions, allow_nan=False)


def test_impossible_questions_learn_position_zero_and_unfound_ones_too() -> None:
    unfound = QuestionExample("g", "Which?", CONTEXT, (), ("Danube",), False)
    features = make().encode([EXAMPLES[5], unfound], TEXT, labeled=True)
    assert [np.asarray(features.targets[name]).tolist() for name in ("start", "end", "impossible")] == [[0, 0], [0, 0], [1, 0]]
    assert "impossible" not in make(Squad1Questions).encode([unfound], TEXT, labeled=True).targets


def test_a_context_of_nothing_has_a_row_and_no_answer() -> None:
    example = QuestionExample("1", "a", "\u200d", (), ("x",), False)
    task = make(Squad1Questions)
    features = task.encode([example], TEXT, labeled=True)
    assert len(features) == 1
    assert task.predict([example], features, gold_outputs(features, task)) == [
        {"id": "1", "answer": "", "best_answer": "", "nbest": []}
    ]


def test_the_threshold_decides_what_is_answered() -> None:
    features = make().encode(EXAMPLES[:1], TEXT, labeled=True)
    (said,) = gold_outputs(features, make())
    for head, threshold, null, answers in [
        ("joint", None, -2.7, False),
        ("joint", None, -2.8, True),
        ("joint", 0.0, -2.7, True),
        ("span", None, 0.1, False),
        ("span", None, -0.1, True),
    ]:
        task = make(head=head, no_answer_threshold=threshold)
        (prediction,) = task.predict(EXAMPLES[:1], features, [{**said, "null": np.float32(null)}])
        assert prediction["answer"] == ("Rhône" if answers else "")
        assert prediction["best_answer"] == "Rhône"
        assert prediction["no_answer"] == pytest.approx(null)


def test_scores_of_every_family() -> None:
    said = [("a", "the Rhône", -9.0), ("b", "vital", -9.0), ("f", "Rhône", -9.0), ("e", "", 5.0)]
    predictions = [{"id": i, "answer": text, "best_answer": text, "no_answer": odds, "nbest": []} for i, text, odds in said]
    examples = [EXAMPLES[0], EXAMPLES[1], EXAMPLES[5], EXAMPLES[4]]
    values = make().score(examples, predictions).values
    assert list(values)[:2] == ["exact_match", "f1"]
    assert values["exact_match"] == 0.25
    assert values["f1"] == pytest.approx((1 + 2 / 3) / 4)
    assert {"best_exact_match", "best_exact_match_threshold", "best_f1", "HasAns_f1", "NoAns_f1"} <= set(values)
    assert make(Squad1Questions).score(examples[:2], predictions[:2]).values == {"exact_match": 0.5, "f1": pytest.approx(5 / 6)}
    mrqa = MrqaQuestions("newsqa", QuestionConfig(), ("f1", "exact_match"), Labels((), "spans"))
    assert list(mrqa.score(examples[:2], predictions[:2]).values) == ["f1", "exact_match"]
    assert make(CmrcQuestions).score([EXAMPLES[2]], [{"id": "c", "answer": "北"}]).values["f1"] == pytest.approx(2 / 3)


def test_mistakes_are_worst_first_and_show_the_context() -> None:
    task = make()
    features = task.encode(EXAMPLES, TEXT, labeled=True)
    predictions = task.predict(EXAMPLES, features, gold_outputs(features, task))
    assert task.mistakes(EXAMPLES, predictions) == []
    predictions[1]["answer"], predictions[5]["answer"] = "vital", "Rhône"
    wrong, partly = task.mistakes(EXAMPLES, predictions)
    assert (wrong["id"], wrong["gold"], wrong["badness"]) == ("f", [""], 1.0)
    assert (partly["id"], partly["gold"], partly["answer"]) == ("b", ["Élan  vital"], "vital")
    assert partly["badness"] == pytest.approx(1 / 3, abs=1e-6)
    assert partly["text"] == "Which force?"
    assert CONTEXT.startswith(partly["context"].removesuffix("..."))
    assert "nbest" not in partly


def test_a_network_that_says_one_thing_has_failed() -> None:
    task, two = make(), EXAMPLES[:2]
    empty = [replace(example, golds=()) for example in two]

    def failure(examples: Sequence[QuestionExample], *answers: str) -> str | None:
        nbest = [{"text": "x", "start": 0, "probability": 1.0}]
        return task.failure(examples, [{"answer": answer, "nbest": nbest} for answer in answers])

    assert failure(two, "", "") == "every answer is empty"
    assert failure(two, "x", "x") == "every answer is 'x'"
    assert failure(two, "x", "y") is None
    assert failure(two[:1], "") is None
    assert failure(empty, "", "") is None, "no question has an answer"


def test_files_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="no question of a file has an answer"):
        Squad1Questions.learn(Reading((EXAMPLES[5],), "a file"), QuestionConfig(), ())
    with pytest.raises(DataError, match="question f has no answer") as caught:
        make(Squad1Questions).check(Reading(tuple(EXAMPLES), "a file"))
    assert "to the training file too; in SQuAD's format: --task squad2" in str(caught.value.hint)
    with pytest.raises(DataError, match="question x has no answers"):
        make().check(Reading((QuestionExample("x", "?", "c"),), "a file"))
    make().check(Reading(tuple(EXAMPLES), "a file"))


def test_every_definition_loads_with_the_length_and_epochs_of_questions() -> None:
    for name in ("squad1", "squad2", "cmrc2018", "newsqa", "naturalqs", "triviaqa", "searchqa", "hotpotqa", "squad-mrqa"):
        definition: Definition[QuestionExample] = tasks.load(name)
        assert definition.name == name
        assert {"task.sequence_length": 512, "finetune.epochs": 2.0}.items() <= definition.defaults.items()
        settings = {key.removeprefix("task."): value for key, value in definition.defaults.items() if key.startswith("task.")}
        definition.family.Config.model_validate(settings)
        assert families.load(definition.family.family) is definition.family


def test_mrqa_files(tmp_path: Path) -> None:
    spans = [{"text": "Rhône", "char_spans": [[CONTEXT.index("Rhône"), CONTEXT.index("Rhône") + 4]]}]
    asked = {"qid": "1", "question": "Which river?", "answers": ["the Rhône"], "detected_answers": spans}
    lost = {"qid": "2", "question": "Which river?", "answers": ["Danube"], "detected_answers": []}
    lines = [json.dumps({"header": {"dataset": "x"}}), json.dumps({"context": CONTEXT, "qas": [asked, lost]})]
    write(tmp_path / "dev.jsonl", *lines)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "NewsQA.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    definition = tasks.load("newsqa")
    paths = definition.source.splits(tmp_path)
    assert set(paths) == {"train", "dev"}
    train, dev = (definition.source.read(paths[split], split) for split in ("train", "dev"))
    assert [len(reading.examples) for reading in (train, dev)] == [1, 2]
    labels = definition.family.learn(train, QuestionConfig(), ())
    task = definition.family("newsqa", QuestionConfig(), definition.metrics, labels)
    task.check(dev)
    assert golden_scores(task, list(dev.examples), TEXT) == {"f1": 0.5, "exact_match": 0.5}


@pytest.mark.parametrize(
    ("name", "parts", "vocabulary"),
    [
        ("squad1", ("squad1",), "bert-uncased-en.txt"),
        ("squad2", ("squad2",), "bert-uncased-en.txt"),
        ("squad1", ("squad1",), "bert-cased-en.txt"),
        ("cmrc2018", ("zh", "cmrc2018"), "bert-zh.txt"),
    ],
)
def test_real_files_lose_nearly_nothing(name: str, parts: tuple[str, ...], vocabulary: str) -> None:
    definition = tasks.load(name)
    tokenizer = load_tokenizer(data_folder("vocab", vocabulary))
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    paths = definition.source.splits(data_folder(*parts))
    examples = definition.source.read(paths["dev"], "dev").examples[:1500]
    config = QuestionConfig(sequence_length=384, max_answer_length=200)
    labels = definition.family.learn(Reading(examples, "dev"), config, ())
    task = definition.family(name, config, definition.metrics, labels)
    assert golden_scores(task, list(examples), text)["exact_match"] > 0.97


@pytest.mark.parametrize("head", ["joint", "span"])
def test_six_questions_are_learned(head: str) -> None:
    torch.manual_seed(0)
    # Two windows for each question, half of them without the answer.
    task = make(head=head, sequence_length=64, doc_stride=20, n_best=5, beam_size=5)
    features = task.encode(EXAMPLES, TEXT, labeled=True)
    objective = SupervisedObjective(
        small_encoder(TEXT.tokenizer.get_vocab_size()),
        {"squad": task},
        dropout=0.0,
        heldout={"squad": Split(tuple(EXAMPLES), features)},
    )
    objective.initialize(0)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    stream = TaskStream({"squad": features}, 0, len(features))
    places = np.arange(len(features))
    for step in range(150):
        batch = objective.corrupt(stream.batch(step * len(features) + places, places), Randomness(0, 0, torch.from_numpy(places)))
        term = objective(batch, Randomness(0, 0, torch.from_numpy(places))).terms["squad"]
        assert term.count == len(features)
        optimizer.zero_grad()
        (term.total / term.count).backward()
        optimizer.step()
    objective.eval()
    evaluator = objective.evaluator()
    with torch.no_grad():
        batch = objective.corrupt(
            TaskRowsInOrder({"squad": features}).batch(places, places), Randomness(0, 0, torch.from_numpy(places))
        )
        evaluator.update(objective(batch, Randomness(0, 0, torch.from_numpy(places))), batch)
    figures = evaluator.compute()
    assert figures["best_exact_match"] == 1.0
    assert figures["exact_match"] == 1.0
    assert figures["loss"] < 0.2
