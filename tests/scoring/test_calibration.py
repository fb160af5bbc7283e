"""Calibration: on answers made by hand, and on text corrupted by a small generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from discern.corruption.masking import maskable_positions, quota
from discern.data.packed import PackedRows
from discern.data.stream import ExampleStream
from discern.model.bert import BertEncoder
from discern.model.embeddings import Embeddings
from discern.model.heads import ReplacedTokenHead
from discern.model.network import Network
from discern.progress import Silent
from discern.scoring.calibration import Judged, find_threshold, head_fingerprint, judge_corrupted
from discern.scoring.proposals import proposer_of
from tests.parity.small_networks import make_noisy
from tests.scoring.test_proposals import SIZES, V, network
from tests.support import SPECIAL, MemorySplit, random_documents


def judged(scores: list[float], wrong: list[bool]) -> Judged:
    return Judged(np.array(scores, np.float32), np.array(wrong))


def test_the_threshold_of_a_precision() -> None:
    # 30 replaced at 0.9, 10 replaced and 10 original at 0.6, 50 original at 0.1.
    given = judged([0.9] * 30 + [0.6] * 20 + [0.1] * 50, [True] * 40 + [False] * 60)
    found = find_threshold(given, 0.8)
    assert found is not None
    assert (found.reached, found.rates.marked, found.rates.precision, found.rates.recall) == (True, 50, 0.8, 1.0)
    assert found.rates.threshold == pytest.approx(0.35)
    found = find_threshold(given, 0.81)
    assert found is not None
    assert (found.reached, found.rates.recall) == (True, 0.75)
    assert found.rates.threshold == pytest.approx(0.75)


def test_a_precision_out_of_reach_gives_the_best_there_is() -> None:
    given = judged([0.9] * 30 + [0.1] * 50, ([True] * 2 + [False]) * 10 + [False] * 50)
    found = find_threshold(given, 0.9)
    assert found is not None
    assert not found.reached
    assert (found.wanted, found.rates.precision, found.rates.recall) == (0.9, pytest.approx(2 / 3), 1.0)
    assert find_threshold(judged([0.9] * 19, [True] * 19), 0.5) is None, "fewer tokens than a precision needs"


def discriminator() -> Network:
    made = Network(BertEncoder(Embeddings(V, 8, SIZES), SIZES), ReplacedTokenHead(SIZES))
    make_noisy(torch.nn.ModuleList([made.encoder, made.head]))
    made.encoder.eval(), made.head.eval()
    return made


def stream() -> ExampleStream:
    split = MemorySplit(random_documents(6, V, sentences=(2, 4), words=(3, 12)))
    return ExampleStream(PackedRows(split, SPECIAL, 16, 0, rotate=False), 0, shuffle=False)


@pytest.mark.parametrize("kind", ["masked", "two-tower"])
def test_every_token_that_is_not_special_is_judged_once(kind: str) -> None:
    rows = stream()
    answers = judge_corrupted(
        discriminator(), proposer_of(network(kind), SPECIAL), rows, corruption=0.3, sequences=0, progress=Silent()
    )
    batch = rows.batch(np.arange(rows.num_rows), np.arange(rows.num_rows))
    assert len(answers.probability) == int(maskable_positions(batch).sum())
    # Never more are replaced than were chosen; with 23 words, nearly all that were.
    chosen = int(quota(maskable_positions(batch), 0.3).sum())
    assert 0.5 * chosen < answers.is_replaced.sum() <= chosen


@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_batches_and_other_rows_change_nothing(tokens: int) -> None:
    def answers(tokens_per_batch: int) -> Judged:
        return judge_corrupted(
            discriminator(),
            proposer_of(network("masked"), SPECIAL),
            stream(),
            corruption=0.2,
            sequences=5,
            progress=Silent(),
            tokens_per_batch=tokens_per_batch,
        )

    assert answers(tokens).is_replaced.tolist() == answers(64).is_replaced.tolist()
    assert answers(tokens).probability == pytest.approx(answers(64).probability, abs=1e-6)


def test_the_fingerprint_tells_weights_apart() -> None:
    one, other = discriminator(), discriminator()
    assert head_fingerprint(one) == head_fingerprint(other)
    with torch.no_grad():
        other.head.output.bias += 1e-4
    assert head_fingerprint(one) != head_fingerprint(other)
