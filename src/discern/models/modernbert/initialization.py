"""Local initialization of encoder 'modernbert': biases with which each head attends to a near neighbor at step 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from discern.models.attention import SelfAttention, neighbor_of
from discern.models.modernbert.config import ModernBertConfig
from discern.models.modernbert.rotary import frequencies

# Pairs of each head that aim it, the fastest ones; and the strength of their biases.
_PAIRS, _STRENGTH = 4, 4.0


@torch.no_grad()
def aim_heads(attentions: Sequence[SelfAttention], config: ModernBertConfig) -> None:
    """Let head 0 attend to the previous token, head 1 to the next, head 2 to the one two before, and so on.

    Let w_j be the frequencies of a head of width d. With a query bias of (c, 0) and a key bias of (c cos(o w_j), -c sin(o w_j))
    in pair j, the two rotated biases of a query at m and a key at n contribute c^2 / sqrt(d) times the sum of
    cos((m - n + o) w_j) to their score: most at n = m + o, whatever m is. The highest frequencies distinguish neighbors best.
    Only values change: the parameters are those of any ModernBERT with biases of attention.

    Args:
        attentions: attentions of the blocks, in order.
        config: settings of the encoder.
    """
    width = config.hidden_size // config.num_heads
    count, half = min(_PAIRS, width // 2), width // 2
    for layer, attention in enumerate(attentions):
        theta = config.full_rope_theta if config.is_full(layer) else config.local_rope_theta
        turns = frequencies(theta, width)[:count]
        query, key = attention.query.bias.view(-1, width), attention.key.bias.view(-1, width)
        for head in range(config.num_heads):
            angles = neighbor_of(head) * turns
            query[head, :count] = _STRENGTH
            key[head, :count] = _STRENGTH * angles.cos()
            key[head, half : half + count] = -_STRENGTH * angles.sin()
