"""What a run's figures say of its health: each with the band it usually lies in, the likely cause and the setting to turn.

The bands and where they come from: docs/howto/doctor.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from discern.objectives.base import Objective
from discern.objectives.rtd import ReplacedTokenDetection
from discern.objectives.rtd_config import RTDConfig
from discern.training.advice import LARGER_GENERATOR, LOCAL_START, LONGER, LOWER_RATE, SMALL_NETWORK, Advice, Settings, advise
from discern.training.words import WordPrediction, word_prediction
from discern.types import StepOutput

Verdict = Literal["fine", "low", "high", "unknown"]

# A generator that draws the original this often is strong (the authors, on their released models) ...
_STRONG_SAMPLES = 0.6
# ... and one that only knows how frequent words are does so for 0.006 of them; one that has begun to learn for 0.04 and more.
_WEAK_SAMPLES = 0.02
# A discriminator that answers "original" everywhere: 0.000; one that learns: 0.045 and more.
_LEAST_RECALL = 0.02
# What moves the generator: its own loss or, in adversarial training, a surrogate whose value means nothing.
_GENERATOR_TERMS = ("generator", "adversarial")
_SURROGATES = ("adversarial",)
# 50 to 1, from the first step (0.77) over the unigram plateau (0.74) to a good generator (0.87).
USUAL_WEIGHTS = (1.0, 50.0)  # of generator and discriminator
_LOSS_SHARE = (0.7, 0.9)
_COSINE = (-0.1, 1.0)  # measured: between -0.05 and 0.03
_DRIFT = 3.0  # measured: 1.1 to 1.4 where the networks learn, 3.3 to 3.8 where they stay at the frequencies
_LEAST_GAIN = 0.1  # nats; measured: -0.05 and -0.04 in runs that stayed at the frequencies, 0.22 in an mlm that had left them
_DUPLICATES = 0.14  # the most repetitive of four common corpora


@dataclass(frozen=True)
class Finding:
    """One figure and what to make of it.

    Attributes:
        name: as in the journal, where it stands there.
        value: None where it cannot be had; `cause` then says why.
        usual: lowest and highest usual value; None: there is no telling.
        verdict: where the value lies.
        cause: what it says or what most likely brings it about.
        knob: what to change; "" where there is nothing to change.
    """

    name: str
    value: float | None
    usual: tuple[float, float] | None
    verdict: Verdict
    cause: str
    knob: str = ""


def judge(
    name: str,
    value: float,
    usual: tuple[float, float],
    *,
    fine: str,
    low: tuple[str, str] = ("", ""),
    high: tuple[str, str] = ("", ""),
) -> Finding:
    """A finding about a value by its band.

    Args:
        fine: what a value inside says.
        low: cause and knob below the band.
        high: cause and knob above it.
    """
    if value < usual[0]:
        return Finding(name, value, usual, "low", *low)
    if value > usual[1]:
        return Finding(name, value, usual, "high", *high)
    return Finding(name, value, usual, "fine", fine)


@dataclass(frozen=True)
class Expectations:
    """What can be expected of the figures of an objective.

    Attributes:
        generator_learns: False where it has no weights: how strong it is was chosen.
        judges_all: the discriminator judges every token as original or replaced. Where it judges the chosen positions, most of
            which were replaced, 'replaced' is the easy answer; an energy model answers 'original' when it is at its best.
        weights: of the losses 'generator' and 'discriminator', where the loss is their sum and they stay as they are.
        discriminator_from: the step at which it begins to learn.
        words: of an encoder that predicts words at the chosen positions; None for others.
        settings: of the run, by dotted key, so that nothing is advised that is on; empty: not known.
    """

    generator_learns: bool = True
    judges_all: bool = True
    weights: tuple[float, float] | None = None
    discriminator_from: int = 0
    words: WordPrediction | None = None
    settings: Settings = field(default_factory=dict)


def expectations(objective: Objective, max_steps: int, settings: Settings | None = None) -> Expectations:
    """Those of an objective as it is trained.

    Args:
        settings: of the run, by dotted key.

    Raises:
        ConfigError: its phases don't fit into `max_steps`.
    """
    begins, first = max_steps, 0
    for phase in objective.phases(max_steps):
        moves = (phase.trains is None or "discriminator" in phase.trains) and "discriminator" not in phase.holds
        begins = min(begins, first) if moves else begins
        first += phase.steps
    learns = "generator" in objective.networks()
    if not isinstance(objective, ReplacedTokenDetection):
        words = word_prediction(objective)
        return Expectations(learns, judges_all=False, discriminator_from=begins, words=words, settings=settings or {})
    weights = _fixed_weights(objective.config)
    return Expectations(learns, judges_all=True, weights=weights, discriminator_from=begins, settings=settings or {})


def _fixed_weights(config: RTDConfig) -> tuple[float, float] | None:
    scheduled = config.generator_weight_schedule or config.discriminator_weight_schedule
    is_sum = config.algorithm == "joint" and not config.sentence_contrastive_weight
    return (config.generator_weight, config.discriminator_weight) if is_sum and not scheduled else None


def judge_held_out(figures: Mapping[str, float], expected: Expectations) -> list[Finding]:
    """What held-out figures say of generator and discriminator; nothing of what is not among them."""
    found = []
    replaced, sampled = figures.get("replaced_fraction"), figures.get("sampled_accuracy")
    if expected.generator_learns and replaced is not None and sampled is not None and sampled < 1:
        found.append(_replaced_fraction(replaced, replaced / (1 - sampled), expected.settings))
    recall = figures.get("discriminator_recall")
    if recall is not None and not expected.judges_all:
        cause = "share of the replaced tokens that are called so; a band is known for objective 'rtd' alone"
        found.append(Finding("discriminator_recall", recall, None, "unknown", cause))
    elif recall is not None:
        found.append(
            judge(
                "discriminator_recall",
                recall,
                (_LEAST_RECALL, 1.0),
                fine="the discriminator calls some of the replaced tokens replaced",
                low=(
                    f"the discriminator answers 'original' to everything (AUC {figures.get('discriminator_auc', 0.0):.2f}; 0.5 "
                    "is guessing): early in a run, or where the learning rate is too high or the network too small to begin",
                    advise((LOWER_RATE, SMALL_NETWORK), expected.settings),
                ),
            )
        )
    if expected.words is not None:
        found += _gain(figures, expected.words, expected.settings)
    return found


def _gain(figures: Mapping[str, float], words: WordPrediction, settings: Settings) -> list[Finding]:
    """How far the prediction of words is below what their frequencies alone would give."""
    loss = figures.get(words.figure)
    right = figures.get("sampled_accuracy") if words.right is None else words.right
    if loss is None or right is None:
        return []
    blind = words.loss_without_context(right)
    compared = f"{loss:.2f} nats, where the words' frequencies alone would give {blind:.2f}"
    return [
        judge(
            words.figure.removesuffix("_loss") + "_gain",
            blind - loss,
            (_LEAST_GAIN, float("inf")),
            fine=f"the context tells the network something: {compared}",
            low=(
                f"the network knows little more than how frequent words are: {compared}; early in a run, or where it is too "
                "small to begin",
                advise(words.advice, settings),
            ),
        )
    ]


def _replaced_fraction(replaced: float, chosen: float, settings: Settings) -> Finding:
    """The band follows from how many of the `chosen` positions the generator restores by its samples."""
    return judge(
        "replaced_fraction",
        replaced,
        (chosen * (1 - _STRONG_SAMPLES), chosen * (1 - _WEAK_SAMPLES)),
        fine=f"the generator's samples are neither always right nor always wrong: {1 - replaced / chosen if chosen else 0:.3f} "
        "of them are the original",
        low=(
            "the generator is too strong: most of its samples are the original, so the discriminator sees few replaced tokens",
            "a smaller objective.generator_size, or a larger objective.mask_probability (the paper's large model: 0.25)",
        ),
        high=(
            "the generator is weak: hardly a sample is the original, as long as it knows no more than how frequent words are",
            advise((LONGER, LOCAL_START, LARGER_GENERATOR), settings),
        ),
    )


def judge_loss_shares(output: StepOutput, expected: Expectations) -> list[Finding]:
    """The share of each weighted term in the loss of a batch; surrogates, whose value means nothing, are left out."""
    parts = {
        name: term.weight * float(term.total.detach()) / max(term.count, 1)
        for name, term in output.terms.items()
        if name not in _SURROGATES
    }
    whole = sum(parts.values())
    if len(parts) < 2 or whole <= 0:
        return []
    return [
        discriminator_share(part / whole)
        if name == "discriminator" and expected.weights == USUAL_WEIGHTS
        else Finding(
            f"{name}_loss_share", part / whole, None, "unknown", "share of the weighted loss", f"objective.{name}_weight"
        )
        for name, part in parts.items()
    ]


def discriminator_share(share: float) -> Finding:
    return judge(
        "discriminator_loss_share",
        share,
        _LOSS_SHARE,
        fine="as usual for the weights 1 and 50",
        low=("the generator's loss outweighs: the discriminator has an easy task", "a larger objective.generator_size"),
        high=("the discriminator's loss outweighs: it learns too little", "objective.discriminator_weight"),
    )


def embedding_gradients(objective: Objective, output: StepOutput) -> dict[str, Tensor]:
    """The gradient that each weighted term sends to the word embeddings, (V, E) by name; terms that send none are left out.

    Args:
        output: of a forward pass with gradient.
    """
    table = _word_embeddings(objective)
    found = {}
    for name, term in output.terms.items():
        if not term.total.requires_grad:  # a generator without weights, or a term that is only told
            continue
        loss = term.total * (term.weight / max(term.count, 1))
        (gradient,) = torch.autograd.grad(loss, [table], retain_graph=True, allow_unused=True)
        if gradient is not None and bool(gradient.any()):
            found[name] = gradient
    return found


def judge_cosine(gradients: Mapping[str, Tensor]) -> Finding:
    """How the gradients of the generator and of the rest agree where both move the same word embeddings."""
    name = "embedding_gradient_cosine"
    own, others = _by_network(gradients)
    if own is None or others is None:
        senders = " and ".join(gradients) or "nothing"
        return Finding(name, None, None, "unknown", f"only {senders} moves the shared word embeddings: there is no conflict")
    value = float(torch.cosine_similarity(own.flatten(), others.flatten(), dim=0))
    return judge(
        name,
        value,
        _COSINE,
        fine="both networks move the shared embeddings, and do not pull them apart",
        low=("the two networks pull the shared embeddings apart", "objective.tying = 'gradient-disentangled'"),
    )


def compare_lengths(gradients: Mapping[str, Tensor]) -> list[Finding]:
    """How many times longer the other gradients of the shared word embeddings are than the generator's."""
    own, others = _by_network(gradients)
    if own is None or others is None:
        return []
    cause = "length of the other terms' gradient, as a multiple of the generator's: who moves the shared embeddings"
    return [
        Finding(
            "embedding_gradient_ratio",
            float(others.norm() / own.norm()),
            None,
            "unknown",
            cause,
            "objective.discriminator_weight, or objective.tying",
        )
    ]


def _by_network(gradients: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The sums of the generator's and of all others; None where there are none."""
    own = [gradient for term, gradient in gradients.items() if term in _GENERATOR_TERMS]
    others = [gradient for term, gradient in gradients.items() if term not in _GENERATOR_TERMS]
    return torch.stack(own).sum(0) if own else None, torch.stack(others).sum(0) if others else None


def judge_duplicates(documents: int, duplicates: int) -> list[Finding]:
    """How much of a data set is there twice."""
    if not documents:
        return []
    return [
        judge(
            "duplicate_fraction",
            duplicates / documents,
            (0.0, _DUPLICATES),
            fine="share of the documents whose text is exactly that of an earlier one",
            high=(
                "the text repeats itself: the networks learn it by heart, and what is held out may have been read",
                "remove the repeated documents, then `discern prepare` again",
            ),
        )
    ]


@torch.no_grad()
def embedding_norm(objective: Objective) -> float:
    """Mean length of the word embeddings."""
    return float(_word_embeddings(objective).norm(dim=1).mean())


def _word_embeddings(objective: Objective) -> Tensor:
    """(V, E): those that the networks share, or the first network's."""
    weights: Tensor = next(iter(objective.networks().values())).encoder.embeddings.weights
    return weights


def judge_drift(now: float, before: float, settings: Settings | None = None) -> Finding:
    """`embedding_norm`, as a multiple of what it was at the start; `settings` of the run, by dotted key."""
    return judge(
        "embedding_norm_drift",
        now / before,
        (0.0, _DRIFT),
        fine="length of the word embeddings, as a multiple of what it was at the start",
        high=(
            "the word embeddings have grown far beyond their start: what they do while only the words' frequencies are learned, "
            "or at too high a learning rate",
            advise((Advice("a larger model.initializer_range"), LOCAL_START, LOWER_RATE), settings or {}),
        ),
    )


def ailing(findings: Iterable[Finding]) -> list[Finding]:
    """Those that are not fine."""
    return [finding for finding in findings if finding.verdict in ("low", "high")]
