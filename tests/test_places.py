import pytest
import torch

from discern.types import CorruptedBatch, Places
from tests.support import SPECIAL, make_batch

MASK = torch.tensor([[False, True, True, False], [False, False, False, False], [True, True, False, True]])
VALUES = torch.arange(12).view(3, 4)


def test_an_index_has_exactly_the_positions() -> None:
    places = Places.of(MASK)
    assert places.index.tolist() == [1, 2, 8, 9, 11]
    assert (places.count, places.draws, places.even) == (5, None, False)
    assert torch.equal(places.gather(VALUES), VALUES[MASK])
    assert torch.equal(places.gather(VALUES[..., None].expand(-1, -1, 2)), VALUES[..., None].expand(-1, -1, 2)[MASK])
    written = places.scatter(VALUES, -torch.arange(1, 6))
    assert torch.equal(written, VALUES.masked_scatter(MASK, -torch.arange(1, 6)))


def test_rows_can_have_equally_many_entries() -> None:
    places = Places.of(MASK, even=True)
    assert places.index.tolist() == [1, 2, 0, 4, 4, 4, 8, 9, 11]
    assert places.draws is not None
    assert places.draws.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert places.count == 5
    # Values of entries that fill up go nowhere, not even to the position that they were read from.
    written = places.scatter(VALUES, -torch.arange(1, 10))
    assert torch.equal(written, VALUES.masked_scatter(MASK, torch.tensor([-1, -2, -7, -8, -9])))
    assert places.weigh(torch.ones(9)).sum() == 5


def test_full_rows_need_no_filling() -> None:
    places = Places.of(torch.tensor([[True, False, True], [False, True, True]]), even=True)
    assert (places.index.tolist(), places.draws) == ([0, 2, 4, 5], None)
    assert Places.of(torch.zeros(2, 3, dtype=torch.bool), even=True).index.tolist() == [0, 3]
    assert Places.of(torch.zeros(0, 3, dtype=torch.bool), even=True).index.tolist() == []


@pytest.mark.parametrize("even", [False, True])
def test_positions_drawn_twice_count_twice(even: bool) -> None:
    draws = torch.tensor([[0, 1, 3, 0], [0, 0, 0, 0], [2, 1, 0, 1]])
    places = Places.of(MASK, draws, even=even)
    assert places.count == 8
    assert places.draws is not None
    assert places.draws[places.draws > 0].tolist() == [1, 3, 2, 1, 1]
    assert [places.index[again].tolist() for again in places.drawn_again] == [[2, 8], [2]]


@pytest.mark.parametrize("even", [False, True])
def test_positions_among_others(even: bool) -> None:
    among = Places.of(torch.ones(3, 4, dtype=torch.bool).index_fill(1, torch.tensor([3]), False) | MASK)
    places = Places.of(MASK, even=even)
    found = places.among(among)
    counted = torch.ones_like(found) if places.draws is None else places.draws
    assert torch.equal(among.index[found][counted > 0], Places.of(MASK).index)


def test_rows_without_a_word_still_have_an_entry_on_a_device() -> None:
    """The last row of an epoch may be [CLS] [SEP]. Entries that fill up the chosen positions then have something to point to."""
    tokens = make_batch([[SPECIAL.cls, SPECIAL.sep]])
    ids, nothing = tokens.input_ids, torch.zeros(1, 2, dtype=torch.bool)
    batch = CorruptedBatch(tokens, ids, nothing, 0, 2).locate(["chosen", "words"], even=True)
    chosen, words = batch.places("chosen"), batch.places("words")
    logits = words.gather(torch.rand(1, 2, 5))
    assert logits.index_select(0, chosen.among(words)).shape == (1, 5)
    assert (chosen.count, words.count) == (0, 0)
    assert torch.equal(words.scatter(ids, torch.tensor([9])), ids)
