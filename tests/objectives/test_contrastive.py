import math
from dataclasses import replace

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.config import build_config
from discern.objectives.rtd_variants import SentenceContrast, is_tampered, sentence_loss
from discern.types import Places
from tests.objectives.rtd_options import build_option
from tests.objectives.test_conformance import batch, run
from tests.support import SPECIAL, make_batch

# Two rows: one text and padding; two texts side by side.
TOKENS = replace(
    make_batch([[SPECIAL.cls, 9, SPECIAL.sep], [SPECIAL.cls, 9, SPECIAL.cls, 8, 7]]),
    position_ids=torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]),
    document_ids=torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]),
)


def test_a_text_begins_where_its_positions_do() -> None:
    assert TOKENS.text_starts.nonzero().tolist() == [[0, 0], [1, 0], [1, 2]]
    assert not make_batch([[], [SPECIAL.cls]]).text_starts[0].any()


def test_a_text_is_tampered_with_where_any_of_its_tokens_was_replaced() -> None:
    replaced = torch.zeros(2, 5, dtype=torch.bool)
    assert is_tampered(replaced, TOKENS, Places.of(TOKENS.text_starts)).tolist() == [False, False, False]
    replaced[1, 4] = True
    assert is_tampered(replaced, TOKENS, Places.of(TOKENS.text_starts)).tolist() == [False, False, True]
    replaced[0, 1] = True
    assert is_tampered(replaced, TOKENS, Places.of(TOKENS.text_starts)).tolist() == [True, False, True]


def test_whole_texts_stay_clean_in_the_share_that_was_asked_for() -> None:
    rows = replace(
        make_batch([[SPECIAL.cls, 9, 9, SPECIAL.cls, 9, 9]] * 4000), position_ids=torch.tensor([[0, 1, 2] * 2]).expand(4000, -1)
    )
    contrast = SentenceContrast(build_config(), 0.2)
    corrupted = torch.full_like(rows.input_ids, 7)
    restored = contrast.restore(corrupted, rows, Randomness(0, 0, rows.slot)).view(8000, 3)
    clean = (restored == rows.input_ids.view(8000, 3)).all(1)
    assert (clean | (restored == 7).all(1)).all()
    assert clean.float().mean().item() == pytest.approx(0.2, abs=0.015)
    pairs = clean.view(4000, 2)
    assert (pairs[:, 0] & pairs[:, 1]).float().mean().item() == pytest.approx(0.04, abs=0.01)


def test_the_loss_is_the_cross_entropy_of_tampering() -> None:
    term = sentence_loss(torch.tensor([0.0, math.log(3.0)]), torch.tensor([True, False]), 2.0)
    assert term.total.item() == pytest.approx(math.log(2) + math.log(4))
    assert (term.count, term.weight) == (2, 2.0)


def test_without_a_weight_there_is_no_head_and_no_term() -> None:
    objective = build_option({"sentence_contrastive_weight": 0.0})
    assert objective.sentence_contrast is None
    assert set(run(objective, batch()).terms) == {"generator", "discriminator"}


def test_the_generator_learns_from_the_clean_texts_too() -> None:
    plain = run(build_option({}), batch())
    contrasting = run(build_option({"sentence_contrastive_weight": 1.0, "sentence_clean_probability": 0.5}), batch())
    torch.testing.assert_close(plain.terms["generator"].total, contrasting.terms["generator"].total)
    tampered = contrasting.observations["is_tampered"]
    assert tampered.tolist() == contrasting.observations["is_replaced"].any(1).tolist()
    assert 0 < int(tampered.sum()) < len(tampered)


def test_the_figures_tell_loss_and_accuracy_over_texts() -> None:
    objective, tokens = build_option({"sentence_contrastive_weight": 3.0}).eval(), batch()
    evaluator = objective.evaluator()
    numbers = Randomness(0, 0, tokens.slot)
    corrupted = objective.corrupt(tokens, numbers)
    output = objective(corrupted, numbers)
    evaluator.update(output, corrupted)
    figures = evaluator.compute()
    expected = figures["generator_loss"] + 50 * figures["discriminator_loss"] + 3 * figures["sentence_loss"]
    assert figures["loss"] == pytest.approx(expected)
    right = (output.observations["sentence_logits"] > 0) == output.observations["is_tampered"]
    assert figures["sentence_accuracy"] == pytest.approx(right.float().mean().item())
