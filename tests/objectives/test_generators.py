import math

import pytest
import torch

from discern.corruption.masking import maskable_positions
from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.objectives.base import BuildSettings, Vocabulary
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.objectives.rtd_variants import FrequencyTable
from tests.objectives.rtd_options import build_option
from tests.objectives.test_conformance import batch, randomness, run
from tests.support import SPECIAL, make_batch, settings


def unigram(counts: torch.Tensor | None, vocab_size: int = 8) -> ReplacedTokenDetection:
    given = settings(vocab_size)
    return ReplacedTokenDetection(
        RTDConfig(generator="unigram", mask_probability=0.5), BuildSettings(given.model, Vocabulary(vocab_size, SPECIAL, counts))
    )


def test_the_uniform_generator_loses_log_vocabulary_and_moves_nothing() -> None:
    objective = build_option({"generator": "uniform"}, vocab_size=50)
    term = run(objective, batch()).terms["generator"]
    torch.testing.assert_close(term.total / term.count, torch.tensor(math.log(50)))
    assert not term.total.requires_grad
    assert "generator" not in objective.networks()


def test_the_unigram_generator_counts_each_word_once_more() -> None:
    table = FrequencyTable(4, torch.tensor([0, 1, 2, 3])).log_probabilities
    torch.testing.assert_close(table.exp(), torch.tensor([0.1, 0.2, 0.3, 0.4]))


def test_the_unigram_loss_and_samples_are_those_of_the_counts() -> None:
    objective = unigram(torch.tensor([0, 0, 0, 0, 0, 27, 47, 18]))  # of 100 with one more each: 28, 48, 19
    objective.initialize(0)
    tokens = make_batch([[SPECIAL.cls, *[6] * 40, SPECIAL.sep]] * 200)
    output = run(objective, tokens)
    torch.testing.assert_close(output.terms["generator"].total / output.terms["generator"].count, -torch.tensor(0.48).log())
    drawn = torch.bincount(output.observations["sampled_ids"], minlength=8) / output.terms["generator"].count
    torch.testing.assert_close(drawn[5:], torch.tensor([0.28, 0.48, 0.19]), atol=0.03, rtol=0)
    assert objective.initial_loss() - 50 * math.log(2) == pytest.approx(
        -sum(p * math.log(p) for p in (0.28, 0.48, 0.19, *[0.01] * 5)), rel=1e-5
    )


def test_the_unigram_generator_wants_counts_and_takes_them_from_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="how often each word occurs") as caught:
        unigram(None).initialize(0)
    assert "run or a data set" in (caught.value.hint or "")
    trained = unigram(torch.arange(8))
    loaded = unigram(None)
    loaded.load_state_dict(trained.state_dict())
    table = dict(loaded.named_buffers())["generator_frequencies.log_probabilities"]
    torch.testing.assert_close(table.exp(), (torch.arange(8) + 1) / 36)


def test_the_two_towers_learn_from_every_word_and_see_no_mask() -> None:
    objective, tokens = build_option({"generator": "two-tower"}), batch()
    corrupted = objective.corrupt(tokens, randomness(tokens))
    output = objective(corrupted, randomness(tokens))
    words = maskable_positions(tokens)
    assert output.terms["generator"].count == int(words.sum()) > corrupted.num_masked
    assert torch.equal(output.observations["generator_targets"], tokens.input_ids[words])
    assert torch.equal(output.observations["sampled_targets"], tokens.input_ids[corrupted.masked_positions])
    assert len(output.observations["sampled_ids"]) == corrupted.num_masked


def test_the_original_is_never_drawn_where_that_is_disallowed() -> None:
    for generator in ("mlm", "uniform", "two-tower"):
        objective = build_option({"generator": generator, "disallow_original": True}, vocab_size=6)
        tokens = make_batch([[SPECIAL.cls, *[5] * 30, SPECIAL.sep]] * 20)
        corrupted = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
        seen = objective(corrupted, Randomness(0, 0, tokens.slot)).observations
        assert (seen["sampled_ids"] != 5).all()
        assert torch.equal(seen["is_replaced"], corrupted.masked_positions)
