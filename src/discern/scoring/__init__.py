"""What a trained network says of text: which tokens look replaced, how likely a sentence is."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

# What gives each token of a text its number: one class and one line here for each.
scorers: Registry[Any] = Registry("scorer", "discern.scorers")
scorers.register("electric", "discern.scoring.one_pass:Energies")
scorers.register("rtd", "discern.scoring.one_pass:ReplacedTokenOdds")
scorers.register("pll", "discern.scoring.pseudo_likelihood:PseudoLikelihood")
scorers.register("pll-word-l2r", "discern.scoring.pseudo_likelihood:WordwisePseudoLikelihood")
scorers.register("two-tower", "discern.scoring.pseudo_likelihood:TwoTowerLikelihood")
scorers.register("inversion", "discern.scoring.inversion:Inversion")
scorers.register("permutation-lm", "discern.scoring.permutation:PermutationLikelihood")

PREFERRED = ("electric", "rtd", "pll", "two-tower", "permutation-lm")
"""Where none is named, the first of these that the model has the networks for."""

PREFERRED_TO_RERANK = ("pll", "electric", "two-tower", "permutation-lm", "rtd")
"""Likewise for hypotheses of different lengths: likelihoods first, as the odds of `rtd` grow with every further token."""
