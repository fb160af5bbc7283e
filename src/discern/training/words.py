"""What a network that predicts words has to beat: their frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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
        doubt: nats that are left there for one who reads that word alone; None: they follow from `right`, as nobody knows how
            the wrong words come about.
        advice: what helps a network that does not.
    """

    figure: str
    entropy: float
    shown: float = 0.0
    right: float | None = 0.0
    doubt: float | None = None
    advice: tuple[Advice, ...] = (LONGER,)

    def loss_without_context(self, right: float) -> float:
        """Nats of one who knows the frequencies, and how far to believe the word that stands there, but reads nothing else."""
        doubt = self.doubt
        if doubt is None:
            doubt = (1 - right) * self.entropy - sum(share * math.log(share) for share in (right, 1 - right) if share > 0)
        return (1 - self.shown) * self.entropy + self.shown * doubt


def word_prediction(objective: Objective) -> WordPrediction | None:
    """What an objective's encoder has to beat; None where it predicts no words at chosen positions alone, or not any words."""
    if not isinstance(objective, MaskedLanguageModel | ReplaceMLM | PermutationLanguageModel):
        return None
    frequencies = _frequencies(objective.vocabulary)
    if frequencies is None:
        return None
    entropy = float(torch.special.entr(frequencies).sum())
    if isinstance(objective, PermutationLanguageModel):
        return WordPrediction("permutation_lm_loss", entropy)
    if objective.config.masking == "rarity":
        return None
    hidden = objective.config.mask_token_probability
    advice = [LONGER]
    if isinstance(objective.encoder, BertEncoder):
        advice.append(LOCAL_START)
    if hidden == 1:
        advice.append(Advice("objective.mask_token_probability = 0.85, which leaves some of the chosen words visible"))
    if isinstance(objective, ReplaceMLM):
        return WordPrediction("mlm_loss", entropy, shown=1.0, right=None, advice=tuple(advice))
    shown = 1 - hidden
    kept = (shown - objective.config.random_token_probability) / shown if shown > 0 else 0.0
    return WordPrediction("mlm_loss", entropy, shown, kept, doubt_at_shown_words(frequencies, kept), tuple(advice))


def doubt_at_shown_words(frequencies: Float[Tensor, "V"], kept: float) -> float:
    """Nats that remain about the original, given the visible word and how it was chosen.

    The original stands with probability `kept`, else any of the V entries, evenly. So a frequent word that is seen is almost
    surely the original, and a rare one almost surely is not, which tells more than `kept` alone: this is the conditional
    entropy, the least that can be had without context.

    Args:
        frequencies: of the originals; they sum to 1.
        kept: of the positions where a word stands, the share at which it is the original.
    """
    random = (1 - kept) / len(frequencies)
    same = kept * frequencies + random * frequencies  # P(original = seen = this word)
    seen = kept * frequencies + random
    entropy = torch.special.entr(frequencies)
    # Of the originals w that are not the word seen: the sum of -random p(w) log(random p(w)).
    others = random * (entropy.sum() - entropy) - torch.special.xlogy(random * (1 - frequencies), random)
    return float((torch.special.entr(same) + others - torch.special.entr(seen)).sum())


def _frequencies(vocabulary: Vocabulary) -> Float[Tensor, "V"] | None:
    """Of the words; the special tokens, which nobody predicts, have 0. None where no frequencies are known."""
    if vocabulary.token_counts is None:
        return None
    counts = vocabulary.token_counts.double().clone()
    special = vocabulary.special
    counts[[special.pad, special.cls, special.sep, special.mask]] = 0
    return counts / counts.sum() if bool(counts.any()) else None
