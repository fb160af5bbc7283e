"""How generator and discriminator are trained: which of them learns at which step, and from what the generator learns."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.errors import ConfigError
from discern.models.base import Network
from discern.models.heads import MaskedLMHead
from discern.objectives.base import Phase
from discern.objectives.rtd.config import RTDConfig
from discern.objectives.rtd.generators import Generator, NetworkGenerator, Prediction
from discern.types import CorruptedBatch, LossTerm

Copy = Callable[[], None]
"""Copies the generator's weights into the discriminator."""


@dataclass(frozen=True)
class GeneratorTerms:
    """The generator's part of a step's loss.

    Attributes:
        terms: sums by name; their names and counts are those of `Algorithm.counts`.
        metrics: means that are logged and not trained on.
    """

    terms: Mapping[str, LossTerm]
    metrics: Mapping[str, LossTerm] = field(default_factory=dict)


class Algorithm(abc.ABC):
    """Decides which network is trained at which step, and from what the generator learns.

    Attributes:
        apart: whether the networks are never trained together. They then share no trained weights; what `tying` names is
            copied when the discriminator starts.
        needs_rewards: whether the generator learns from the discriminator's loss.
    """

    apart: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = False

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        self.config = config
        self.generator = generator

    @classmethod
    @abc.abstractmethod
    def check(cls, config: RTDConfig) -> None:
        """Check that the other settings are compatible with this algorithm.

        Raises:
            ValueError: they are not; the message says why and what to set.
        """

    @abc.abstractmethod
    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        """The phases of training.

        Raises:
            ConfigError: they do not fit into `max_steps`.
        """

    def modules(self) -> dict[str, nn.Module]:
        """The modules that it trains along with the generator, by name."""
        return {}

    def generator_networks(self) -> dict[str, Network]:
        """The generator's network, with the modules that are trained along with it."""
        companions = tuple(self.modules().values())
        return {name: replace(network, companions=companions) for name, network in self.generator.networks().items()}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        """Number of items that each of the generator's terms sums over."""
        return {"generator": self.generator.count(batch)}

    def generator_terms(
        self,
        loss: LossTerm,
        prediction: Prediction,
        sampled_ids: Int[Tensor, "M"],
        rewards: Float[Tensor, "M"] | None,
        step: int,
    ) -> GeneratorTerms:
        """The terms that the generator learns from; by default its maximum-likelihood loss.

        Args:
            loss: cross-entropy of the original tokens, with the weight of this step.
            sampled_ids: the sample at each chosen position.
            rewards: the discriminator's loss at each chosen position, detached; None unless the algorithm `needs_rewards`.
        """
        return GeneratorTerms({"generator": loss})

    def initial_loss(self) -> float:
        """Weighted sum of the generator's terms before anything is learned, in nats."""
        return self.config.generator_weight * self.generator.initial_loss()

    def carry_state(self) -> dict[str, Tensor]:
        """State to save with the checkpoint besides weights."""
        return {}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore what `carry_state` returned."""


class Joint(Algorithm):
    """Trains both networks together from step 0, the generator by maximum likelihood; either may be frozen at some step.

    Reference: Clark et al. 2020, section 2.
    """

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        check_freezing(config)

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        return phases_with_freezing(self.config, max_steps)


class TwoStage(Algorithm):
    """Trains the generator alone, by maximum likelihood; then freezes it and trains the discriminator alone on its samples.

    The two are never trained together, so nothing is shared: when the discriminator starts, it gets a copy of what `tying`
    names, and of the whole encoder with `copy_weights`. Its optimizer starts afresh. With tying 'gradient-disentangled' it
    keeps reading the generator's embeddings, which are now fixed, and learns the difference.

    When a run is extended, the step of the switch stays the same.

    Reference: Clark et al. 2020, section 3.2, figure 3 right ("two-stage").
    """

    apart: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        self._switch: int | None = None

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        if config.tying == "all":
            raise ValueError(
                "algorithm 'two-stage' freezes the generator while the discriminator learns, but with tying 'all' they are one "
                "encoder; set tying = 'embeddings' (the discriminator still starts as a copy)"
            )
        if config.copy_weights and (config.generator_size != 1 or config.generator_depth != 1):
            raise ValueError(
                "algorithm 'two-stage' copies the generator's weights into the discriminator, which needs the same sizes, but "
                f"generator_size is {config.generator_size:g} and generator_depth {config.generator_depth:g}; set generator_size "
                "= 1.0 and generator_depth = 1.0, or copy_weights = false for a discriminator with random weights"
            )
        if config.generator_warmup_steps:
            raise ValueError(
                "algorithm 'two-stage' already trains the generator first; leave out generator_warmup_steps, or set "
                "algorithm = 'joint'"
            )
        if config.freeze_generator_at is not None or config.freeze_discriminator_at is not None:
            raise ValueError(
                "algorithm 'two-stage' itself freezes the generator, after two_stage_steps; leave out "
                "freeze_generator_at and freeze_discriminator_at, or set algorithm = 'joint'"
            )

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        steps = self.config.two_stage_steps
        first = self._switch
        if first is None:
            first = round(steps * max_steps) if steps < 1 else round(steps)
            if not 0 < first < max_steps:
                raise ConfigError(
                    f"objective.two_stage_steps = {steps:g} gives the generator {first} of train.max_steps {max_steps}, "
                    "which leaves none for the discriminator",
                    hint="set objective.two_stage_steps to a fraction like 0.5, or train.max_steps higher",
                )
        self._switch = first
        generator = Phase("generator", min(first, max_steps), frozenset({"generator"}))
        if first >= max_steps:
            return [generator]
        return [generator, Phase("discriminator", max_steps - first, frozenset({"discriminator"}), copy, begins=first)]

    def carry_state(self) -> dict[str, Tensor]:
        return {} if self._switch is None else {"two_stage_switch": torch.tensor([self._switch])}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        if "two_stage_switch" in state:
            self._switch = int(state["two_stage_switch"])


class Adversarial(Algorithm):
    """Trains the generator by REINFORCE to maximize the discriminator's loss at the positions that it fills.

    The reward R of a sample is the discriminator's loss there; its effect on the loss elsewhere is neglected. The
    gradient is E[(R - b) grad log p(sample)], with a learned baseline b = -log sigmoid(w . h) of the generator's state h, whose
    sigmoid is fitted to exp(-R), the probability that the discriminator gave to the right answer, by cross-entropy.

    Terms: 'generator', the cross-entropy of the originals, weight 0, reported to compare with maximum likelihood;
    'adversarial', whose gradient is the above, weight `generator_weight`; 'baseline'. Metric: 'generator_entropy', the entropy
    of the distribution that is sampled from, in nats; it falls far below that of maximum likelihood.

    Differs: the paper does not say whether the baseline's loss trains the generator; here it trains w alone.

    Reference: Clark et al. 2020, appendix F.
    """

    needs_rewards: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        assert isinstance(generator, NetworkGenerator)
        head = generator.head
        width = head.dense.in_features if isinstance(head, MaskedLMHead) else head.word_embeddings.embedding_dim
        self._baseline = nn.Linear(width, 1, bias=False)

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        check_freezing(config)
        if config.masking == "with-replacement":
            raise ValueError(
                "algorithm 'adversarial' needs the probability of each sample, and masking 'with-replacement' averages the "
                "samples of a position that it draws twice; set masking = 'uniform'"
            )
        if config.sentence_contrastive_weight > 0:
            raise ValueError(
                "algorithm 'adversarial' rewards each sample by the discriminator's loss, and with "
                "sentence_contrastive_weight above 0 it does not see the samples of texts that stay clean; set "
                "sentence_contrastive_weight = 0, or algorithm = 'joint'"
            )

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        return phases_with_freezing(self.config, max_steps)

    def modules(self) -> dict[str, nn.Module]:
        return {"generator_baseline": self._baseline}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return super().counts(batch) | {"adversarial": batch.num_masked, "baseline": batch.num_masked}

    def generator_terms(
        self,
        loss: LossTerm,
        prediction: Prediction,
        sampled_ids: Int[Tensor, "M"],
        rewards: Float[Tensor, "M"] | None,
        step: int,
    ) -> GeneratorTerms:
        assert prediction.states is not None
        assert rewards is not None
        # As one matrix on any device: the gradient needs the distribution that the samples came from, whatever was cut off.
        logits = self.config.sampling_at(step).logits(prediction.masked_logits.matrix(), prediction.originals, sampled_ids)
        drawn_from = torch.log_softmax(logits, -1)
        answers = self._baseline(prediction.states.detach()).squeeze(-1).float()
        baselines = F.softplus(-answers).detach()
        chosen, count = prediction.chosen, prediction.chosen.count
        fit = chosen.weigh(F.binary_cross_entropy_with_logits(answers, torch.exp(-rewards), reduction="none")).sum()
        entropies = torch.special.entr(drawn_from.detach().exp()).sum(-1)
        return GeneratorTerms(
            {
                "generator": replace(loss, total=loss.total.detach(), weight=0.0),
                "adversarial": LossTerm(
                    reinforce_loss(drawn_from, sampled_ids, chosen.weigh(rewards - baselines)), count, loss.weight
                ),
                "baseline": LossTerm(fit, count),
            },
            {"generator_entropy": LossTerm(chosen.weigh(entropies).sum(), count)},
        )

    def initial_loss(self) -> float:
        """ln 2, the baseline's; the surrogate's is 0, as reward and baseline are equal."""
        return math.log(2)


def reinforce_loss(
    log_probabilities: Float[Tensor, "M V"],
    sampled_ids: Int[Tensor, "M"],
    advantages: Float[Tensor, "M"],
) -> Float[Tensor, ""]:
    """A sum whose expected gradient is minus that of the expected reward; its value has no meaning.

    Args:
        log_probabilities: log-probabilities of all words, in the distributions that the samples were drawn from.
        advantages: rewards minus baselines. Baselines that do not depend on the sample leave the expectation as it is; good ones
            reduce the variance.

    Reference: Williams 1992.
    """
    chosen = log_probabilities.gather(1, sampled_ids[:, None]).squeeze(1)
    return -(chosen * advantages.detach()).sum()


def check_freezing(config: RTDConfig) -> None:
    """Check that a frozen network shares nothing with one that is still trained.

    Raises:
        ValueError: it does, or nothing would be trained.
    """
    freezes = config.freeze_generator_at is not None or config.freeze_discriminator_at is not None
    if config.generator_warmup_steps and (freezes or config.generator in ("uniform", "unigram") or config.tying == "all"):
        reason = "a network is frozen later on" if freezes else f"generator '{config.generator}' with tying '{config.tying}'"
        raise ValueError(
            f"generator_warmup_steps is {config.generator_warmup_steps}, which is not compatible with the other settings: "
            f"{reason}; only a generator with weights that the discriminator does not use can be warmed up. "
            "Set generator_warmup_steps = 0"
        )
    if config.freeze_generator_at is not None and config.freeze_discriminator_at is not None:
        raise ValueError(
            f"freeze_generator_at is {config.freeze_generator_at} and freeze_discriminator_at {config.freeze_discriminator_at}: "
            "with both frozen nothing is trained; leave one of them out, and end the run by train.max_steps"
        )
    if config.freeze_generator_at is not None and config.tying not in ("none", "gradient-disentangled"):
        raise ValueError(
            f"freeze_generator_at is {config.freeze_generator_at}, but with tying '{config.tying}' the discriminator still "
            "trains weights that the generator reads; set tying = 'none' or 'gradient-disentangled'"
        )
    if config.freeze_discriminator_at is not None and config.tying != "none":
        raise ValueError(
            f"freeze_discriminator_at is {config.freeze_discriminator_at}, but with tying '{config.tying}' the generator still "
            "trains weights that the discriminator reads; set tying = 'none'"
        )


def phases_with_freezing(config: RTDConfig, max_steps: int) -> list[Phase]:
    """The phases of training both networks together: one, or two if a network is frozen or the generator warms up.

    When a network is frozen, the other one keeps its optimizer. After a warm-up of the generator, both networks start with a
    new optimizer and a new schedule.

    Raises:
        ConfigError: the warm-up leaves no step to train both.
    """
    warmup = config.generator_warmup_steps
    if warmup:
        if warmup >= max_steps:
            raise ConfigError(
                f"objective.generator_warmup_steps {warmup} leaves none of train.max_steps {max_steps} for the discriminator",
                hint="decrease it, or increase train.max_steps",
            )
        held = frozenset({"discriminator"})
        first = Phase("generator warm-up", warmup, frozenset({"generator"}), holds=held, own_schedule=True)
        return [first, Phase("train", max_steps - warmup, own_schedule=True, begins=warmup)]
    stops = {"discriminator": config.freeze_generator_at, "generator": config.freeze_discriminator_at}
    for left, step in stops.items():
        if step is not None and step < max_steps:
            alone = Phase(f"{left} alone", max_steps - step, frozenset({left}), fresh_optimizer=False, begins=step)
            return [Phase("train", step), alone] if step else [alone]
    return [Phase("train", max_steps)]
