"""What a network that predicts words has to beat: their frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from discern.model.bert import BertEncoder
from discern.objectives.base import Objective, Vocabulary
from discern.objectives.mlm import MaskedLanguageModel
from discern.objectives.permutation_lm import PermutationLanguageModel
from discern.objectives.replace_mlm import ReplaceMLM
from discern.training.advice import LOCAL_START, LONGER, Advice


@dataclass(frozen=True)
class WordPrediction:
    """What an encoder that predicts words has to beat.

    Attributes:
        figure: its held-out loss.
        entropy: of the words' frequencies, in nats.
        shown: share of the chosen positions at which a word stands; the others show nothing of the answer.
        right: share of these at which it is the answer; None: that of the samples, `sampled_accuracy`.
        advice: what helps a network that does not.
    """

    figure: str
    entropy: float
    shown: float = 0.0
    right: float | None = 0.0
    advice: tuple[Advice, ...] = (LONGER,)

    def loss_without_context(self, right: float) -> float:
        """Nats of one who knows the frequencies, and how far to believe the word that stands there, but reads nothing else."""
        doubt = -sum(share * math.log(share) for share in (right, 1 - right) if share > 0)
        return (1 - self.shown) * self.entropy + self.shown * (doubt + (1 - right) * self.entropy)


def word_prediction(objective: Objective) -> WordPrediction | None:
    """What an objective's encoder has to beat; None where it predicts no words at chosen positions alone, or not any words."""
    if not isinstance(objective, MaskedLanguageModel | ReplaceMLM | PermutationLanguageModel):
        return None
    entropy = _word_entropy(objective.vocabulary)
    if entropy is None:
        return None
    if isinstance(objective, PermutationLanguageModel):
        return WordPrediction("permutation_lm_loss", entropy)
    if objective.config.masking == "rarity":
        return None
    hidden = objective.config.mask_token_probability
    advice = [LONGER]
    if isinstance(objective.encoder, BertEncoder):
        advice.append(LOCAL_START)
    if hidden == 1:
        advice.append(Advice("objective.mask_token_probability = 0.85, which leaves some of the chosen words in sight"))
    if isinstance(objective, ReplaceMLM):
        return WordPrediction("mlm_loss", entropy, shown=1.0, right=None, advice=tuple(advice))
    kept = 1 - hidden - objective.config.random_token_probability
    return WordPrediction("mlm_loss", entropy, 1 - hidden, kept / (1 - hidden) if hidden < 1 else 0.0, tuple(advice))


def _word_entropy(vocabulary: Vocabulary) -> float | None:
    """Nats; the special tokens, which nobody predicts, left out. None where no frequencies are known."""
    if vocabulary.token_counts is None:
        return None
    counts = vocabulary.token_counts.double().clone()
    special = vocabulary.special
    counts[[special.pad, special.cls, special.sep, special.mask]] = 0
    return float(torch.special.entr(counts / counts.sum()).sum()) if bool(counts.any()) else None
