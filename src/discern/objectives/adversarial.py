"""A generator that is rewarded for fooling the discriminator, by policy gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern.objectives.algorithm import Algorithm, Copy, GeneratorLoss, check_freezing, phases_with_freezing
from discern.objectives.base import Phase
from discern.objectives.generator import Generator, NetworkGenerator, Proposal
from discern.objectives.rtd_config import RTDConfig
from discern.types import CorruptedBatch, LossTerm


class Adversarial(Algorithm):
    """REINFORCE: the generator maximises the discriminator's loss at the positions that it fills.

    The reward R of a sample is the discriminator's loss there; that loss elsewhere is taken not to depend on it. The
    gradient is E[(R - b) grad log p(sample)], with a learned baseline b = -log sigmoid(w . h) of the generator's state h, whose
    sigmoid is fitted to exp(-R), the probability that the discriminator gave to the right answer, by cross-entropy.

    Terms: 'generator', the cross-entropy of the originals, weight 0, reported to compare with maximum likelihood;
    'adversarial', whose gradient is the above, weight `generator_weight`; 'baseline'. Figure: 'generator_entropy', of what is
    sampled from, in nats: it falls far below that of maximum likelihood.

    Differs: the paper doesn't say whether the baseline's loss moves the generator; here it moves w alone.

    Reference: Clark et al. 2020, appendix F.
    """

    needs_rewards: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        super().__init__(config, generator)
        assert isinstance(generator, NetworkGenerator)
        self._baseline = nn.Linear(generator.head.dense.in_features, 1, bias=False)

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
                "algorithm 'adversarial' rewards each sample by what the discriminator says of it, and with "
                "sentence_contrastive_weight above 0 it doesn't see the samples of the texts that stay clean; set "
                "sentence_contrastive_weight = 0, or algorithm = 'joint'"
            )

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        return phases_with_freezing(self.config, max_steps)

    def modules(self) -> dict[str, nn.Module]:
        return {"generator_baseline": self._baseline}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return super().counts(batch) | {"adversarial": batch.num_masked, "baseline": batch.num_masked}

    def generator_loss(self, proposal: Proposal, weight: float, rewards: Float[Tensor, "M"] | None) -> GeneratorLoss:
        assert proposal.states is not None
        assert rewards is not None
        drawn_from = torch.log_softmax(self.config.sampling.logits(proposal.masked_logits, proposal.originals), -1)
        answers = self._baseline(proposal.states.detach()).squeeze(-1).float()
        baselines = F.softplus(-answers).detach()
        count = len(rewards)
        fit = F.binary_cross_entropy_with_logits(answers, torch.exp(-rewards), reduction="sum")
        return GeneratorLoss(
            {
                "generator": replace(proposal.loss, total=proposal.loss.total.detach(), weight=0.0),
                "adversarial": LossTerm(reinforce_loss(drawn_from, proposal.sampled_ids, rewards, baselines), count, weight),
                "baseline": LossTerm(fit, count),
            },
            {"generator_entropy": LossTerm(torch.special.entr(drawn_from.detach().exp()).sum(), count)},
        )

    def initial_loss(self) -> float:
        """ln 2, the baseline's; the surrogate's is 0, as reward and baseline are equal."""
        return math.log(2)


def reinforce_loss(
    log_probabilities: Float[Tensor, "M V"],
    sampled_ids: Int[Tensor, "M"],
    rewards: Float[Tensor, "M"],
    baselines: Float[Tensor, "M"],
) -> Float[Tensor, ""]:
    """A sum whose gradient is, in the mean over samples, minus that of the expected reward; its value means nothing.

    Whatever the baselines are, as long as they don't depend on the sample, the mean is the same; good ones make it vary less.

    Args:
        log_probabilities: what the samples were drawn from.

    Reference: Williams 1992.
    """
    chosen = log_probabilities.gather(1, sampled_ids[:, None]).squeeze(1)
    return -(chosen * (rewards - baselines).detach()).sum()
