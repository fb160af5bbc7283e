"""Sampling of replacement tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from discern import kernels


@dataclass(frozen=True)
class Sampling:
    """How replacements are drawn from a generator's logits. The defaults are the paper's.

    Attributes:
        temperature: divides the logits.
        top_p: probability mass of the likeliest tokens to sample from; 1: all tokens.
        disallow_original: never draw the original token.

    Reference: Clark et al. 2020, section 2 and appendix G (higher temperature and no original tokens: no gain); Holtzman et
    al. 2020 (top-p).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    disallow_original: bool = False

    @property
    def cuts(self) -> bool:
        """Whether some tokens are excluded, so that the distribution is not the plain softmax."""
        return self.top_p < 1 or self.disallow_original

    def logits(
        self, logits: Float[Tensor, "M V"], originals: Int[Tensor, "M"], drawn: Int[Tensor, "M"] | None = None
    ) -> Float[Tensor, "M V"]:
        """The logits to sample from, float32, minus infinity for excluded tokens; differentiable.

        Args:
            drawn: tokens that have been sampled from these logits and must not be excluded. On a GPU, the same sum of
                probabilities may come out slightly different when it is computed again, and so may what `top_p` excludes.
        """
        logits = logits.float() / self.temperature
        if self.disallow_original:
            logits = logits.scatter(1, originals[:, None], float("-inf"))
        return top_p_logits(logits, self.top_p, drawn) if self.top_p < 1 else logits

    def sample(self, logits: Float[Tensor, "M V"], uniforms: Float[Tensor, "M"], originals: Int[Tensor, "M"]) -> Int[Tensor, "M"]:
        """Sample one id per row; no gradient."""
        if not self.cuts:
            return sample_tokens(logits, uniforms, self.temperature)
        return sample_tokens(self.logits(logits.detach(), originals), uniforms)


@torch.no_grad()
def sample_tokens(logits: Float[Tensor, "M V"], uniforms: Float[Tensor, "M"], temperature: float = 1.0) -> Int[Tensor, "M"]:
    """Sample one id per row from softmax(logits / temperature), by inverting its distribution function.

    One uniform number per row: Gumbel noise would need V of them. The arithmetic is float32 whatever the logits are:
    bfloat16 has 8 bits, in which many candidates tie.

    Args:
        logits: minus infinity at tokens never to draw.
        uniforms: in [0, 1).

    Reference: Clark et al. 2020, section 2; no gradient flows through the choice.
    """
    if kernels.usable(logits):
        return kernels.sample(logits, uniforms, temperature)
    probabilities = torch.softmax(logits.float() / temperature, -1)
    distribution = probabilities.cumsum_(-1)
    # The sum may differ slightly from 1; scaling the draw by it keeps the last candidate reachable and favors no other.
    # Rounding may raise the product to the sum itself, which is beyond every candidate.
    total = distribution[:, -1]
    targets = torch.minimum(uniforms.float() * total, total.nextafter(total.new_zeros(())))[:, None]
    chosen = torch.searchsorted(distribution, targets, right=True).squeeze(1)
    return chosen.clamp_(max=logits.shape[1] - 1)


def top_p_logits(logits: Float[Tensor, "M V"], top_p: float, kept: Int[Tensor, "M"] | None = None) -> Float[Tensor, "M V"]:
    """The logits of the fewest tokens whose probabilities sum to at least `top_p`, minus infinity elsewhere.

    Args:
        kept: one more token in each row whose logit is kept.

    Reference: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    with torch.no_grad():
        probabilities, order = torch.softmax(logits, -1).sort(stable=True, dim=-1, descending=True)
        # A token is excluded if those before it suffice; the first never is.
        surplus = (probabilities.cumsum(-1) - probabilities) >= top_p
        surplus[:, 0] = False
        left_out = torch.zeros_like(surplus).scatter(1, order, surplus)
        if kept is not None:
            left_out.scatter_(1, kept[:, None], False)
    return logits.masked_fill(left_out, float("-inf"))
