"""Expected metrics of a configured objective, and the advice that applies to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from discern.models.electra.encoder import BertEncoder
from discern.objectives.base import Objective, Vocabulary, WordTargets

Settings = Mapping[str, Any]
"""Settings of a run by dotted key; empty if unknown, and then all advice is given."""


@dataclass(frozen=True)
class Advice:
    """A piece of advice.

    Attributes:
        text: text before the settings, if there are any.
        sets: settings to change, with their new values.
        after: text after the settings.
        pointless: settings with which this cannot help, such as a generator of full size that cannot be made larger.
    """

    text: str = ""
    sets: tuple[tuple[str, object], ...] = ()
    after: str = ""
    pointless: tuple[tuple[str, object], ...] = ()

    def given(self, settings: Settings) -> str:
        """The advice without settings that are already set or that the objective lacks; "" if nothing is left."""
        if any(settings.get(key) == value for key, value in self.pointless):
            return ""
        missing = [(key, value) for key, value in self.sets if not settings or (key in settings and settings[key] != value)]
        if self.sets and not missing:
            return ""
        named = [f"{key} = {value!r}" for key, value in missing]
        listed = ", ".join(named[:-1]) + " and " + named[-1] if len(named) > 1 else "".join(named)
        return f"{self.text}{listed}{self.after}"


def advise(advice: Sequence[Advice], settings: Settings) -> str:
    """All advice that applies, the most promising first."""
    return "; ".join(given for each in advice if (given := each.given(settings)))


LONGER = Advice("longer training")
LOWER_RATE = Advice("a lower optimizer.learning_rate")
LARGER_GENERATOR = Advice("a larger objective.generator_size", pointless=(("objective.generator_size", 1.0),))
LOCAL_START = Advice("for small networks ", (("model.initialization", "local"),))
SMALL_NETWORK = Advice(
    "for small networks ",
    (
        ("model.initialization", "local"),
        ("objective.tying", "gradient-disentangled"),
        ("objective.discriminator_head", "bilinear"),
    ),
    " (as preset cpu-small)",
)


@dataclass(frozen=True)
class WordPrediction:
    """The loss of guessing words by their frequencies, which an encoder that predicts words has to beat.

    Attributes:
        targets: how the words that the encoder predicts are chosen.
        entropy: entropy of the word frequencies, in nats.
        doubt: entropy of the original word given the visible one, in nats; None: it follows from `targets.correct`, as nothing
            is known about how the wrong words are chosen.
        advice: what helps an encoder that does not beat it.
    """

    targets: WordTargets
    entropy: float
    doubt: float | None = None
    advice: tuple[Advice, ...] = (LONGER,)

    def loss_without_context(self, correct: float) -> float:
        """The loss of the best guess from the word frequencies and the visible word alone, in nats."""
        doubt, shown = self.doubt, self.targets.shown
        if doubt is None:
            doubt = (1 - correct) * self.entropy - sum(share * math.log(share) for share in (correct, 1 - correct) if share > 0)
        return (1 - shown) * self.entropy + shown * doubt


@dataclass(frozen=True)
class Expectations:
    """The expected metrics of an objective.

    Attributes:
        generator_learns: whether the generator has weights; otherwise its strength is a choice.
        detects_every_token: whether the discriminator classifies every token as original or replaced. At the chosen positions
            alone, most of which were replaced, 'replaced' is the easy answer; an energy model at its best answers 'original'.
        weights: of the losses 'generator' and 'discriminator', if the loss is their sum with constant weights.
        discriminator_from: step at which the discriminator begins to learn.
        words: the baseline loss of an encoder that predicts words at the chosen positions; None for other encoders.
        settings: settings of the run by dotted key, so that advice leaves out what is already set; empty if unknown.
    """

    generator_learns: bool = True
    detects_every_token: bool = True
    weights: tuple[float, float] | None = None
    discriminator_from: int = 0
    words: WordPrediction | None = None
    settings: Settings = field(default_factory=dict)


def expectations(objective: Objective, max_steps: int, settings: Settings | None = None) -> Expectations:
    """The expectations for an objective as it is trained.

    Args:
        settings: settings of the run by dotted key.

    Raises:
        ConfigError: the objective's phases do not fit into `max_steps`.
    """
    begins, first = max_steps, 0
    for phase in objective.phases(max_steps):
        trains = (phase.trains is None or "discriminator" in phase.trains) and "discriminator" not in phase.holds
        begins = min(begins, first) if trains else begins
        first += phase.steps
    return Expectations(
        generator_learns="generator" in objective.networks(),
        detects_every_token=objective.detects_every_token,
        weights=objective.loss_weights(),
        discriminator_from=begins,
        words=word_prediction(objective),
        settings=settings or {},
    )


def word_prediction(objective: Objective) -> WordPrediction | None:
    """The loss that an objective's encoder has to beat; None if it predicts no words, or word frequencies are unknown."""
    targets = objective.word_targets()
    frequencies = None if targets is None else _frequencies(targets.vocabulary)
    if targets is None or frequencies is None:
        return None
    advice = [LONGER]
    if isinstance(next(iter(objective.networks().values())).encoder, BertEncoder):
        advice.append(LOCAL_START)
    if targets.hides_all:
        advice.append(Advice("objective.mask_token_probability = 0.85, which leaves some of the chosen words visible"))
    entropy = float(torch.special.entr(frequencies).sum())
    doubt = None if targets.correct is None else doubt_at_shown_words(frequencies, targets.correct)
    return WordPrediction(targets, entropy, doubt, tuple(advice))


def doubt_at_shown_words(frequencies: Float[Tensor, "V"], correct: float) -> float:
    """Entropy of the original word given the visible word and how it was chosen, in nats.

    The visible word is the original with probability `correct`, else any of the V entries with equal probability. A frequent
    word is therefore almost certainly the original, and a rare one almost certainly not, which is more informative than `correct`
    alone: this conditional entropy is the lowest loss that can be reached without context.

    Args:
        frequencies: relative frequencies of the original words; they sum to 1.
        correct: fraction of the positions with a visible word at which it is the original.
    """
    random = (1 - correct) / len(frequencies)
    same = correct * frequencies + random * frequencies  # P(original = visible = this word)
    seen = correct * frequencies + random
    entropy = torch.special.entr(frequencies)
    # For the originals w other than the visible word: the sum of -random p(w) log(random p(w)).
    others = random * (entropy.sum() - entropy) - torch.special.xlogy(random * (1 - frequencies), random)
    return float((torch.special.entr(same) + others - torch.special.entr(seen)).sum())


def _frequencies(vocabulary: Vocabulary) -> Float[Tensor, "V"] | None:
    """Frequencies of the words, 0 for the special tokens, which are never predicted; None if unknown."""
    if vocabulary.token_counts is None:
        return None
    counts = vocabulary.token_counts.double().clone()
    special = vocabulary.special
    counts[[special.pad, special.cls, special.sep, special.mask]] = 0
    return counts / counts.sum() if bool(counts.any()) else None
