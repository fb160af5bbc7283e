"""Options of replaced token detection: which go together, the schedules of the weights, and what is shared."""

from __future__ import annotations

from typing import Any

import pytest

from discern.objectives.rtd import RTDConfig, factor_at
from tests.objectives.rtd_options import OPTIONS, build_option

EQUAL = {"generator_size": 1.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"generator": "two-tower", "tying": "all"}, ["two-tower", "set tying = 'embeddings'"]),
        ({"tying": "all"}, ["one encoder", "generator_size is 0.25", "set generator_size = 1.0"]),
        ({"algorithm": "two-stage"}, ["same sizes", "generator_size is 0.25", "copy_weights = false"]),
        ({"algorithm": "two-stage", "copy_weights": False, "freeze_generator_at": 5}, ["two_stage_steps", "leave out"]),
        ({"generator": "unigram", "algorithm": "adversarial"}, ["unigram", "no weights", "algorithm = 'joint'"]),
        ({"generator": "uniform", "generator_checkpoint": "run"}, ["no weights", "generator_checkpoint"]),
        ({"generator": "uniform", "top_p": 0.9}, ["equal probability", "leave out top_p", "generator = 'unigram'"]),
        ({"freeze_generator_at": 3}, ["still trains", "gradient-disentangled"]),
        ({"freeze_discriminator_at": 3, "freeze_generator_at": 9, "tying": "none"}, ["nothing is trained", "max_steps"]),
        ({"generator_warmup_steps": 3, "tying": "all", **EQUAL}, ["weights of its own", "generator_warmup_steps = 0"]),
        ({"algorithm": "adversarial", "masking": "with-replacement"}, ["probability of each sample", "masking = 'uniform'"]),
        ({"algorithm": "adversarial", "sentence_contrastive_weight": 1.0}, ["stay clean", "algorithm = 'joint'"]),
        ({"masking": "whole-words"}, ["unknown masking 'whole-words'; did you mean 'whole-word'"]),
        ({"mask_probability_end": 0.3}, ["set both or neither"]),
        ({"generator_weight_schedule": [[5, 1.0], [5, 0.0]]}, ["generator_weight_schedule", "larger than the one before"]),
        ({"generator_weight_schedule": [[0, -1.0]]}, ["generator_weight_schedule", "greater than or equal to 0"]),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_to_set(options: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError, match=says[0]) as caught:
        RTDConfig(**options)
    assert all(words in str(caught.value) for words in says)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ((), {0: 1.0, 7: 1.0, 10**9: 1.0}),
        (((10, 0.0), (20, 1.0), (40, 0.5)), {0: 0.0, 10: 0.0, 15: 0.5, 20: 1.0, 30: 0.75, 40: 0.5, 99: 0.5}),
        (((999, 1.0), (1000, 0.0)), {0: 1.0, 999: 1.0, 1000: 0.0, 1001: 0.0}),
    ],
)
def test_lines_run_between_the_points_of_a_schedule(points: tuple[tuple[int, float], ...], expected: dict[int, float]) -> None:
    assert {step: factor_at(points, step) for step in expected} == expected


def test_with_everything_tied_there_is_one_encoder() -> None:
    networks = build_option(OPTIONS["tying all"]).networks()
    assert networks["discriminator"].encoder is networks["generator"].encoder
