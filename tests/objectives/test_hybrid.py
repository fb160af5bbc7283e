"""Masked and causal language modeling with one network, and a discriminator that corrects what it reads."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.objectives.hybrid import HybridConfig, HybridLanguageModel, predicting_states
from discern.objectives.masked import restore_tokens
from discern.objectives.rtd import RTDConfig
from discern.training.config import load_pretrain_config
from discern.types import TokenBatch
from tests.objectives.rtd_options import build_option
from tests.support import SPECIAL, make_batch, settings

WORDS = 30


def hybrid(**options: Any) -> HybridLanguageModel:
    objective = HybridLanguageModel(HybridConfig(causal_fraction=0.5, **options), settings(WORDS))
    objective.initialize(0)
    return objective


def rows(*texts: list[int]) -> TokenBatch:
    return make_batch([[SPECIAL.cls, *text, SPECIAL.sep] for text in texts])


@pytest.mark.parametrize(("fraction", "causal"), [(0.5, [1, 3, 5, 7]), (0.25, [3, 7]), (1 / 3, [2, 5]), (0.125, [7])])
def test_causal_rows_are_evenly_spaced_and_nothing_in_them_is_masked(fraction: float, causal: list[int]) -> None:
    objective = HybridLanguageModel(HybridConfig(causal_fraction=fraction), settings(WORDS))
    tokens = rows(*[[*range(9, 29)]] * 8)
    batch = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
    assert batch.is_causal is not None
    assert batch.is_causal.nonzero().flatten().tolist() == causal
    assert torch.equal(batch.masked_ids[causal], tokens.input_ids[causal])
    assert batch.masked_positions.sum(1).tolist() == [0 if row in causal else 6 for row in range(8)]
    assert torch.equal(batch.mask("next").any(1), batch.is_causal)


def test_losses_by_hand() -> None:
    """A network that predicts the token that it reads: the losses count how often that is the next, or the masked, one."""
    objective, sharpness = hybrid(), 5.0
    tokens = rows([9, 9, 9, 9, 9, 9, 9, 9], [9, 9, 10, 10, 11, 12, 12, 12])
    objective.encoder.forward = lambda ids, *_, **__: F.one_hot(ids, WORDS).float()  # type: ignore[method-assign, assignment]
    objective.head.forward = lambda states: sharpness * states  # type: ignore[method-assign]
    batch = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
    output = objective(batch, Randomness(0, 0, tokens.slot))
    of_any = math.log(math.exp(sharpness) + WORDS - 1)
    # 2 of the first row's 8 words are [MASK], which is never right; of the second row's 8, 4 equal the one before.
    assert output.terms["mlm"].total.item() == pytest.approx(2 * of_any)
    assert output.terms["causal_lm"].total.item() == pytest.approx(8 * of_any - 4 * sharpness)
    assert [(term.count, term.weight) for term in output.terms.values()] == [(2, 0.5), (8, 0.5)]


def test_a_causal_row_does_not_see_ahead() -> None:
    objective = hybrid().eval()
    tokens = rows([9, 10, 11, 12, 13, 14], [9, 10, 11, 12, 13, 14])

    def states(tokens: TokenBatch) -> Tensor:
        batch = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
        return predicting_states(objective.states(batch), batch.places("next"), batch)

    changed = replace(tokens, input_ids=tokens.input_ids.clone())
    changed.input_ids[1, 4] = 20
    same = [torch.equal(*pair) for pair in zip(states(tokens), states(changed), strict=True)]
    assert same == [True] * 4 + [False] * 2  # of the words at 1 to 6


def test_pieces_of_a_row_are_apart() -> None:
    """The first word of the second piece follows nothing."""
    tokens = rows([9, 10, 11, 12, 13, 14], [9, 10, 11, 12, 13, 14])
    tokens = replace(tokens, document_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]] * 2))
    batch = hybrid().corrupt(tokens, Randomness(0, 0, tokens.slot))
    assert batch.mask("next")[1].nonzero().flatten().tolist() == [1, 2, 3, 5, 6]


def test_the_generator_proposes_from_what_precedes() -> None:
    """In a causal row its logits at a chosen position are those of the state before, over the clean text."""
    objective = build_option({"generator": "hybrid", "causal_fraction": 0.5, "mask_probability": 0.3}).eval()
    tokens = rows(*[[*range(9, 29)]] * 4)
    numbers = Randomness(0, 0, tokens.slot)
    batch = objective.corrupt(tokens, numbers)
    assert batch.is_causal is not None
    assert batch.masked_positions.sum(1).tolist() == [6] * 4
    network = objective.networks()["generator"]
    causal = torch.tensor([False, True, False, True])
    logits = network.head(network.encoder(batch.masked_ids, *tokens.context, is_causal=causal))
    shifted = torch.where(causal[:, None, None], logits.roll(1, 1), logits)
    prediction = objective._generator.predict(batch)
    torch.testing.assert_close(prediction.chosen_logits.matrix(), shifted[batch.masked_positions])
    learned = batch.masked_positions.where(~causal[:, None], batch.mask("next"))
    torch.testing.assert_close(prediction.logits.matrix(), shifted[learned])
    output = objective(batch, numbers)
    assert output.terms["generator"].count == int(learned.sum()) == 2 * 6 + 2 * 20
    assert output.terms["discriminator"].count == 4 * 22


def test_correction_by_hand() -> None:
    """P(word) is the gate for the token that was read, plus the rest of the gate times the softmax."""
    objective = build_option({"correction_weight": 2.0, "mask_probability": 0.3}).eval()
    tokens = rows([*range(9, 29)], [*range(9, 20)])
    numbers = Randomness(0, 0, tokens.slot)
    batch = objective.corrupt(tokens, numbers)
    output, head = objective(batch, numbers), objective.correction_head
    assert head is not None
    read = output.observations["corrupted_ids"]
    hidden = objective.discriminator(read, *tokens.context)
    copied = torch.sigmoid(head.copy_logits(hidden))[..., None]
    probabilities = copied * F.one_hot(read, 50) + (1 - copied) * head(hidden).softmax(-1)
    losses = -probabilities.gather(2, tokens.input_ids[..., None]).squeeze(2).log()
    term = output.terms["correction"]
    torch.testing.assert_close(term.total, losses[tokens.attention_mask].sum())
    assert (term.count, term.weight) == (batch.num_tokens, 2.0)
    torch.testing.assert_close(restore_tokens(head, hidden, batch, read)[0].total, term.total)


@pytest.mark.parametrize("options", [("objective.name=hybrid",), ("objective.name=rtd", "objective.generator=hybrid")])
def test_an_encoder_that_cannot_read_left_to_right_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match="left to right, which encoder 'xlnet' cannot"):
        load_pretrain_config(None, "xlnet-small", options)


def test_other_generators_do_not_read_the_fraction() -> None:
    assert "causal_fraction" in RTDConfig().unread()
