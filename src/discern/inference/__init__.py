"""Apply trained models to text: detect replaced tokens, score and re-rank sentences, fill masks, predict, embed."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

# Each scorer is a `TokenScorer` and one line here.
scorers: Registry[Any] = Registry("scorer", "discern.scorers")
scorers.register("electric", "discern.inference.scoring.scorers:Energies")
scorers.register("rtd", "discern.inference.scoring.scorers:ReplacedTokenOdds")
scorers.register("pll", "discern.inference.scoring.scorers:PseudoLikelihood")
scorers.register("pll-word-l2r", "discern.inference.scoring.scorers:WordwisePseudoLikelihood")
scorers.register("two-tower", "discern.inference.scoring.scorers:TwoTowerLikelihood")
scorers.register("inversion", "discern.inference.scoring.scorers:Inversion")
scorers.register("permutation-lm", "discern.inference.scoring.scorers:PermutationLikelihood")

PREFERRED = ("electric", "rtd", "pll", "two-tower", "permutation-lm")
"""Order of preference: without a name, the first scorer that the model has the networks for."""

PREFERRED_TO_RERANK = ("pll", "electric", "two-tower", "permutation-lm", "rtd")
"""Order for hypotheses of different lengths: likelihoods first, as the log-odds of `rtd` grow with every further token."""
