"""Tagging from sentences to scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from discern.corruption.randomness import Randomness
from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.errors import DataError
from discern.models.config import build_config
from discern.tasks import families
from discern.tasks.base import Labels, TextEncoder
from discern.tasks.examples import Reading, TaggingExample
from discern.tasks.features import IGNORED, Features, TaskRowsInOrder, TaskStream
from discern.tasks.supervised import Split, SupervisedObjective
from discern.tasks.tagged_rows import cut_sentence
from discern.tasks.tagging import Tagging, TaggingConfig
from discern.tasks.tags import convert
from tests.small.tokenizers import GEMMA_NAMES, ROBERTA_NAMES, bpe, gemma, roberta, stated, unigram, written
from tests.tasks.question_support import small_encoder, text_encoder

METRICS = ("f1", "precision", "recall", "accuracy")
TEXT = text_encoder("abcdefghijklmnop", words=("the", "sees"))


def sentence(words: str, tags: str | None = None, identity: str = "0") -> TaggingExample:
    return TaggingExample(identity, tuple(words.split(" ")), tuple(tags.split()) if tags is not None else None)


def read(*examples: TaggingExample) -> Reading[TaggingExample]:
    return Reading(examples, "a file")


def make(*train: TaggingExample, **options: Any) -> Tagging:
    config = TaggingConfig(**options)
    return Tagging("ner", config, METRICS, Tagging.learn(read(*train), config, ()))


def outputs_saying(task: Tagging, features: Features, tags: Sequence[str]) -> list[dict[str, Any]]:
    """As if a head were sure of these tags (in the trained scheme) of each example, and said anything where it is not asked."""
    random = np.random.default_rng(0)
    outputs = []
    for row in range(len(features)):
        words = features.places["word"][row]
        logits = random.normal(size=(len(words), len(task.labels.names))).astype(np.float32)
        for place in np.flatnonzero(words >= 0):
            tag = tags[int(features.example[row])].split()[words[place]]
            logits[place] = 0
            logits[place, task.labels.names.index(tag)] = 9
        outputs.append({"logits": logits})
    return outputs


def predict(task: Tagging, examples: Sequence[TaggingExample], *tags: str) -> list[dict[str, Any]]:
    features = task.encode(examples, TEXT, labeled=False)
    return task.predict(examples, features, outputs_saying(task, features, tags))


def test_every_type_has_all_four_prefixes_and_the_scheme_is_kept() -> None:
    labels = Tagging.learn(read(sentence("a b c", "I-A I-A O"), sentence("a b", "I-B-C B-B-C")), TaggingConfig(), ())
    names = ("B-A", "B-B-C", "E-A", "E-B-C", "I-A", "I-B-C", "O", "S-A", "S-B-C")
    assert labels == Labels(names, "tags", scheme="iob1")
    assert Tagging.learn(read(sentence("a b", "B I")), TaggingConfig(), ()).names == ("B", "E", "I", "O", "S")
    assert families.load("tagging") is Tagging


def test_tags_that_mark_no_spans_are_kept_and_scored_by_accuracy() -> None:
    examples = [sentence("a b c", "NN VB NN"), sentence("a", "VB", "1")]
    task = make(*examples)
    assert task.labels == Labels(("NN", "VB"), "tags", scheme="none")
    assert task.metrics == ("accuracy",)
    task.check(read(*examples))
    predictions = predict(task, examples, "NN VB VB", "VB")
    assert predictions[0]["tags"] == ["NN", "VB", "VB"]
    assert "spans" not in predictions[0]
    assert task.score(examples, predictions).values == {"accuracy": 3 / 4}
    (mistake,) = task.mistakes(examples, predictions)
    assert (mistake["id"], mistake["badness"], mistake["gold"]) == ("0", 1, ["NN", "VB", "NN"])
    with pytest.raises(
        DataError, match=r"tag 'NNS' \(1 in the file\) does not occur in the training file, whose tags are NN, VB"
    ):
        task.check(read(sentence("a", "NNS")))


def test_nothing_to_learn() -> None:
    with pytest.raises(DataError, match=r"a file, example 0: the sentence has no tags"):
        Tagging.learn(read(sentence("a")), TaggingConfig(), ())
    for tags in ("O O", "NN NN"):
        with pytest.raises(DataError, match="there is nothing to learn") as error:
            Tagging.learn(read(sentence("a b", tags)), TaggingConfig(), ())
        assert "task.tag_column" in str(error.value)
    # One slip must not make parts of speech of a file of spans.
    with pytest.raises(DataError, match=r"tag 'BX' \(1 in the file\) is neither 'O' nor of the form 'B-TYPE', as 'B-X' is"):
        Tagging.learn(read(sentence("a b c", "B-X O BX")), TaggingConfig(), ())


def test_further_files_may_hold_new_tags_of_known_types_only() -> None:
    task = make(sentence("a b c", "B-PER I-PER O"))
    task.check(read(sentence("a b c", "S-PER O E-PER")))
    with pytest.raises(DataError, match=r"tag 'B-PERS' \(1 in the file\) is of a type that does not occur") as error:
        task.check(read(sentence("a b", "O B-PERS")))
    assert "did you mean 'B-PER'?" in str(error.value)
    with pytest.raises(DataError, match=r"tag 'NN' .* neither 'O' nor of the form 'B-TYPE'"):
        task.check(read(sentence("a b", "O NN")))
    with pytest.raises(DataError, match="has no tags"):
        task.check(read(sentence("a b")))


def test_rows_by_hand() -> None:
    example = sentence("abc the de \x07 fgh", "B-X I-X O B-Y B-Y")
    task = make(example, sequence_length=8)
    assert task.labels.names == ("B-X", "B-Y", "E-X", "E-Y", "I-X", "I-Y", "O", "S-X", "S-Y")
    features = task.encode([example], TEXT, labeled=True)
    assert [[TEXT.tokenizer.id_to_token(id) for id in features.input_ids[row]] for row in range(3)] == [
        ["[CLS]", "a", "##b", "##c", "the", "d", "##e", "[SEP]"],
        ["[CLS]", "the", "d", "##e", "[UNK]", "[SEP]"],
        ["[CLS]", "d", "##e", "[UNK]", "f", "##g", "##h", "[SEP]"],
    ]
    # 'de' stands best in the second window, the word of which nothing is left in the third.
    places = [[-1, 0, -1, -1, 1, -1, -1, -1], [-1, -1, 2, -1, -1, -1], [-1, -1, -1, 3, 4, -1, -1, -1]]
    classes = {-1: IGNORED, 0: 0, 1: 2, 2: 6, 3: 8, 4: 8}  # B-X E-X O S-Y S-Y
    for row, expected in enumerate(places):
        assert features.places["word"][row].tolist() == expected
        assert features.targets["tags"][row].tolist() == [classes[word] for word in expected]
        assert not features.token_types[row].any()
    assert features.example.tolist() == [0, 0, 0]
    assert features.notes == (
        "1 of 1 sentences are longer than 8 tokens and were split into windows",
        "1 word without any token, read as [UNK]",
    )


@pytest.mark.parametrize(("made", "names"), [(roberta, ROBERTA_NAMES), (gemma, GEMMA_NAMES), (bpe, {}), (unigram, {})])
def test_words_are_read_as_in_running_text(made: Callable[[], Tokenizer], names: dict[str, str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path, made(), **stated(names)))
    text = TextEncoder(tokenizer, special_tokens(tokenizer))
    words = ("the", "quick", "cat's", ",", "the", "東", "京", "fox")
    tagged = TaggingExample("0", words, ("O",) * 7 + ("B-A",))
    features = make(tagged).encode([tagged], text, labeled=False)
    places = features.places["word"][0]
    starts = [*np.flatnonzero(places >= 0).tolist(), len(places) - 1]
    assert [places[start] for start in starts[:-1]] == list(range(len(words)))
    read = [features.input_ids[0][start:stop].tolist() for start, stop in itertools.pairwise(starts)]
    before = ["" if number == 0 or word in "東京" else " " for number, word in enumerate(words)]
    assert read == text.ids([space + word for space, word in zip(before, words, strict=True)])
    latin = sentence("the quick fox", "O O B-A")
    if made is not gemma:  # whose merges may cross words
        assert make(latin).encode([latin], text, labeled=False).input_ids[0][1:-1].tolist() == text.ids(["the quick fox"])[0]
    earlier = make(tagged, spaced_words=False).encode([tagged], text, labeled=False).input_ids[0]
    assert earlier[1:-1].tolist() == [id for ids in text.ids(words) for id in ids]


def test_unlabeled_sentences_have_no_targets() -> None:
    features = make(sentence("a b", "B-X O")).encode([sentence("a")], TEXT, labeled=False)
    assert not features.targets
    assert features.places["word"][0].tolist() == [-1, 0, -1]
    assert features.notes == ()


def test_a_word_longer_than_a_row_keeps_its_first_pieces() -> None:
    examples = [sentence("a abcdefgh a", "O B-X O")]
    task = make(*examples, sequence_length=8)
    features = task.encode(examples, TEXT, labeled=True)
    assert sorted(
        word for places in (features.places["word"][row] for row in range(len(features))) for word in places[places >= 0]
    ) == [0, 1, 2]
    assert features.input_ids.lengths.max() == 8
    assert "1 word of more than 6 tokens, cut to the first 6" in features.notes
    assert predict(task, examples, "O S-X O")[0]["tags"] == ["O", "B-X", "O"]


@pytest.mark.parametrize(
    ("sizes", "room", "overlap", "windows"),
    [
        ([1] * 4, 4, 2, [(0, 4, [0, 1, 2, 3])]),
        ([1] * 8, 4, 2, [(0, 4, [0, 1, 2]), (2, 6, [3, 4]), (4, 8, [5, 6, 7])]),
        # Both windows show one token on the lesser side of word 4; the earlier of equals wins.
        ([1] * 9, 6, 3, [(0, 6, [0, 1, 2, 3, 4]), (3, 9, [5, 6, 7, 8])]),
        ([1] * 8, 4, 0, [(0, 4, [0, 1, 2, 3]), (4, 8, [4, 5, 6, 7])]),
        # A word as long as a row shares it with none; one that is longer than the overlap is not shown twice.
        ([1] * 6 + [6], 6, 3, [(0, 6, [0, 1, 2, 3, 4, 5]), (6, 7, [6])]),
        ([2, 3, 1, 2], 5, 2, [(0, 2, [0, 1]), (2, 4, [2, 3])]),
        # Words 1 to 4 would be a window, but each of them stands better in one of its neighbors.
        ([3, 1, 1, 1, 1, 3], 6, 3, [(0, 4, [0, 1, 2]), (2, 6, [3, 4, 5])]),
        ([], 4, 2, [(0, 0, [])]),
    ],
)
def test_windows_by_hand(sizes: list[int], room: int, overlap: int, windows: list[tuple[int, int, list[int]]]) -> None:
    found = cut_sentence(sizes, room, overlap)
    assert [(window.start, window.stop, window.words.tolist()) for window in found] == windows


@given(st.lists(st.integers(1, 6), min_size=1, max_size=60), st.integers(6, 20), st.integers(0, 30))
@settings(deadline=None)
def test_every_word_is_read_once_where_most_is_around_it(sizes: list[int], room: int, overlap: int) -> None:
    windows = cut_sentence(sizes, room, overlap)
    assert sorted(word for window in windows for word in window.words) == list(range(len(sizes)))
    for window in windows:
        assert len(window.words)
        assert sum(sizes[window.start : window.stop]) <= room
    for before, after in itertools.pairwise(windows):
        assert before.start < after.start <= before.stop < after.stop
        assert sum(sizes[after.start : before.stop]) <= min(overlap, room // 2)
    for window in windows:
        for word in window.words:
            context = [
                min(sum(sizes[other.start : word]), sum(sizes[word + 1 : other.stop]))
                for other in windows
                if other.start <= word < other.stop
            ]
            assert min(sum(sizes[window.start : word]), sum(sizes[word + 1 : window.stop])) == max(context)


@given(st.lists(st.tuples(st.sampled_from(["a", "the", "abc", "abcdefghijkl", "\x07"]), st.sampled_from("BIO")), min_size=1))
@settings(deadline=None, max_examples=50)
def test_no_word_of_a_long_sentence_is_dropped(words: list[tuple[str, str]]) -> None:
    words = words * 12
    tags = tuple("O" if mark == "O" else f"{mark}-X" for _, mark in words)
    example = TaggingExample("0", tuple(word for word, _ in words), tags)
    task = make(sentence("a b", "B-X I-X"), sequence_length=10)
    features = task.encode([example], TEXT, labeled=True)
    assert features.input_ids.lengths.max() <= 10
    assert int((features.targets["tags"].values != IGNORED).sum()) == len(words)
    (prediction,) = task.predict([example], features, outputs_saying(task, features, [" ".join(convert(tags, "bioes"))]))
    assert prediction["tags"] == convert(tags, "iob2")
    assert len(prediction["probabilities"]) == len(words)
    if "X" in "".join(tags):
        assert task.score([example], [prediction]).values["f1"] == 1


def test_predictions_come_in_the_scheme_of_the_training_file() -> None:
    example = sentence("a b c d")
    # B after the end, I without a beginning: read as conlleval reads them.
    said = "I-X E-X O S-X"
    spans = [[0, 2, "X"], [3, 4, "X"]]
    for tags, expected in [
        ("B-X I-X O B-X", ["B-X", "I-X", "O", "B-X"]),
        ("I-X B-X O I-X", ["I-X", "I-X", "O", "I-X"]),
        ("B-X E-X O S-X", ["B-X", "E-X", "O", "S-X"]),
        ("B-X L-X O U-X", ["B-X", "E-X", "O", "S-X"]),
    ]:
        (prediction,) = predict(make(sentence("a b c d", tags)), [example], said)
        assert prediction["tags"] == expected
        assert prediction["spans"] == spans
    assert list(prediction) == ["id", "words", "tags", "spans", "probabilities", "logits"]
    assert prediction["words"] == ["a", "b", "c", "d"]
    # e^9 against five classes at e^0: O and the four prefixes of one type.
    assert prediction["probabilities"] == [pytest.approx(np.exp(9) / (np.exp(9) + 4), abs=1e-6)] * 4


def test_scores_by_hand_with_iob1_and_a_change_of_type() -> None:
    gold = sentence("a b c d e", "I-A I-B O I-A B-A")
    task = make(gold)
    predictions = predict(task, [gold], "B-A E-A O S-A S-A")
    # Gold (0,1,A) (1,2,B) (3,4,A) (4,5,A); predicted (0,2,A) (3,4,A) (4,5,A).
    assert task.score([gold], predictions).values == pytest.approx(
        {"f1": 4 / 7, "precision": 2 / 3, "recall": 1 / 2, "accuracy": 4 / 5}
    )
    assert list(task.score([gold], predictions).values) == list(METRICS)
    (mistake,) = task.mistakes([gold], predictions)
    assert mistake["badness"] == 3
    assert (mistake["missed"], mistake["invented"]) == ([[0, 1, "A"], [1, 2, "B"]], [[0, 2, "A"]])
    assert (mistake["text"], mistake["gold"]) == ("a b c d e", ["I-A", "I-B", "O", "I-A", "B-A"])


def test_slips_in_the_gold_tags_change_no_score() -> None:
    train = [sentence("a b c", "B-A I-A O"), sentence("a b", "O B-A", "1")]
    gold = [sentence("a b c", "O I-A I-A")]
    task = make(*train)
    assert task.score(gold, predict(task, gold, "O B-A E-A")).values == {"f1": 1, "precision": 1, "recall": 1, "accuracy": 1}


def test_the_worst_mistakes_come_first() -> None:
    examples = [
        sentence("a b c d", "B-A O O O", "one"),
        sentence("a b c d", "B-A O B-A O", "two"),
        sentence("a b c d", "B-A I-A I-A O", "right"),
        sentence("a b c d", "B-A I-A I-A I-A", "wide"),
    ]
    task = make(*examples)
    predictions = predict(task, examples, "O O O O", "O O O O", "B-A I-A E-A O", "O O O O")
    assert [(mistake["id"], mistake["badness"]) for mistake in task.mistakes(examples, predictions)] == [
        ("two", 2),
        ("wide", 1),
        ("one", 1),
    ]


def test_failures_are_named() -> None:
    examples = [sentence("a b", "B-A O"), sentence("a", "O", "1")]
    task = make(*examples)
    assert task.failure(examples, predict(task, examples, "O O", "O")) == "no span is predicted: every word is O"
    assert task.failure(examples, predict(task, examples, "S-A S-A", "S-A")) == "every word is B-A"
    assert task.failure(examples, predict(task, examples, "S-A O", "O")) is None
    assert task.failure(examples[1:], predict(task, examples[1:], "O")) is None
    without = [sentence("a b", "O O"), sentence("a", "O", "1")]
    assert task.failure(without, predict(task, without, "O O", "O")) is None, "there is no span"
    scores = task.score(examples, predict(task, examples, "O O", "O"))
    assert scores.values["f1"] == 0
    assert scores.degenerate["f1"] == "no span is predicted"


def test_loss_is_the_sum_over_tagged_words() -> None:
    examples = [sentence("abc the", "B-X O"), sentence("the sees the abc d e", "O O O B-X I-X O", "1")]
    task = make(*examples)
    features = {"ner": task.encode(examples, TEXT, labeled=True)}
    batch = TaskRowsInOrder(features).batch(np.arange(2), np.arange(2))
    (group,) = batch.groups
    assert task.items(group) == 8
    head = task.head(build_config(hidden_size=4), 0.0)
    torch.nn.init.zeros_(head.output.weight)
    torch.nn.init.zeros_(head.output.bias)
    hidden = torch.randn(*batch.input_ids.shape, 4)
    loss, said = head(hidden, batch, group)
    assert loss is not None
    torch.testing.assert_close(loss, 8 * torch.tensor(5.0).log())
    assert said["logits"].shape == (*batch.input_ids.shape, 5)
    # Cut to the length of each row, and targets shorter than the batch do not matter.
    assert [row["logits"].shape[0] for row in task.rows_of(batch, said)] == features["ner"].input_ids.lengths.tolist()
    longer, _ = head(torch.randn(2, 40, 4), batch, group)
    torch.testing.assert_close(longer, loss)
    unlabeled = TaskRowsInOrder({"ner": task.encode(examples, TEXT, labeled=False)}).batch(np.arange(2), np.arange(2))
    assert head(hidden, unlabeled, unlabeled.groups[0])[0] is None
    assert task.items(unlabeled.groups[0]) == 0


def test_a_small_network_learns_eight_sentences_by_heart() -> None:
    examples = tuple(
        sentence(words, tags, str(number))
        for number, (words, tags) in enumerate(
            [
                ("the abc sees the de", "B-NP I-NP O B-NP I-NP"),
                ("abc sees de", "B-PER O B-PER"),
                ("fg hi sees", "B-PER I-PER O"),
                ("sees", "O"),
                ("the jk lm no p the a b c d", "B-NP I-NP I-NP I-NP I-NP B-NP I-NP O O O"),
                ("p o n m", "B-PER B-PER O B-PER"),
                ("\x07 abc", "O B-PER"),
                ("the the", "B-NP B-NP"),
            ]
        )
    )
    # Rows of ten tokens: the longest sentence takes several windows.
    task = make(*examples, sequence_length=10)
    features = task.encode(examples, TEXT, labeled=True)
    assert len(features) > len(examples)
    objective = SupervisedObjective(
        small_encoder(TEXT.tokenizer.get_vocab_size()),
        {"ner": task},
        dropout=0.0,
        heldout={"ner": Split(examples, features)},
    )
    objective.initialize(0)
    stream = TaskStream({"ner": features}, seed=0, rows_per_step=5)
    optimizer = torch.optim.Adam(objective.parameters(), lr=5e-3)
    for step in range(120):
        indices = np.arange(step * 5, step * 5 + 5)
        randomness = Randomness(0, step, torch.from_numpy(indices))
        batch = objective.corrupt(stream.batch(indices, np.arange(5)), randomness)
        term = objective(batch, randomness).terms["ner"]
        assert term.count == objective.counts(batch)["ner"]
        optimizer.zero_grad()
        (term.total / term.count).backward()
        optimizer.step()
    evaluator = objective.eval().evaluator()
    rows = TaskRowsInOrder({"ner": features})
    for start in range(0, rows.num_rows, 4):
        chosen = np.arange(start, min(start + 4, rows.num_rows))
        randomness = Randomness(0, 0, torch.from_numpy(chosen))
        batch = objective.corrupt(rows.batch(chosen, chosen), randomness)
        evaluator.update(objective(batch, randomness), batch)
    figures = evaluator.compute()
    assert figures["f1"] == 1.0
    assert figures["accuracy"] == 1.0
    assert figures["loss"] < 0.2
