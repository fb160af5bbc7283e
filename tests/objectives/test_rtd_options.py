"""Options of replaced token detection: which go together."""

from __future__ import annotations

from typing import Any

import pytest

from discern.objectives.rtd import RTDConfig
from tests.objectives.rtd_options import EQUAL


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
        ({"generator_warmup_steps": 3, "tying": "all", **EQUAL}, ["weights of its own", "generator_warmup_steps = 0"]),
        ({"algorithm": "adversarial", "masking": "with-replacement"}, ["probability of each sample", "masking = 'uniform'"]),
        ({"algorithm": "adversarial", "sentence_contrastive_weight": 1.0}, ["stay clean", "algorithm = 'joint'"]),
        ({"masking": "whole-words"}, ["unknown masking 'whole-words'; did you mean 'whole-word'"]),
        ({"mask_probability_end": 0.3}, ["set both or neither"]),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_to_set(options: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError, match=says[0]) as caught:
        RTDConfig(**options)
    assert all(words in str(caught.value) for words in says)
