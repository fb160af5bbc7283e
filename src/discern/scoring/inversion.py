"""ELECTRA as a language model: what generator and discriminator together say of the probability of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from discern.scoring.base import Method, Piece, ScoringModel
from discern.scoring.one_pass import ReplacedTokenOdds
from discern.scoring.pseudo_likelihood import generator_likelihood


@final
class Inversion(Method):
    """log p(x_t | the others), from the discriminator's odds and the generator's probability of the token.

    The discriminator reads the text once. A generator that is a masked language model reads it once a token, a two-tower
    generator once. Nothing makes the probabilities of different words at a place sum to 1, as the discriminator is asked
    about the word that stands there only.

    Args:
        odds: gives the log-odds of each token to be an original.
        generator: gives its log-probability by what drew the replacements.
        chosen_share: expected fraction of the tokens that it drew one for.

    Reference: Clark et al. 2020, appendix on ELECTRA as a masked language model.
    """

    quantity: ClassVar[str] = "pseudo-log-likelihood by discriminator and generator"
    needs_chosen_share: ClassVar[bool] = True

    def __init__(self, odds: Method, generator: Method, chosen_share: float) -> None:
        self._odds, self._generator, self._share = odds, generator, chosen_share

    @classmethod
    def lacks(cls, model: ScoringModel) -> str | None:
        if ReplacedTokenOdds.lacks(model) or generator_likelihood(model) is None:
            return "a discriminator and a generator with weights of its own, as a run of objective 'rtd' has"
        if not model.chosen_evenly:
            return "positions that were chosen uniformly: with masking 'rarity' the probability depends on the token"
        if model.chosen_share is None:
            return "a discriminator that was trained on every token, not on the chosen ones only"
        if model.sampling.cuts:
            return "replacements that were drawn from the whole softmax, without top_p and disallow_original"
        return None

    @classmethod
    def of(cls, model: ScoringModel) -> Method:
        generator = generator_likelihood(model)
        assert generator is not None
        assert model.chosen_share is not None
        return cls(ReplacedTokenOdds.of(model), generator, model.chosen_share)

    def token_scores(self, pieces: Sequence[Piece]) -> list[list[float]]:
        both = zip(self._odds.token_scores(pieces), self._generator.token_scores(pieces), strict=True)
        return [inverted(torch.tensor(odds).double(), torch.tensor(log_q).double(), self._share).tolist() for odds, log_q in both]


def inverted(log_odds: Float[Tensor, "..."], log_generator: Float[Tensor, "..."], chosen_share: float) -> Float[Tensor, "..."]:
    """log p(x) of a token whose original-against-replaced log-odds are those of the best discriminator.

    A token is original if it was not chosen, or if the generator happened to draw it: with D = P(original),
    a = chosen_share and q the generator, D = ((1 - a) p + a q p) / ((1 - a) p + a q), so that
    p = a D q / (a q + (1 - a)(1 - D)), which never exceeds D.

    Args:
        log_odds: log D - log(1 - D).
        log_generator: log q.
    """
    log_share, log_rest = math.log(chosen_share), math.log1p(-chosen_share)
    chosen = log_share + log_generator
    return chosen + F.logsigmoid(log_odds) - torch.logaddexp(chosen, log_rest + F.logsigmoid(-log_odds))
