"""Supervised training as an objective: exact means and sums, several tasks, evaluation that is blind to batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.base import Encoder, build_encoder
from discern.models.embeddings import Embeddings
from discern.models.initialization import initialize
from discern.tasks.base import Labels
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.examples import ClassificationExample
from discern.tasks.features import Features, Ragged, TaskBatch, TaskRowsInOrder
from discern.tasks.supervised import Split, SupervisedObjective, outputs_of
from discern.tasks.tagging import Tagging, TaggingConfig
from tests.support import settings


def encoder(seed: int = 0) -> Encoder:
    config = settings(hidden_dropout=0.0, attention_dropout=0.0, initializer_range=0.5).model
    built = build_encoder(Embeddings(50, config.embedding_size, config), config)
    initialize(built, torch.Generator().manual_seed(seed), config)
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
    return TaskRowsInOrder({name: each.features for name, each in SPLITS.items()}).batch(places, places)


def step_loss(made: SupervisedObjective, parts: list[TaskBatch]) -> torch.Tensor:
    """As the loop computes it: counts of the whole step first."""
    randomness = Randomness(0, 0, torch.arange(13))
    batches = [made.corrupt(part, randomness) for part in parts]
    counts: dict[str, int] = {}
    for batch in batches:
        for name, count in made.counts(batch).items():
            counts[name] = counts.get(name, 0) + count
    total = torch.zeros(())
    for batch in batches:
        for name, term in made(batch, randomness).terms.items():
            total = total + term.total * (term.weight / max(counts[name], 1))
    return total


def by_hand(made: SupervisedObjective) -> dict[str, torch.Tensor]:
    """Cross-entropy of each row by itself, summed by task."""
    sums = {}
    for name, each in SPLITS.items():
        rows = [torch.from_numpy(each.features.input_ids[row].astype(np.int64))[None] for row in range(len(each.features))]
        logits = torch.cat([made.heads[name].output(made.encoder(row)[:, 0]) for row in rows])
        sums[name] = torch.nn.functional.cross_entropy(logits, torch.from_numpy(each.features.targets["class"]), reduction="sum")
    return sums


@pytest.mark.parametrize("cut", [[13], [5, 13], [1, 2, 7, 13]])
def test_the_mean_is_exact_whatever_the_micro_batches(cut: list[int]) -> None:
    made = objective()
    batch, starts = whole_batch(), [0, *cut[:-1]]
    loss = step_loss(made, [batch.rows(start, stop) for start, stop in zip(starts, cut, strict=True)])
    sums = by_hand(made)
    # 9 of the 13 rows times the mean of those 9, and 4 of 13 times the mean of the other 4.
    torch.testing.assert_close(loss, (sums["two"] + sums["three"]) / 13, rtol=1e-5, atol=1e-5)


def tagged(rows: list[int]) -> Split:
    """A row a number, with as many words, all tagged 1."""
    ids = Ragged.of([[2, *range(5, 5 + words), 3] for words in rows])
    tags = Ragged.of([[-100, *[1] * words, -100] for words in rows], np.int64)
    features = Features(ids, Ragged.of([[0] * len(ids[row]) for row in range(len(rows))], np.uint8), np.arange(len(rows)))
    return Split((), replace(features, targets={"tags": tags}))


def test_a_task_counts_by_its_rows_and_each_of_its_words_alike() -> None:
    # One row of the classes, three of the tags with 2, 3 and 7 words: 1/4 of the one loss, 3/4 of the mean over 12 words.
    tags = Tagging("tags", TaggingConfig(), ("accuracy",), Labels(("O", "A"), kind="tags"))
    made = SupervisedObjective(encoder(), {"two": task("two", 2), "tags": tags}, dropout=0.0)
    made.initialize(1)
    features = {"two": split(1, 2, 0).features, "tags": tagged([2, 3, 7]).features}
    batch = TaskRowsInOrder(features).batch(np.arange(4), np.arange(4))
    whole, cut = step_loss(made, [batch]), step_loss(made, [batch.rows(0, 2), batch.rows(2, 4)])
    output = made(made.corrupt(batch, Randomness(0, 0, torch.arange(4))), Randomness(0, 0, torch.arange(4)))
    assert (output.terms["two"].count, output.terms["tags"].count) == (1, 12)
    by_hand = output.terms["two"].total / 4 + 3 / 4 * output.terms["tags"].total / 12
    torch.testing.assert_close(whole, by_hand, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cut, by_hand, rtol=1e-5, atol=1e-5)


def test_a_rare_task_s_example_pulls_as_hard_as_a_common_one_s() -> None:
    # One row of the rare task beside 31 of the common one: the same gradient on the encoder, row for row.
    same = split(1, 2, 3).features
    made = SupervisedObjective(encoder(), {"rare": task("rare", 2), "common": task("common", 2)}, dropout=0.0)
    made.initialize(1)
    made.heads["common"].load_state_dict(made.heads["rare"].state_dict())
    repeated = Features(
        Ragged.of([same.input_ids[0]] * 31),
        Ragged.of([same.token_types[0]] * 31, np.uint8),
        np.arange(31),
        {"class": np.repeat(same.targets["class"], 31)},
    )
    step_loss(made, [TaskRowsInOrder({"rare": same, "common": repeated}).batch(np.arange(32), np.arange(32))]).backward()
    rare, common = (made.heads[name].output.weight.grad for name in ("rare", "common"))
    torch.testing.assert_close(31 * rare, common, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut", [[13], [5, 13]])
def test_the_released_code_s_sum_is_over_the_batch(cut: list[int]) -> None:
    made = objective("sum")
    batch, starts = whole_batch(), [0, *cut[:-1]]
    loss = step_loss(made, [batch.rows(start, stop) for start, stop in zip(starts, cut, strict=True)])
    torch.testing.assert_close(loss, sum(by_hand(made).values(), torch.zeros(())), rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_a_gradient_even_of_a_task_without_rows() -> None:
    made = objective()
    step_loss(made, [whole_batch().rows(0, 9)]).backward()
    assert all(parameter.grad is not None for parameter in made.heads.parameters())
    assert float(made.heads["three"].output.weight.grad.abs().sum()) == 0
    assert float(made.heads["two"].output.weight.grad.abs().sum()) > 0


def test_the_heads_follow_from_the_seed_and_the_encoder_stays() -> None:
    first, other, again = objective(), objective(), objective()
    other.initialize(2)
    assert not torch.equal(first.heads["two"].output.weight, other.heads["two"].output.weight)
    torch.testing.assert_close(first.state_dict(), again.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(first.encoder.state_dict(), other.encoder.state_dict(), rtol=0, atol=0)


def test_evaluation_gives_the_metrics_of_the_whole_split_whatever_the_batches() -> None:
    made = objective(heldout=SPLITS).eval()
    rows = TaskRowsInOrder({name: each.features for name, each in SPLITS.items()})
    figures = []
    for size in (1, 4, 13):
        evaluator = made.evaluator()
        for start in range(0, 13, size):
            places = np.arange(start, min(13, start + size))
            batch = made.corrupt(rows.batch(places, places), Randomness(0, 0, torch.from_numpy(places)))
            evaluator.update(made(batch, Randomness(0, 0, batch.tokens.example_index)), batch)
        figures.append(evaluator.compute())
    assert figures[1] == pytest.approx(figures[0], abs=1e-5)
    assert figures[2] == pytest.approx(figures[0], abs=1e-5)
    sums = by_hand(made)
    assert figures[0]["two_loss"] == pytest.approx(float(sums["two"].detach()) / 9, abs=1e-5)
    assert figures[0]["mean_headline"] == pytest.approx((figures[0]["two_accuracy"] + figures[0]["three_accuracy"]) / 2)


def test_outputs_come_in_the_order_of_the_rows() -> None:
    made = objective().eval()
    features = SPLITS["two"].features
    outputs, loss = outputs_of(made, "two", features)
    for row, said in enumerate(outputs):
        alone = made.heads["two"].output(made.encoder(torch.from_numpy(features.input_ids[row].astype(np.int64))[None])[:, 0])
        np.testing.assert_allclose(said["logits"], alone[0].detach().numpy(), atol=1e-5)
    assert loss == pytest.approx(float(by_hand(made)["two"].detach()) / 9, abs=1e-5)
