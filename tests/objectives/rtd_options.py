"""Replaced token detection with each of its options, tiny."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from discern.objectives.base import Vocabulary
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from tests.support import SPECIAL, settings

EQUAL = {"generator_size": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "generator uniform": {"generator": "uniform"},
    "generator unigram": {"generator": "unigram"},
    "generator hybrid": {"generator": "hybrid", "causal_fraction": 0.4},
    "generator two-tower": {"generator": "two-tower"},
    "tying none": {"tying": "none"},
    "tying token": {"tying": "token"},
    "tying all": {"tying": "all", **EQUAL},
    "tying gradient-disentangled": {"tying": "gradient-disentangled", "discriminator_head": "bilinear"},
    "two towers, gradient-disentangled": {"tying": "gradient-disentangled", "generator": "two-tower"},
    "algorithm two-stage": {"algorithm": "two-stage", **EQUAL},
    "algorithm two-stage, small": {"algorithm": "two-stage", "copy_weights": False},
    "algorithm adversarial": {"algorithm": "adversarial"},
    "algorithm adversarial, cut": {"algorithm": "adversarial", "top_p": 0.9, "temperature": 1.5, "disallow_original": True},
    "sampling cut": {"top_p": 0.8, "disallow_original": True, "temperature": 0.7},
    "masking with replacement": {"masking": "with-replacement"},
    "sentence-contrastive": {"sentence_contrastive_weight": 1.0},
    "correction": {"correction_weight": 1.0},
    "correction, gradient-disentangled": {"correction_weight": 0.5, "tying": "gradient-disentangled"},
}


def build_option(
    options: dict[str, Any], *, dropout: float = 0.0, seed: int = 0, vocab_size: int = 50, **sizes: Any
) -> ReplacedTokenDetection:
    """The objective of these settings, its weights filled."""
    given = settings(vocab_size, hidden_dropout=dropout, attention_dropout=dropout, **sizes)
    counts = torch.ones(vocab_size, dtype=torch.int64)
    objective = ReplacedTokenDetection(RTDConfig(**options), replace(given, vocabulary=Vocabulary(vocab_size, SPECIAL, counts)))
    objective.initialize(seed)
    return objective
