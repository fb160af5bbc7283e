"""Objectives: what to corrupt and what to predict. Each is a class and one line here."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

objectives: Registry[Any] = Registry("objective", "discern.objectives")
objectives.register("rtd", "discern.objectives.rtd:ReplacedTokenDetection")
objectives.register("mlm", "discern.objectives.masked:MaskedLanguageModel")
objectives.register("hybrid", "discern.objectives.hybrid:HybridLanguageModel")
objectives.register("permutation-lm", "discern.objectives.permutation_lm:PermutationLanguageModel")
objectives.register("electric", "discern.objectives.electric:Electric")
objectives.register("rtd-masked-only", "discern.objectives.ablations:MaskedOnlyReplacedTokenDetection")
objectives.register("replace-mlm", "discern.objectives.ablations:ReplaceMLM")
objectives.register("all-tokens-mlm", "discern.objectives.ablations:AllTokensMLM")

# What proposes the replacements of objective `rtd`, and how its two networks are trained.
generators: Registry[Any] = Registry("generator", "discern.generators")
generators.register("mlm", "discern.objectives.rtd:Generator")
generators.register("hybrid", "discern.objectives.hybrid:HybridGenerator")
generators.register("two-tower", "discern.objectives.rtd_variants:TwoTowerGenerator")
generators.register("uniform", "discern.objectives.rtd_variants:FixedGenerator")
generators.register("unigram", "discern.objectives.rtd_variants:FixedGenerator")

algorithms: Registry[Any] = Registry("algorithm", "discern.algorithms")
algorithms.register("joint", "discern.objectives.rtd:Algorithm")
algorithms.register("two-stage", "discern.objectives.rtd_variants:TwoStage")
algorithms.register("adversarial", "discern.objectives.rtd_variants:Adversarial")

TITLES = {
    "rtd": "replaced token detection (ELECTRA)",
    "mlm": "masked language modeling (BERT)",
    "hybrid": "masked and causal language modeling (GPT-BERT)",
    "electric": "noise-contrastive estimation of energies (Electric)",
    "replace-mlm": "masked language modeling without [MASK] (Replace MLM)",
    "all-tokens-mlm": "masked language modeling of all tokens, with a copy mechanism (All-Tokens MLM)",
    "rtd-masked-only": "replaced token detection at the chosen positions only (ELECTRA 15%)",
    "permutation-lm": "permutation language modeling",
}
"""Titles of the objectives, for people who read a page or a model card."""
