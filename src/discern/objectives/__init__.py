"""Objectives: what to corrupt and what to predict. Each is one file (`rtd` a folder) and one line here."""

from __future__ import annotations

from typing import Any

from discern.registry import Registry

objectives: Registry[Any] = Registry("objective", "discern.objectives")
objectives.register("rtd", "discern.objectives.rtd:ReplacedTokenDetection")
objectives.register("mlm", "discern.objectives.mlm:MaskedLanguageModel")
objectives.register("permutation-lm", "discern.objectives.permutation_lm:PermutationLanguageModel")
objectives.register("electric", "discern.objectives.electric:Electric")
objectives.register("rtd-masked-only", "discern.objectives.rtd_masked_only:MaskedOnlyReplacedTokenDetection")
objectives.register("replace-mlm", "discern.objectives.replace_mlm:ReplaceMLM")
objectives.register("all-tokens-mlm", "discern.objectives.all_tokens_mlm:AllTokensMLM")

# What proposes the replacements of objective `rtd`, and how its two networks are trained.
generators: Registry[Any] = Registry("generator", "discern.generators")
generators.register("mlm", "discern.objectives.rtd:MaskedLMGenerator")
generators.register("two-tower", "discern.objectives.rtd_variants:TwoTowerGenerator")
generators.register("uniform", "discern.objectives.rtd_variants:UniformGenerator")
generators.register("unigram", "discern.objectives.rtd_variants:UnigramGenerator")

algorithms: Registry[Any] = Registry("algorithm", "discern.algorithms")
algorithms.register("joint", "discern.objectives.rtd:Joint")
algorithms.register("two-stage", "discern.objectives.rtd_variants:TwoStage")
algorithms.register("adversarial", "discern.objectives.rtd_variants:Adversarial")
