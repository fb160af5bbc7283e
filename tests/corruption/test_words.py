"""Whole words: by hand, against the plain loop that BERT has, and never split."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from discern.corruption.masking import MaskingContext, Words, quota, take_in_order, whole_word, words_of
from discern.corruption.randomness import Randomness
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch


def batch_of(*rows: list[int]) -> TokenBatch:
    """Rows of words with these numbers of tokens; 0 is a [SEP] between them."""
    ids, starts = [], []
    for lengths in rows:
        row, begins = [SPECIAL.cls], [False]
        for length in lengths:
            row += [9] * length or [SPECIAL.sep]
            begins += [True, *[False] * (length - 1)] if length else [False]
        ids.append([*row, SPECIAL.sep])
        starts.append([*begins, False])
    made = make_batch(ids)
    width = made.input_ids.shape[1]
    return replace(made, word_starts=torch.tensor([row + [False] * (width - len(row)) for row in starts]))


def words(*rows: list[int]) -> Words:
    return words_of(batch_of(*rows))


def lengths_taken(found: Words, chosen: torch.Tensor) -> list[int]:
    """Chosen tokens of each word, those without any left out."""
    taken = torch.zeros_like(found.lengths).scatter_add_(1, found.number, chosen.long())
    return taken[taken > 0].tolist()


def test_words_by_hand() -> None:
    # [CLS] a b ##b [SEP] ##c d [SEP] and a short row: what stands behind a special token begins a word.
    tokens = make_batch([[SPECIAL.cls, 9, 10, 11, SPECIAL.sep, 12, 13, SPECIAL.sep], [SPECIAL.cls, 9, SPECIAL.sep]])
    starts = torch.tensor([[False, True, True, False, False, False, True, False], [False] * 8])
    found = words_of(replace(tokens, word_starts=starts))
    assert found.lengths.tolist() == [[1, 2, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert found.number[found.maskable].tolist() == [0, 1, 1, 2, 3, 0]
    assert found.count.tolist() == [4, 1]


def test_words_of_rows_that_run_backwards_are_those_of_the_text() -> None:
    rng = torch.Generator().manual_seed(0)
    made = batch_of(*([int(n) for n in torch.randint(0, 4, (12,), generator=rng)] for _ in range(20)))
    # Turned round but for the padding: what the rings of the data give where the text is read from its end.
    turned = [(row[mask].flip(0), starts[mask].flip(0)) for row, starts, mask in
              zip(made.input_ids, made.word_starts, made.attention_mask, strict=True)]  # fmt: skip
    backwards = make_batch([ids.tolist() for ids, _ in turned])
    starts = torch.nn.utils.rnn.pad_sequence([starts for _, starts in turned], batch_first=True)
    both = torch.tensor([True]).expand(20)
    plain, found = words_of(made), words_of(replace(backwards, word_starts=starts, is_reversed=both))
    for row in range(20):
        count = int(plain.count[row])
        assert found.lengths[row, :count].tolist() == plain.lengths[row, :count].flip(0).tolist()
        assert int(found.count[row]) == count
    mixed = replace(made, is_reversed=~both)
    assert torch.equal(words_of(mixed).number, plain.number)


def test_every_token_is_a_word_where_nothing_is_known() -> None:
    found = words_of(make_batch([[SPECIAL.cls, 9, 9, 9, SPECIAL.sep]]))
    assert found.lengths.tolist() == [[1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("lengths", "order", "count", "expected"),
    [
        ([2, 3, 1], [0, 1, 2], 5, [2, 3]),  # they fit
        ([2, 3, 1], [0, 1, 2], 4, [2, 1]),  # the second does not, the third does: 3 of 4, as no word is left that fits
        ([2, 3, 1], [1, 0, 2], 4, [3, 1]),  # another order is exact
        ([4, 4], [0, 1], 3, [4]),  # nothing fits: the first of the shortest
        ([5, 4, 4], [0, 2, 1], 1, [4]),
        ([3], [0], 0, []),
    ],
)
def test_filling_by_hand(lengths: list[int], order: list[int], count: int, expected: list[int]) -> None:
    found = words(lengths)
    keys = torch.full_like(found.lengths, 99)
    keys[0, order] = torch.arange(len(order))
    chosen = take_in_order(found, keys, torch.tensor([count]))
    assert sorted(lengths_taken(found, chosen)) == sorted(expected)


def test_filling_is_the_plain_loop() -> None:
    """Word after word, each unless it exceeds the number: what BERT's script does, here without the loop."""
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 6, (int(torch.randint(1, 20, (1,), generator=rng)),), generator=rng).tolist() for _ in range(300)]
    found = words(*rows)
    keys = torch.randint(0, 10**9, found.number.shape, generator=rng)
    count = torch.tensor([max(1, round(0.3 * sum(row))) for row in rows])
    chosen = take_in_order(found, keys, count)
    for at, row in enumerate(rows):
        expected, left = set(), int(count[at])
        order = sorted(range(len(row)), key=lambda number, at=at: int(keys[at, number]))
        for number in order:
            if row[number] <= left:
                expected.add(number)
                left -= row[number]
        if not expected:
            expected = {min(order, key=row.__getitem__)}
        assert set(found.number[at][chosen[at]].tolist()) == expected
        assert int(chosen[at].sum()) == sum(row[number] for number in expected)  # whole words


@pytest.mark.parametrize("mask_probability", [0.05, 0.15, 0.6])
def test_words_are_never_split_and_the_number_is_as_near_as_they_allow(mask_probability: float) -> None:
    rng = torch.Generator().manual_seed(1)
    batch = batch_of(*(torch.randint(0, 4, (40,), generator=rng).tolist() for _ in range(100)))
    found = words_of(batch)
    wanted = quota(found.maskable, mask_probability)
    chosen = whole_word(batch, MaskingContext(mask_probability, Randomness(0, 0, batch.slot))).positions
    taken = torch.zeros_like(found.lengths).scatter_add_(1, found.number, chosen.long())
    assert ((taken == 0) | (taken == found.lengths)).all()
    missing = wanted - chosen.sum(1)
    left = torch.where((taken == 0) & (found.lengths > 0), found.lengths, 99).min(1).values
    assert (missing >= 0).all()
    assert (missing < left).all()


def test_words_of_one_length_are_even_wherever_they_stand() -> None:
    batch = batch_of(*([[3] * 10] * 300))
    hits = torch.zeros(10)
    for step in range(20):
        chosen = whole_word(batch, MaskingContext(0.2, Randomness(0, step, batch.slot))).positions
        hits += chosen[:, 1:-1].reshape(300, 10, 3).all(2).sum(0)
    assert hits.sum() == 2 * 300 * 20
    assert stats.chisquare(hits.numpy()).pvalue > 1e-4
