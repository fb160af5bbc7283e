"""Supervised training as an objective: exact means and sums, several tasks, evaluation, and the frame of the rows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.base import Encoder, build_encoder, initialize
from discern.models.layers import Embeddings
from discern.tasks.base import ClassificationExample, Labels
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.features import Features, Ragged, TaskBatch, TaskRowsInOrder
from discern.tasks.supervised import Split, SupervisedObjective, cls_last_states
from discern.tasks.tagging import Tagging, TaggingConfig
from tests.parity.small_networks import token_batch
from tests.support import settings


def encoder() -> Encoder:
    config = settings(hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.5).model
    built = build_encoder(Embeddings(50, config.embedding_size, config), config)
    initialize(built, torch.Generator().manual_seed(0), config)
    return built


def task(name: str, classes: int) -> Classification:
    return Classification(name, ClassificationConfig(), ("accuracy",), Labels(tuple(map(str, range(classes)))))


def split(count: int, classes: int, seed: int) -> Split:
    rng = np.random.default_rng(seed)
    ids = [[2, *rng.integers(5, 50, int(rng.integers(1, 12))).tolist(), 3] for _ in range(count)]
    targets = {"class": rng.integers(0, classes, count)}
    features = Features(Ragged.of(ids), Ragged.of([[0] * len(row) for row in ids], np.uint8), np.arange(count), targets)
    examples = tuple(ClassificationExample(str(n), "x", None, str(label)) for n, label in enumerate(targets["class"]))
    return Split(examples, features)


SPLITS = {"two": split(9, 2, 0), "three": split(4, 3, 1)}


def objective(reduction: str = "mean", heldout: dict[str, Split] | None = None) -> SupervisedObjective:
    made = SupervisedObjective(
        encoder(),
        {"two": task("two", 2), "three": task("three", 3)},
        dropout=0.0,
        reduction=reduction,  # type: ignore[arg-type]
        sequences_per_step=13,
        heldout=heldout,
    )
    made.initialize(1)
    return made


def whole_batch() -> TaskBatch:
    places = np.arange(13)
    return TaskRowsInOrder({name: split.features for name, split in SPLITS.items()}).batch(places, places)


def step_loss(made: SupervisedObjective, parts: list[TaskBatch]) -> torch.Tensor:
    """As the loop computes it: counts of the whole step first."""
    randomness = Randomness(0, 0, torch.arange(13))
    batches = [made.corrupt(part, randomness) for part in parts]
    counts = sum((Counter(made.counts(batch)) for batch in batches), Counter[str]())
    terms = [term for batch in batches for term in made(batch, randomness).terms.items()]
    return torch.stack([term.total * (term.weight / max(counts[name], 1)) for name, term in terms]).sum()


def by_hand(made: SupervisedObjective) -> dict[str, torch.Tensor]:
    """Cross-entropy of each row by itself, summed by task."""
    sums = {}
    for name, split in SPLITS.items():
        features = split.features
        rows = [torch.from_numpy(features.input_ids[row].astype(np.int64))[None] for row in range(len(features))]
        logits = torch.cat([made.heads[name].output(made.encoder(row)[:, 0]) for row in rows])
        sums[name] = torch.nn.functional.cross_entropy(logits, torch.from_numpy(features.targets["class"]), reduction="sum")
    return sums


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("stops", [[13], [5, 13], [1, 2, 7, 13]])
def test_the_loss_is_exact_whatever_the_micro_batches(stops: list[int], reduction: str) -> None:
    made, batch = objective(reduction), whole_batch()
    loss = step_loss(made, [batch.rows(start, stop) for start, stop in pairwise([0, *stops])])
    total = sum(by_hand(made).values(), torch.zeros(()))
    # 9 of the 13 rows times the mean of those 9, and 4 of 13 times the mean of the other 4; the released code has their sum.
    torch.testing.assert_close(loss, total / 13 if reduction == "mean" else total, rtol=1e-5, atol=1e-5)


def test_a_task_counts_by_its_rows_and_each_of_its_words_alike() -> None:
    # One row of the classes, three of the tags with 2, 3 and 7 words: 1/4 of the one loss, 3/4 of the mean over 12 words.
    tags = Tagging("tags", TaggingConfig(), ("accuracy",), Labels(("O", "A"), kind="tags"))
    made = SupervisedObjective(encoder(), {"two": task("two", 2), "tags": tags}, dropout=0.0)
    made.initialize(1)
    ids = Ragged.of([[2, *range(5, 5 + words), 3] for words in (2, 3, 7)])
    targets = {"tags": Ragged.of([[-100, *[1] * words, -100] for words in (2, 3, 7)], np.int64)}
    types = Ragged(np.zeros_like(ids.values, np.uint8), ids.offsets)
    features = {"two": split(1, 2, 0).features, "tags": Features(ids, types, np.arange(3), targets)}
    batch = TaskRowsInOrder(features).batch(np.arange(4), np.arange(4))
    output = made(made.corrupt(batch, Randomness(0, 0, torch.arange(4))), Randomness(0, 0, torch.arange(4)))
    assert (output.terms["two"].count, output.terms["tags"].count) == (1, 12)
    expected = output.terms["two"].total / 4 + 3 / 4 * output.terms["tags"].total / 12
    for parts in ([batch], [batch.rows(0, 2), batch.rows(2, 4)]):
        torch.testing.assert_close(step_loss(made, parts), expected, rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_a_gradient_even_of_a_task_without_rows() -> None:
    made = objective()
    step_loss(made, [whole_batch().rows(0, 9)]).backward()
    assert all(parameter.grad is not None for parameter in made.heads.parameters())
    assert made.heads["two"].output.weight.grad.any()
    assert not made.heads["three"].output.weight.grad.any()


def test_the_heads_follow_from_the_seed_and_the_encoder_stays() -> None:
    first, other, again = objective(), objective(), objective()
    other.initialize(2)
    assert not torch.equal(first.heads["two"].output.weight, other.heads["two"].output.weight)
    torch.testing.assert_close(first.state_dict(), again.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(first.encoder.state_dict(), other.encoder.state_dict(), rtol=0, atol=0)


def test_evaluation_gives_the_metrics_of_the_whole_split_whatever_the_batches() -> None:
    made = objective(heldout=SPLITS).eval()
    batch, figures = whole_batch(), []
    for size in (13, 4, 1):
        evaluator = made.evaluator()
        for start in range(0, 13, size):
            part = made.corrupt(batch.rows(start, start + size), Randomness(0, 0, torch.arange(13)))
            evaluator.update(made(part, Randomness(0, 0, part.tokens.example_index)), part)
        figures.append(evaluator.compute())
    assert figures[1] == pytest.approx(figures[0], abs=1e-5)
    assert figures[2] == pytest.approx(figures[0], abs=1e-5)
    assert figures[0]["two_loss"] == pytest.approx(float(by_hand(made)["two"].detach()) / 9, abs=1e-5)
    assert figures[0]["mean_headline"] == pytest.approx((figures[0]["two_accuracy"] + figures[0]["three_accuracy"]) / 2)


def test_cls_last_gives_rows_as_xlnet_reads_them() -> None:
    """[CLS] a b [SEP] - - becomes - - a b [SEP] [CLS]; the states come back in the order of the rows."""
    batch = token_batch([4, 6], second=[6, 4])
    encoder = Mock(spec=Encoder, side_effect=lambda input_ids, mask, segments: input_ids[..., None].float())
    states = cls_last_states(encoder, batch.input_ids, batch.attention_mask, batch.token_type_ids)
    a, b = batch.input_ids[0, 1:3].tolist()
    ids, mask, segments = (values.tolist() for values in encoder.call_args.args)
    assert ids == [[0, 0, a, b, 3, 2], [*batch.input_ids[1, 1:].tolist(), 2]]
    assert mask == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert segments == [[3, 3, 0, 0, 0, 2], [0, 0, 0, 1, 1, 2]]
    assert torch.equal(states[..., 0].long(), batch.input_ids)
