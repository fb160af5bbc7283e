"""Dropout that is fast on a CPU and exact to 1/65536."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels


class Dropout(nn.Module):
    """Zeroes elements with a probability and scales the rest, drawing from torch's global generator of the device.

    The loop reseeds that generator from (seed, step, micro-batch, rank), so a resumed step drops the same elements.

    Differs: on the CPU the mask comes from 16-bit integers, four to a 64-bit draw, because torch's Bernoulli there is
    serial and takes several times as long as the arithmetic around it. The probability is then a multiple of 1/65536: 0.1
    becomes 0.10001.

    Args:
        probability: probability that an element becomes zero in training mode.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    @property
    def active(self) -> float:
        """The probability in the current mode: zero in evaluation mode."""
        return self.probability if self.training else 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply dropout in training mode; return `hidden`, of any shape, unchanged in evaluation mode."""
        if self.active == 0.0:
            return hidden
        if kernels.usable(hidden):
            return kernels.dropout(hidden, self.probability)
        if hidden.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(hidden, self.probability)
        return hidden * keep_mask(hidden.shape, self.probability, hidden.dtype)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """A CPU mask of `shape`: 0 with `probability`, 1 / (1 - probability) otherwise, so that its mean is 1."""
    threshold = kernels.threshold(probability)
    count = shape.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = draws.view(torch.int16)[:count].view(shape) >= threshold - 32768
    return kept.to(dtype).mul_(65536 / (65536 - threshold))


def same_draws(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Save the state of torch's random generators, of the CPU and of a GPU; return a context that draws from it again.

    Two passes of a network over rows of the same shape then drop the same units. After the context, random numbers continue as
    if it had not been entered.
    """
    gpus = [device] if device.type == "cuda" else []
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(gpus):
            torch.set_rng_state(states[0])
            for gpu, state in zip(gpus, states[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield

    return again
