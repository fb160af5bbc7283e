"""Which tokens stand in for the masked ones."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern import kernels


@torch.no_grad()
def sample_tokens(logits: Float[Tensor, "M V"], uniforms: Float[Tensor, "M"], temperature: float = 1.0) -> Int[Tensor, "M"]:
    """One id a row, drawn from softmax(logits / temperature) by inverting its distribution function.

    One uniform number a row: Gumbel noise would need V of them. The arithmetic is float32 whatever the logits are:
    bfloat16 has 8 bits, in which many candidates tie.

    Args:
        uniforms: in [0, 1).

    Reference: Clark et al. 2020, section 2; no gradient flows through the choice.
    """
    if kernels.usable(logits):
        return kernels.sample(logits, uniforms, temperature)
    probabilities = torch.softmax(logits.float() / temperature, -1)
    distribution = probabilities.cumsum_(-1)
    # The sum may end a little off 1; scaling the draw by it keeps the last candidate reachable and no other favoured.
    targets = (uniforms.float() * distribution[:, -1])[:, None]
    chosen = torch.searchsorted(distribution, targets, right=True).squeeze(1)
    return chosen.clamp_(max=logits.shape[1] - 1)


def replace_positions(
    input_ids: Int[Tensor, "B L"], positions: Bool[Tensor, "B L"], replacements: Int[Tensor, "M"]
) -> Int[Tensor, "B L"]:
    """The ids with `replacements` at the chosen positions, row by row; everything else as it was, no [MASK] anywhere."""
    return input_ids.masked_scatter(positions, replacements)
