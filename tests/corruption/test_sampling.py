import math
from contextlib import nullcontext

import pytest
import torch
from scipy import stats

from discern import kernels
from discern.corruption.masking import Sampling, sample_tokens
from discern.corruption.randomness import Randomness, key_of


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_are_distributed_as_the_softmax(temperature: float, dtype: torch.dtype) -> None:
    draws, vocabulary = 200_000, 40
    logits = (torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    uniforms = Randomness(3, 0, torch.arange(200)).uniforms("replacements", draws // 200).flatten()
    sampled = sample_tokens(logits.expand(draws, -1), uniforms, temperature)
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    observed = torch.bincount(sampled, minlength=vocabulary)
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


def test_a_large_vocabulary_loses_no_tail() -> None:
    # 30,522 candidates of equal probability: rounding in the running sum must not favor some or drop the last.
    vocabulary, uniforms = 30_522, torch.cat([torch.arange(0, 1, 1e-3), torch.tensor([1 - 2**-24])])
    sampled = torch.cat([sample_tokens(torch.zeros(len(part), vocabulary), part) for part in uniforms.split(500)])
    assert (sampled - uniforms.double() * vocabulary).abs().max() < 2
    assert sampled[-1] == vocabulary - 1


def test_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(4, -1)
    assert sample_tokens(logits, torch.tensor([0.0, 0.4999, 0.5001, 0.99999])).tolist() == [0, 0, 1, 2]


PROBABILITIES = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, [1]), (0.4, [1]), (0.41, [1, 3]), (0.7, [1, 3]), (0.8, [1, 3, 4]), (0.99, [0, 1, 3, 4])]
)
def test_top_p_keeps_the_fewest_that_reach_the_mass(top_p: float, kept: list[int]) -> None:
    sampling = Sampling(top_p=top_p - 1e-6)  # a little less, as 0.4 + 0.3 may or may not reach 0.7 in floating point
    for drawn, expected in ((None, kept), (torch.tensor([0]), sorted({0, *kept}))):
        logits = sampling.logits(PROBABILITIES.log(), torch.tensor([0]), drawn)
        assert logits.isfinite()[0].nonzero().flatten().tolist() == expected


def test_what_is_left_out_is_never_drawn_and_the_rest_keeps_its_proportions() -> None:
    uniforms = (torch.arange(1000) + 0.5) / 1000
    logits = PROBABILITIES.log().expand(1000, -1).contiguous()
    originals = torch.full((1000,), 1)
    sampling = Sampling(top_p=0.8, disallow_original=True)
    drawn = sampling.sample(logits, uniforms, originals)
    # Without token 1 there are 1/6, 3/6 and 2/6; the likeliest two make 5/6 and reach 0.8.
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 0, 0, 600, 400]


def test_the_temperature_divides_once_whichever_way_is_taken() -> None:
    uniforms = (torch.arange(500) + 0.5) / 500
    logits = torch.tensor([[0.0, math.log(9.0)]]).expand(500, -1).contiguous()
    expected = torch.bincount(sample_tokens(logits, uniforms, 2.0)).tolist()
    assert expected == [125, 375]  # 9 to the power of 1/2
    for sampling in (Sampling(2.0), Sampling(2.0, top_p=0.9999)):
        drawn = sampling.sample(logits, uniforms, torch.zeros(500, dtype=torch.int64))
        assert torch.bincount(drawn).tolist() == expected


def test_rounding_never_reaches_a_token_that_is_left_out() -> None:
    logits = torch.full((4, 300), float("-inf"))
    logits[:, 100:200] = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    for uniform, last in ((0.0, 100), (1 - 2**-24, 199)):
        for context in (nullcontext(), kernels.switched_off()):
            with context:
                assert sample_tokens(logits, torch.full((4,), uniform)).tolist() == [last] * 4


def numbers(seed: int = 0, step: int = 0, examples: int = 64) -> Randomness:
    return Randomness(seed, step, torch.arange(examples))


def test_numbers_do_not_depend_on_how_the_batch_is_cut() -> None:
    whole = numbers().uniforms("masks", 50)
    parts = [numbers().rows(start, start + 16).uniforms("masks", 50) for start in range(0, 64, 16)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[:, :20], numbers().uniforms("masks", 20)), "a shorter row has the same beginning"


def test_known_values_do_not_change() -> None:
    # Golden: these numbers decide every mask of every run; changing them changes what a seed means.
    assert numbers(examples=2).integers("masked positions", 2).tolist() == [
        [1793093357259105905, -1679733057511595341],
        [-483464265191959690, -4449614209274893221],
    ]


def test_keys_are_distinct_and_positive() -> None:
    keys = {key_of(seed, "dropout", step) for seed in range(20) for step in range(20)}
    assert len(keys) == 400
    assert min(keys) >= 0


def test_exponential_numbers_follow_their_law() -> None:
    values = numbers(examples=500).exponentials("x", 400).flatten()
    assert values.dtype == torch.float64
    assert values.min() > 0
    assert torch.isfinite(values).all()
    assert stats.kstest(values.numpy(), "expon").pvalue > 1e-4
