"""A share of replayed rows: which, how many, and that any place is reached by itself."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from discern.data.batching.mixture import MixedStream, replay_fraction
from discern.data.batching.rows import build_packing
from discern.data.batching.stream import ExampleStream
from discern.data.config import DataConfig
from discern.errors import ConfigError
from tests.support import SPECIAL, MemorySplit, random_documents


def stream(seed: int, vocabulary: int) -> ExampleStream:
    split = MemorySplit(random_documents(12, vocabulary, seed))
    return ExampleStream(build_packing(split, SPECIAL, DataConfig(sequence_length=16), 0, training=True), 0)


MAIN, OTHER = stream(1, 500), stream(2, 500)


def sources(share: float, count: int) -> np.ndarray:
    """Which rows of a mixture are replayed, told by comparing them with both texts."""
    mixed = MixedStream(MAIN, OTHER, share).batch(np.arange(count), np.arange(count)).input_ids
    own = [MAIN.batch(np.arange(count), np.arange(count)).input_ids, OTHER.batch(np.arange(count), np.arange(count)).input_ids]
    found, places = [], [0, 0]
    for row in mixed:
        is_replayed = not torch.equal(row, own[0][places[0]])
        assert torch.equal(row, own[is_replayed][places[is_replayed]]), "rows of each text come in its own order, none left out"
        places[is_replayed] += 1
        found.append(is_replayed)
    return np.array(found)


@pytest.mark.parametrize(("share", "per", "of"), [(0.2, 1, 5), (0.5, 1, 2), (1 / 3, 1, 3), (0.75, 3, 4), (0.15, 3, 20)])
def test_the_share_is_exact_over_every_window(share: float, per: int, of: int) -> None:
    replayed = sources(share, 3 * of)
    windows = [replayed[start : start + of].sum() for start in range(2 * of)]
    assert set(windows) == {per}, "whole windows have exactly their share, wherever they begin"
    assert [int(replayed[:n].sum()) for n in range(3 * of)] == [n * per // of for n in range(3 * of)]


def test_no_share_is_the_text_itself() -> None:
    indices = np.arange(40)
    mixed, plain = MixedStream(MAIN, OTHER, 0.0).batch(indices, indices), MAIN.batch(indices, indices)
    assert torch.equal(mixed.input_ids, plain.input_ids)
    assert torch.equal(mixed.example_index, plain.example_index)


def test_any_batch_is_what_it_would_be_in_order() -> None:
    whole = MixedStream(MAIN, OTHER, 0.3).batch(np.arange(200), np.arange(200))
    chosen = np.array([173, 2, 90, 91])
    part = MixedStream(MAIN, OTHER, 0.3).batch(chosen, np.arange(4))
    for name in ("input_ids", "attention_mask", "special_tokens_mask", "token_type_ids", "position_ids", "word_starts"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[chosen]), name
    assert part.slot.tolist() == [0, 1, 2, 3]
    assert part.example_index.tolist() == chosen.tolist()


def test_a_share_is_taken_to_a_thousandth() -> None:
    for share, fraction in ((0.0, 0), (0.2, Fraction(1, 5)), (1 / 3, Fraction(1, 3)), (0.001, Fraction(1, 1000))):
        assert replay_fraction(share) == fraction
    assert replay_fraction(0.999) == Fraction(999, 1000)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.9996, "the share of replayed text is 0.9996, .* your own text would not be trained on"),
        (0.0004, "the share of replayed text is 0.0004, .* nothing would be replayed"),
        (1e-300, "the share of replayed text is 1e-300, .* nothing would be replayed"),
        (1.0, "the share of replayed text is 1"),
        (-0.1, "the share of replayed text is -0.1"),
        (float("nan"), "the share of replayed text is nan"),
        (float("inf"), "the share of replayed text is inf"),
    ],
)
def test_a_share_that_leaves_a_text_out_is_refused(share: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        replay_fraction(share)
    assert "--replay-share 0" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=said):
        MixedStream(MAIN, OTHER, share)
