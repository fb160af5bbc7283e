import pytest
import torch
from scipy import stats

from discern.corruption.randomness import Randomness
from discern.corruption.sampling import replace_positions, sample_tokens


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
    # 30,522 candidates of equal probability: rounding in the running sum must not favour some or drop the last.
    vocabulary, draws = 30_522, 20_000
    uniforms = Randomness(0, 0, torch.arange(20)).uniforms("replacements", draws // 20).flatten()
    sampled = torch.cat([sample_tokens(torch.zeros(len(part), vocabulary), part) for part in uniforms.split(500)])
    assert stats.chisquare(torch.histc(sampled.double(), 25, 0, vocabulary).numpy()).pvalue > 1e-4


def test_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(4, -1)
    assert sample_tokens(logits, torch.tensor([0.0, 0.4999, 0.5001, 0.99999])).tolist() == [0, 0, 1, 2]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).expand(3, -1)
    assert sample_tokens(logits, torch.tensor([0.0, 0.5, 1 - 2**-24])).tolist() == [1, 1, 1]


def test_no_gradient_flows_through_the_choice() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    assert not sample_tokens(logits, torch.rand(3)).requires_grad


def test_replacement_touches_the_chosen_positions_only() -> None:
    ids = torch.arange(12).view(2, 6)
    positions = torch.zeros(2, 6, dtype=torch.bool)
    positions[0, 1] = positions[1, 0] = positions[1, 5] = True
    corrupted = replace_positions(ids, positions, torch.tensor([90, 91, 92]))
    assert corrupted.tolist() == [[0, 90, 2, 3, 4, 5], [91, 7, 8, 9, 10, 92]]
    assert ids[0, 1] == 1, "the batch itself stays as it was"
