"""Dropout, and layers that are computed together with what follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
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


class States(NamedTuple):
    """Hidden states, and the copy that the next matrix product reads.

    Attributes:
        values: input of residuals and norms; float32 wherever norms are computed in float32.
        operand: the same in the precision of the matrix products, rounded once rather than once per product.
    """

    values: Float[Tensor, "*tokens D"]
    operand: Float[Tensor, "*tokens D"]


def as_states(hidden: Float[Tensor, "*tokens D"]) -> States:
    """States from the output of a layer in any precision."""
    return States(hidden.float() if hidden.dtype == torch.bfloat16 else hidden, hidden)


def linear_gelu(linear: nn.Linear, operand: Float[Tensor, "*tokens D"]) -> Float[Tensor, "*tokens F"]:
    """GELU of the layer's output, by the error function, as BERT and ELECTRA have it."""
    if kernels.usable(operand, parameters=_parameters(linear)):
        return kernels.bias_gelu(F.linear(operand, linear.weight), linear.bias)
    return F.gelu(linear(operand))


def linear_geglu(linear: nn.Linear, operand: Float[Tensor, "*tokens D"]) -> Float[Tensor, "*tokens F"]:
    """GELU of the first half of the layer's 2F outputs, by the error function, times the second half.

    Reference: Shazeer 2020, "GLU variants improve transformer"; ModernBERT's feed-forward layers.
    """
    if kernels.usable(operand, parameters=_parameters(linear)):
        return kernels.geglu(F.linear(operand, linear.weight), linear.bias)
    left, right = F.linear(operand, linear.weight, linear.bias).chunk(2, -1)
    return F.gelu(left) * right


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def linear_activation(linear: nn.Linear, operand: Float[Tensor, "*tokens D"], activation: str) -> Float[Tensor, "*tokens F"]:
    """The activation, by its name in the configuration, of the layer's output."""
    if activation == "gelu":
        return linear_gelu(linear, operand)
    return _ACTIVATIONS[activation](linear(operand))


def linear_residual_norm(
    linear: nn.Linear,
    operand: Float[Tensor, "*tokens F"],
    residual: Float[Tensor, "*tokens D"],
    norm: nn.LayerNorm,
    dropout: Dropout,
) -> States:
    """LayerNorm(residual + dropout(linear(operand))): the end of each half of a post-norm block."""
    if kernels.usable(operand, parameters=_parameters(linear, norm)) and residual.dtype == torch.float32:
        part = F.linear(operand, linear.weight)
        return States(*kernels.residual_norm(part, linear.bias, residual, norm, dropout.active, part.dtype == torch.bfloat16))
    return as_states(norm(residual + dropout(linear(operand))))


def linear_add_norm(
    linear: nn.Linear,
    operand: Float[Tensor, "*tokens F"],
    residual: Float[Tensor, "*tokens D"],
    norm: nn.LayerNorm,
    dropout: Dropout,
) -> States:
    """residual + dropout(linear(operand)), and its LayerNorm as the operand: the end of each half of a pre-norm block."""
    if kernels.usable(operand, parameters=_parameters(linear, norm)) and residual.dtype == torch.float32:
        part = F.linear(operand, linear.weight)
        low = part.dtype == torch.bfloat16
        return States(*kernels.residual_norm(part, linear.bias, residual, norm, dropout.active, low, keeps_sum=True))
    total = residual + dropout(linear(operand))
    return States(total, norm(total))


def normalized(norm: nn.LayerNorm, hidden: Float[Tensor, "*tokens D"]) -> States:
    """LayerNorm of the states: the beginning of each half of a pre-norm block."""
    if kernels.usable(hidden, parameters=_parameters(norm)):
        low = torch.is_autocast_enabled("cpu")
        return States(*kernels.residual_norm(hidden, None, None, norm, 0.0, low))
    return as_states(norm(hidden))


def _parameters(*layers: nn.Linear | nn.LayerNorm) -> list[Tensor]:
    """Weights of the layers, and their biases where they have one."""
    return [weight for layer in layers for weight in (layer.weight, layer.bias) if weight is not None]
