"""Fixed and two-tower generators, and the sentence-level task, against values computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.errors import ConfigError
from discern.models.config import build_config
from discern.objectives.base import Vocabulary
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.objectives.rtd_variants import SentenceContrast
from discern.types import Places
from tests.objectives.rtd_options import build_option
from tests.objectives.test_conformance import batch, randomness, run
from tests.support import SPECIAL, make_batch, settings

COUNTS = torch.tensor([0, 0, 0, 0, 0, 27, 47, 18])
# Two rows: one text and padding; two texts side by side.
TEXTS = replace(
    make_batch([[SPECIAL.cls, 9, SPECIAL.sep], [SPECIAL.cls, 9, SPECIAL.cls, 8, 7]]),
    position_ids=torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]),
)


def unigram(counts: torch.Tensor | None) -> ReplacedTokenDetection:
    given = replace(settings(8), vocabulary=Vocabulary(8, SPECIAL, counts))
    return ReplacedTokenDetection(RTDConfig(generator="unigram", mask_probability=0.5), given)


def test_the_uniform_generator_loses_log_vocabulary_and_moves_nothing() -> None:
    objective = build_option({"generator": "uniform"}, vocab_size=50)
    term = run(objective, batch()).terms["generator"]
    torch.testing.assert_close(term.total / term.count, torch.tensor(math.log(50)))
    assert not term.total.requires_grad
    assert "generator" not in objective.networks()
    assert not any(name.startswith("generator") for name in objective.state_dict())


def test_the_unigram_generator_counts_each_word_once_more() -> None:
    objective = unigram(COUNTS)
    objective.initialize(0)
    output = run(objective, make_batch([[SPECIAL.cls, *[6] * 40, SPECIAL.sep]] * 200))
    probabilities = torch.tensor([*[0.01] * 5, 0.28, 0.48, 0.19])  # of 100 with one more each
    term = output.terms["generator"]
    torch.testing.assert_close(term.total / term.count, -torch.tensor(0.48).log())
    drawn = torch.bincount(output.observations["sampled_ids"], minlength=8) / term.count
    torch.testing.assert_close(drawn, probabilities, atol=0.03, rtol=0)


def test_the_unigram_generator_needs_counts_and_takes_them_from_a_checkpoint() -> None:
    loaded = unigram(None)
    with pytest.raises(ConfigError, match="how often each word occurs") as caught:
        loaded.initialize(0)
    assert "run or a data set" in (caught.value.hint or "")
    loaded.load_state_dict(unigram(COUNTS).state_dict())
    table = dict(loaded.named_buffers())["generator_frequencies.log_probabilities"]
    torch.testing.assert_close(table.exp(), (COUNTS + 1) / 100)


@pytest.mark.parametrize("generator", ["mlm", "uniform", "two-tower"])
def test_the_original_is_never_drawn_where_that_is_disallowed(generator: str) -> None:
    objective = build_option({"generator": generator, "disallow_original": True}, vocab_size=6)
    tokens = make_batch([[SPECIAL.cls, *[5] * 30, SPECIAL.sep]] * 20)
    output = run(objective, tokens)
    assert (output.observations["sampled_ids"] != 5).all()
    chosen = objective.corrupt(tokens, randomness(tokens)).masked_positions
    assert torch.equal(output.observations["is_replaced"], chosen)


@pytest.mark.parametrize(
    ("replaced", "tampered"),
    [([], [False, False, False]), ([[1, 4]], [False, False, True]), ([[1, 4], [0, 1]], [True, False, True])],
)
def test_the_loss_is_the_cross_entropy_of_texts_in_which_any_token_was_replaced(
    replaced: list[list[int]], tampered: list[bool]
) -> None:
    contrast, hidden, is_replaced = SentenceContrast(build_config(), 0.2, 2.0), torch.randn(2, 5, 256), torch.zeros(2, 5).bool()
    for row, position in replaced:
        is_replaced[row, position] = True
    term, seen = contrast.loss(hidden, is_replaced, TEXTS, Places.of(TEXTS.text_starts))
    assert seen["is_tampered"].tolist() == tampered
    logits = seen["sentence_logits"]
    torch.testing.assert_close(logits, contrast.head(hidden)[TEXTS.text_starts])
    expected = -torch.where(seen["is_tampered"], logits, -logits).sigmoid().log().sum().item()
    assert (term.total.item(), term.count, term.weight) == (pytest.approx(expected, rel=1e-5), 3, 2.0)


def test_whole_texts_stay_clean_in_the_given_share() -> None:
    rows = make_batch([[SPECIAL.cls, 9, 9, SPECIAL.cls, 9, 9]] * 4000)
    rows = replace(rows, position_ids=torch.tensor([[0, 1, 2] * 2]).expand(4000, -1))
    corrupted = torch.full_like(rows.input_ids, 7)
    restored = SentenceContrast(build_config(), 0.2, 1.0).restore(corrupted, rows, Randomness(0, 0, rows.slot)).view(8000, 3)
    clean = (restored == rows.input_ids.view(8000, 3)).all(1)
    assert (clean | (restored == 7).all(1)).all()
    assert clean.float().mean().item() == pytest.approx(0.2, abs=0.015)
    assert clean.view(4000, 2).all(1).float().mean().item() == pytest.approx(0.04, abs=0.01)


def test_the_metrics_include_loss_and_accuracy_over_texts() -> None:
    objective, tokens = build_option({"sentence_contrastive_weight": 3.0}).eval(), batch()
    corrupted, evaluator = objective.corrupt(tokens, randomness(tokens)), objective.evaluator()
    output = objective(corrupted, randomness(tokens))
    evaluator.update(output, corrupted)
    metrics = evaluator.compute()
    expected = metrics["generator_loss"] + 50 * metrics["discriminator_loss"] + 3 * metrics["sentence_loss"]
    assert metrics["loss"] == pytest.approx(expected)
    right = (output.observations["sentence_logits"] > 0) == output.observations["is_tampered"]
    assert metrics["sentence_accuracy"] == pytest.approx(right.float().mean().item())
