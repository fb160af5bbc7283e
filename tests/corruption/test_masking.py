"""What every registered masking must hold, what each of them promises besides, and how chosen positions are masked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats

from discern.corruption import maskings
from discern.corruption.masking import (
    Chosen,
    MaskingContext,
    chosen_share,
    draw_quota,
    hide,
    quota,
    span,
    span_lengths,
    words_of,
)
from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch

NAMES = maskings.names()


def rows(*lengths: int, ids: list[int] | None = None) -> TokenBatch:
    """One text per row, of so many tokens."""
    return make_batch([[SPECIAL.cls, *(ids or [9] * length), SPECIAL.sep] for length in lengths])


def mixed(count: int = 40) -> TokenBatch:
    """Rows of one or two segments, from no token to forty, with words of one token or more."""
    rng = torch.Generator().manual_seed(0)

    def tokens() -> list[int]:
        return torch.randint(5, 100, (int(torch.randint(0, 20, (1,), generator=rng)),), generator=rng).tolist()

    made = make_batch(
        [
            *([SPECIAL.cls, *tokens(), SPECIAL.sep, *tokens(), SPECIAL.sep] for _ in range(count)),
            [SPECIAL.cls, SPECIAL.sep],
            [SPECIAL.cls, 9, SPECIAL.sep],
            [SPECIAL.cls, *range(5, 45), SPECIAL.sep],
        ]
    )
    return replace(made, word_starts=torch.rand(made.input_ids.shape, generator=rng) < 0.6)


def choose(name: str, tokens: TokenBatch, step: int = 0, mask_probability: float = 0.15, **options: float) -> Chosen:
    counts = torch.arange(100) ** 2
    context = MaskingContext(mask_probability, Randomness(3, step, tokens.slot), counts, **options)  # type: ignore[arg-type]
    return maskings.load(name)(tokens, context)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask_probability", [0.001, 0.15, 0.5, 0.999])
def test_only_maskable_tokens_are_chosen_and_always_one(name: str, mask_probability: float) -> None:
    tokens = mixed()
    for step in range(5):
        chosen = choose(name, tokens, step, mask_probability)
        assert not (chosen.positions & ~tokens.maskable).any()
        assert torch.equal(chosen.positions.any(1), tokens.maskable.any(1))
        assert chosen.draws is None or torch.equal(chosen.positions, chosen.draws > 0)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"with-replacement"}))
@pytest.mark.parametrize("mask_probability", [0.15, 0.5])
def test_the_number_is_exact_if_words_are_single_tokens(name: str, mask_probability: float) -> None:
    tokens = mixed()
    tokens = replace(tokens, word_starts=torch.ones_like(tokens.attention_mask))
    found = choose(name, tokens, mask_probability=mask_probability).positions.sum(1)
    assert torch.equal(found, quota(tokens.maskable, mask_probability))


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_choose_what_the_whole_does(name: str) -> None:
    tokens = mixed()
    whole = choose(name, tokens, 7).positions
    parts = [choose(name, tokens.rows(start, start + 9), 7).positions for start in range(0, tokens.size, 9)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, choose(name, tokens, 8).positions)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"rarity"}))
def test_every_position_is_as_likely_as_any_other(name: str) -> None:
    """Words of one length, so that nothing but the place could matter. Bounds are five standard errors."""
    length, count, steps = 24, 200, 40
    begins = torch.arange(length + 2).remainder(2).bool()  # words of two, the first behind [CLS]
    tokens = replace(rows(*[length] * count), word_starts=begins.expand(count, -1))
    hits = torch.stack([choose(name, tokens, step, 0.25).positions.sum(0) for step in range(steps)]).sum(0)
    rates = hits[1:-1].double() / (count * steps)
    mean = 1 - (1 - 1 / length) ** 6 if name == "with-replacement" else 0.25  # 0.25 x 26 = 6.5 draws, half to even: 6
    assert (rates - mean).abs().max() < 5 * (mean * (1 - mean) / (count * steps)) ** 0.5


@pytest.mark.parametrize(("name", "lacks"), [("whole-word", "where words begin"), ("rarity", "how often each token occurs")])
def test_what_a_masking_needs_and_lacks_is_named(name: str, lacks: str) -> None:
    tokens = replace(mixed(), word_starts=None)
    with pytest.raises(ConfigError, match=lacks) as refused:
        maskings.load(name)(tokens, MaskingContext(0.15, Randomness(0, 0, tokens.slot)))
    assert "objective.masking=uniform" in str(refused.value.hint)


def test_quota_is_computed_as_a_person_would() -> None:
    def of(length: int, mask_probability: float) -> int:
        return int(quota(torch.ones(1, length, dtype=torch.bool), mask_probability))

    assert [of(length, 0.15) for length in (0, 1, 10, 30)] == [0, 1, 2, 4]  # 1.5 and 4.5 round to even
    assert of(30, 0.25) == 8  # 7.5
    assert of(190, 0.15) == 28  # 28.5; in float32 it is 28.500002, hence 29


@pytest.mark.parametrize("masking", ["uniform", "whole-word", "span", "with-replacement"])
@pytest.mark.parametrize(("length", "probability"), [(32, 0.15), (64, 0.25), (128, 0.15)])
def test_the_share_of_chosen_tokens_is_the_expected_one(masking: str, length: int, probability: float) -> None:
    count = 2000
    tokens = replace(rows(*[length - 2] * count), word_starts=(torch.arange(length) % 2 == 1).expand(count, length).contiguous())
    counts = choose(masking, tokens, mask_probability=probability).positions.sum(1).double()
    share = chosen_share(masking, probability, length)
    assert share is not None
    # Words of two leave one token of an odd number unchosen.
    slack = 1.0 if masking in ("whole-word", "span") else 1e-9
    assert float(counts.mean()) == pytest.approx(share * (length - 2), abs=slack + 5 * float(counts.std()) / count**0.5)


def test_draws_with_replacement_choose_less_than_they_say() -> None:
    for length, probability, distinct in ((128, 0.15, 17.7), (512, 0.15, 71.5), (512, 0.25, 113.3)):
        assert chosen_share("with-replacement", probability, length) == pytest.approx(distinct / (length - 2), abs=1e-4)
    assert chosen_share("uniform", 0.15, 64) == 9 / 62
    assert chosen_share("rarity", 0.15, 128) is chosen_share("of another package", 0.15, 128) is None


@pytest.mark.parametrize(
    ("ids", "mask_probability", "weights"),
    [([5, 6, 7, 8], 0.25, [1 / 30, 1 / 10, 1 / 5, 1.0]), ([8, 6, 5], 0.7, [1.0, 1 / 10, 1 / 30])],
)
def test_rare_tokens_are_drawn_by_their_weights(ids: list[int], mask_probability: float, weights: list[float]) -> None:
    """One of four, and two of three without replacement: the third is left out if the other two come first, in any order."""
    counts, tokens, draws = torch.tensor([0, 0, 0, 0, 0, 900, 100, 25, 1]), rows(*[0] * 1000, ids=ids), 20
    total = torch.zeros(len(ids))
    for step in range(draws):
        context = MaskingContext(mask_probability, Randomness(0, step, tokens.slot), counts, rarity_exponent=0.5)
        total += maskings.load("rarity")(tokens, context).positions[:, 1:-1].sum(0)
    whole = sum(weights)
    if len(ids) == 4:
        expected = [weight / whole for weight in weights]
    else:
        a, b, c = weights
        left_out = [x / whole * y / (whole - x) + y / whole * x / (whole - y) for x, y in ((b, c), (a, c), (a, b))]
        expected = [1 - share for share in left_out]
    assert (total / (1000 * draws)).tolist() == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(
    ("real", "width", "mask_probability", "expected"),
    [
        (128, 128, 0.15, 19),  # 19.2
        (512, 512, 0.15, 77),  # 76.8, at most int(0.155 x 512) = 79
        (30, 128, 0.15, 4),  # 4.5, half to even
        (190, 512, 0.15, 29),  # 28.5 in decimals, 28.500002 in the float32 of the released code
        (3, 128, 0.15, 1),  # 0.45, but one at least
        (32, 32, 0.15, 4),  # 4.8 would be 5, but int(0.155 x 32) = 4 at most
        (2, 16, 0.15, 0),  # nothing but special tokens
    ],
)
def test_the_number_of_draws_counts_special_tokens_in(real: int, width: int, mask_probability: float, expected: int) -> None:
    mask = (torch.arange(width) < real)[None]
    assert draw_quota(mask, torch.tensor([real - 2]), mask_probability).tolist() == [expected]


def test_draws_are_independent() -> None:
    """Two draws of four positions: each of the ten outcomes as often as two dice with four sides say."""
    # 6 real tokens: 0.35 x 6 = 2.1; one row is wider, so that the cap does not bind.
    found = [choose("with-replacement", rows(*[4] * 500, 10), step, 0.35).draws for step in range(10)]
    drawn = torch.cat([draws[:-1, 1:5] for draws in found if draws is not None])
    assert (drawn.sum(1) == 2).all()
    doubles = torch.stack([(drawn[:, at] == 2).sum() for at in range(4)])
    pairs = torch.stack([((drawn[:, a] == 1) & (drawn[:, b] == 1)).sum() for a in range(4) for b in range(a)])
    observed = torch.cat([doubles, pairs]).double()
    expected = torch.tensor([1.0] * 4 + [2.0] * 6).double() / 16 * 5000
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


def test_words_by_hand() -> None:
    # [CLS] a b ##b [SEP] ##c d [SEP] and a short row: what stands behind a special token begins a word.
    tokens = make_batch([[SPECIAL.cls, 9, 10, 11, SPECIAL.sep, 12, 13, SPECIAL.sep], [SPECIAL.cls, 9, SPECIAL.sep]])
    starts = torch.tensor([[False, True, True, False, False, False, True, False], [False] * 8])
    number, lengths = words_of(replace(tokens, word_starts=starts))
    assert lengths.tolist() == [[1, 2, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert number[tokens.maskable].tolist() == [0, 1, 1, 2, 3, 0]
    # Read from the right, the words are a ##a, b and d ##c.
    number, _ = words_of(replace(tokens, word_starts=starts, is_reversed=torch.tensor([True, False])))
    assert number[0][tokens.maskable[0]].tolist() == [0, 1, 2, 3, 3]
    assert words_of(replace(tokens, word_starts=None))[1][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_words_are_taken_as_by_the_plain_loop() -> None:
    """Word after word, each unless it exceeds the number: what BERT's script does, here without the loop."""
    starts = torch.rand(60, 62, generator=torch.Generator().manual_seed(0)) < 0.4
    tokens = replace(rows(*range(1, 61)), word_starts=starts)
    chosen = choose("whole-word", tokens).positions
    keys = Randomness(3, 0, tokens.slot).integers("masked words", 62)
    for row, (number, found) in enumerate(zip(*words_of(tokens), strict=True)):
        lengths, left, expected = found[found > 0].tolist(), int(quota(tokens.maskable, 0.15)[row]), set()
        order = keys[row, : len(lengths)].argsort().tolist()
        for word in order:
            if lengths[word] <= left:
                expected.add(word)
                left -= lengths[word]
        expected = expected or {min(order, key=lengths.__getitem__)}
        assert set(number[chosen[row]].tolist()) == expected
        assert int(chosen[row].sum()) == sum(lengths[word] for word in expected)  # whole words


def test_lengths_of_spans_by_hand() -> None:
    # Weights 1, 1/2, 1/3, 1/4, 1/5 of their sum 2.2833.
    weights = [1 / words for words in range(1, 6)]
    bounds = torch.tensor([1, 3 / 2, 11 / 6, 25 / 12]).double() / (137 / 60)
    assert span_lengths(torch.tensor([0.0, *(bounds - 1e-4), 1 - 2**-24]), weights).tolist() == [1, 1, 2, 3, 4, 5]
    assert span_lengths((bounds + 1e-4).float(), weights).tolist() == [2, 3, 4, 5]


def test_spans_are_of_whole_words() -> None:
    tokens = replace(rows(*[80] * 100), word_starts=torch.rand(100, 82, generator=torch.Generator().manual_seed(0)) < 0.7)
    (number, lengths), chosen = words_of(tokens), choose("span", tokens, mask_probability=0.25).positions
    taken = torch.zeros_like(lengths).scatter_add_(1, number, chosen.long())
    assert ((taken == 0) | (taken == lengths)).all()
    words, runs = int((taken > 0).sum()), int((chosen[:, 1:] & ~chosen[:, :-1]).sum())
    assert words / runs > 2.5  # words stand together: 14 of 56 drawn singly make runs of 1.3


def test_a_span_goes_on_behind_a_special_token() -> None:
    tokens = make_batch([[SPECIAL.cls, *[9] * 5, SPECIAL.sep, *[9] * 5, SPECIAL.sep]] * 200)
    context = MaskingContext(0.3, Randomness(0, 0, tokens.slot), span_stop_probability=0.01)
    positions = span(tokens, context).positions
    assert (positions[:, 5] & positions[:, 7]).any()
    assert (positions.sum(1) == 3).all()


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.85, 0.0), (0.8, 0.1)])
@pytest.mark.parametrize("times", [None, 1, 3])
def test_chosen_tokens_become_mask_random_or_stay(shares: tuple[float, float], times: int | None) -> None:
    """With several draws, a position is masked if any of them says so."""
    tokens = rows(*[60] * 500)
    chosen = tokens.maskable
    drawn = Chosen(chosen, None if times is None else chosen.long() * times)
    hidden = hide(tokens.input_ids, drawn, shares, (SPECIAL.mask, 10**6), Randomness(0, 0, tokens.slot))
    assert torch.equal(hidden[~chosen], tokens.input_ids[~chosen])
    found = hidden[chosen]
    masked, unchanged = (float((found == token).double().mean()) for token in (SPECIAL.mask, 9))
    assert masked == pytest.approx(1 - (1 - shares[0]) ** (times or 1), abs=0.01)
    assert unchanged == pytest.approx((1 - sum(shares)) ** (times or 1), abs=0.01)
    random_ids = found[(found != SPECIAL.mask) & (found != 9)]
    assert not len(random_ids) or stats.chisquare(torch.histc(random_ids.double(), 10, 0, 10**6).numpy()).pvalue > 1e-4
