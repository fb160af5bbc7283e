"""What every registered masking must hold. A new one is tested by being registered."""

from dataclasses import fields, replace

import pytest
import torch

from discern.corruption import maskings
from discern.corruption.masking import Chosen, MaskingContext, maskable_positions, quota
from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch

NAMES = maskings.names()


def batch(rows: int = 40, seed: int = 0) -> TokenBatch:
    """Rows of one or two segments, from no token to forty, with words of one token or more."""
    rng = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        count = int(torch.randint(0, most, (1,), generator=rng))
        return torch.randint(5, 100, (count,), generator=rng).tolist()

    ids = [[SPECIAL.cls, *tokens(20), SPECIAL.sep, *tokens(20), SPECIAL.sep] for _ in range(rows)]
    made = make_batch(
        [*ids, [SPECIAL.cls, SPECIAL.sep], [SPECIAL.cls, 9, SPECIAL.sep], [SPECIAL.cls, *range(5, 45), SPECIAL.sep]]
    )
    return replace(made, word_starts=torch.rand(made.input_ids.shape, generator=rng) < 0.6)


def choose(name: str, tokens: TokenBatch, step: int = 0, mask_probability: float = 0.15) -> Chosen:
    counts = torch.arange(100) ** 2
    return maskings.load(name)(tokens, MaskingContext(mask_probability, Randomness(3, step, tokens.slot), counts))


def test_the_released_maskings_are_there() -> None:
    assert NAMES == ["entropy", "rarity", "span", "uniform", "whole-word", "with-replacement"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask_probability", [0.001, 0.15, 0.5, 0.999])
def test_only_maskable_tokens_and_always_one(name: str, mask_probability: float) -> None:
    tokens = batch()
    maskable = maskable_positions(tokens)
    for step in range(5):
        chosen = choose(name, tokens, step, mask_probability).positions
        assert chosen.dtype == torch.bool
        assert not (chosen & ~maskable).any()
        assert torch.equal(chosen.any(1), maskable.any(1))


@pytest.mark.parametrize("name", NAMES)
def test_draws_say_how_often_each_position_was_chosen(name: str) -> None:
    chosen = choose(name, batch())
    assert chosen.draws is None or torch.equal(chosen.positions, chosen.draws > 0)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"with-replacement"}))
@pytest.mark.parametrize("mask_probability", [0.15, 0.5])
def test_the_number_is_exact_where_words_are_single_tokens(name: str, mask_probability: float) -> None:
    tokens = batch()
    tokens = replace(tokens, word_starts=torch.ones_like(tokens.attention_mask))
    expected = quota(maskable_positions(tokens), mask_probability)
    assert torch.equal(choose(name, tokens, mask_probability=mask_probability).positions.sum(1), expected)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_choose_what_the_whole_does(name: str) -> None:
    tokens = batch()
    whole = choose(name, tokens, 7).positions
    parts = [choose(name, tokens.rows(start, start + 9), 7).positions for start in range(0, tokens.size, 9)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, choose(name, tokens, 8).positions)


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_stays_as_it_was(name: str) -> None:
    tokens = batch()
    before = {item.name: getattr(tokens, item.name) for item in fields(tokens)}
    copies = {key: value.clone() for key, value in before.items() if isinstance(value, torch.Tensor)}
    choose(name, tokens)
    assert all(torch.equal(copy, before[key]) for key, copy in copies.items())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"rarity"}))
def test_every_position_is_as_likely_as_any_other(name: str) -> None:
    """Words of one length, so that nothing but the place could matter. Bounds are five standard errors."""
    length, rows, steps = 24, 200, 40
    tokens = make_batch([[SPECIAL.cls, *range(5, 5 + length), SPECIAL.sep]] * rows)
    begins = torch.arange(length + 2).remainder(2).bool()  # words of two, the first behind [CLS]
    tokens = replace(tokens, word_starts=begins.expand(rows, -1))
    hits = sum(choose(name, tokens, step, 0.25).positions.sum(0) for step in range(steps))
    assert isinstance(hits, torch.Tensor)
    rates = hits[1:-1].double() / (rows * steps)
    mean = 1 - (1 - 1 / length) ** 6 if name == "with-replacement" else 0.25  # 0.25 x 26 = 6.5 draws, half to even: 6
    bound = 5 * (mean * (1 - mean) / (rows * steps)) ** 0.5
    assert (rates - mean).abs().max() < bound


def test_a_batch_without_word_starts_is_refused() -> None:
    tokens = replace(batch(), word_starts=None)
    with pytest.raises(ConfigError, match="needs to know where words begin") as refused:
        choose("whole-word", tokens)
    assert "discern prepare" in str(refused.value.hint)


def test_a_vocabulary_without_counts_is_refused() -> None:
    tokens = batch()
    with pytest.raises(ConfigError, match="how often each token occurs") as refused:
        maskings.load("rarity")(tokens, MaskingContext(0.15, Randomness(0, 0, tokens.slot)))
    assert "objective.masking=uniform" in str(refused.value.hint)
