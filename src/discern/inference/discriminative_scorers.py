"""Scorers by a discriminator or an energy model, which read an unchanged text in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from discern.inference.likelihood_scorers import generator_likelihood
from discern.inference.rows import batches, device_of, framed
from discern.inference.scoring import NetworkScorer, ScoredWindow, ScoringModel, TokenScorer
from discern.models.base import Network
from discern.models.heads import EnergyHead, ReplacedTokenHead, TokenHead


class NegatedLogits(NetworkScorer):
    """The negated logit of each token: for both heads, a higher logit means a less likely token.

    Attributes:
        head: kind of the network's head.
    """

    head: ClassVar[type[TokenHead]]

    @classmethod
    def can_use(cls, network: Network, model: ScoringModel) -> bool:
        return isinstance(network.head, cls.head)

    @torch.inference_mode()
    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in pieces]
        for batch in batches([len(piece.ids) + 2 for piece in pieces]):
            rows = framed([pieces[number].ids for number in batch], self.special, device_of(self.network))
            logits = self.network.token_logits(*rows)
            for number, row in zip(batch, (-logits.float()).tolist(), strict=True):
                found[number] = [row[place + 1] for place in pieces[number].wanted]
        return found


@final
class Energies(NegatedLogits):
    """The negated energy of each token: log p(x_t | the others), not normalized.

    The noise distribution and the odds of noise, which the loss adds to the energy in training, are not part of the score.

    Reference: Clark et al. 2020 (Electric), section 2.1 and 4.2: the pseudo-log-likelihood of a text is -sum E(x)_t.
    """

    quantity: ClassVar[str] = "unnormalized pseudo-log-likelihood (minus the energies)"
    needs: ClassVar[str] = "an energy model, as objective 'electric' trains"
    head: ClassVar[type[TokenHead]] = EnergyHead

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        lack = super().lacks(model)
        if lack is None and not model.chosen_evenly:
            return "uniformly chosen noise: with masking 'rarity' or 'entropy', energies are not log-probabilities"
        return lack


@final
class ReplacedTokenOdds(NegatedLogits):
    """Log-odds of each token being original: log P(original) - log P(replaced).

    At the optimum this is log p - log q - log(1 - p) + log((1 - a + a q) / a), where p and q are the probabilities of x_t in text
    and by the generator, and a is the fraction of tokens with a sample of the generator. Of two equally likely tokens, the one
    that the generator finds likelier scores lower, and every further token adds about log((1 - a) / a). The score is therefore
    for sentences that differ in few tokens; `inversion` removes q and a. With objective 'rtd-masked-only' the optimum is
    log p - log(1 - p), without q.

    Reference: Clark et al. 2020, section 2.
    """

    quantity: ClassVar[str] = "log-odds of the tokens being original"
    needs: ClassVar[str] = "a discriminator, as objective 'rtd' trains"
    head: ClassVar[type[TokenHead]] = ReplacedTokenHead


@final
class Inversion(TokenScorer):
    """log p(x_t | the others), from the discriminator's odds and the generator's probability of the token.

    The discriminator reads the text once. A generator that is a masked language model reads it once per token, a two-tower
    generator once. The probabilities of different tokens at a position need not sum to 1, as the discriminator only evaluates
    the token in the text.

    Args:
        odds: scorer of the log-odds that each token is original.
        generator: scorer of the log-probability of each token by the generator.
        chosen_share: expected fraction of the tokens with a sample of the generator.

    Reference: Clark et al. 2020, appendix on ELECTRA as a masked language model.
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood by discriminator and generator"
    needs_chosen_share: ClassVar[bool] = True

    def __init__(self, odds: TokenScorer, generator: TokenScorer, chosen_share: float) -> None:
        self._odds, self._generator, self._share = odds, generator, chosen_share

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        if ReplacedTokenOdds.lacks(model) or generator_likelihood(model) is None:
            return "a discriminator and a generator with weights of its own, as a run of objective 'rtd' has"
        if not model.chosen_evenly:
            return "uniformly chosen positions: with masking 'rarity' or 'entropy' the probability depends on the token"
        if model.chosen_share is None:
            return "a discriminator that was trained on every token, not only on masked ones"
        if model.sampling.cuts:
            return "replacements that were sampled from the whole softmax, without top_p and disallow_original"
        return None

    @classmethod
    def of(cls, model: ScoringModel) -> TokenScorer:
        generator = generator_likelihood(model)
        assert generator is not None
        assert model.chosen_share is not None
        return cls(ReplacedTokenOdds.of(model), generator, model.chosen_share)

    def token_scores(self, pieces: Sequence[ScoredWindow]) -> list[list[float]]:
        both = zip(self._odds.token_scores(pieces), self._generator.token_scores(pieces), strict=True)
        return [inverted(torch.tensor(odds).double(), torch.tensor(log_q).double(), self._share).tolist() for odds, log_q in both]


def inverted(log_odds: Float[Tensor, "..."], log_generator: Float[Tensor, "..."], chosen_share: float) -> Float[Tensor, "..."]:
    """log p(x) of a token from its log-odds of being original, as of an optimal discriminator.

    A token is original if it was not masked, or if the generator happened to sample it: with D = P(original),
    a = chosen_share and q the generator, D = ((1 - a) p + a q p) / ((1 - a) p + a q), so that
    p = a D q / (a q + (1 - a)(1 - D)), which never exceeds D.

    Args:
        log_odds: log D - log(1 - D).
        log_generator: log q.
    """
    log_share, log_rest = math.log(chosen_share), math.log1p(-chosen_share)
    chosen = log_share + log_generator
    return chosen + F.logsigmoid(log_odds) - torch.logaddexp(chosen, log_rest + F.logsigmoid(-log_odds))
