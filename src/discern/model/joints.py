"""What joins the matrix products of a block: one kernel each on the CPU, torch's own functions elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.model.dropout import Dropout


class States(NamedTuple):
    """Hidden states, and the copy that the next product reads.

    Attributes:
        values: what residuals and norms work on; float32 wherever norms are computed in it.
        operand: the same in the precision of the products, so that it is rounded once, not once a product.
    """

    values: Float[Tensor, "*tokens D"]
    operand: Float[Tensor, "*tokens D"]


def as_states(hidden: Float[Tensor, "*tokens D"]) -> States:
    """States from what a layer gave, whatever its precision."""
    return States(hidden.float() if hidden.dtype == torch.bfloat16 else hidden, hidden)


def linear_gelu(linear: nn.Linear, operand: Float[Tensor, "*tokens D"]) -> Float[Tensor, "*tokens F"]:
    """GELU of the layer's output, by the error function, as BERT and ELECTRA have it."""
    if kernels.usable(operand, parameters=[linear.weight, linear.bias]):
        return kernels.bias_gelu(F.linear(operand, linear.weight), linear.bias)
    return F.gelu(linear(operand))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def linear_activation(linear: nn.Linear, operand: Float[Tensor, "*tokens D"], activation: str) -> Float[Tensor, "*tokens F"]:
    """The activation of that name, as the configuration has it, of the layer's output."""
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
    needed = [weight for weight in (linear.weight, linear.bias, norm.weight, norm.bias) if weight is not None]
    if kernels.usable(operand, parameters=needed) and residual.dtype == torch.float32:
        part = F.linear(operand, linear.weight)
        return States(*kernels.residual_norm(part, linear.bias, residual, norm, dropout.active, part.dtype == torch.bfloat16))
    return as_states(norm(residual + dropout(linear(operand))))


def normalised(norm: nn.LayerNorm, hidden: Float[Tensor, "*tokens D"]) -> States:
    """LayerNorm of the states: the beginning of each half of a pre-norm block."""
    if kernels.usable(hidden, parameters=[norm.weight, norm.bias]):
        low = torch.is_autocast_enabled("cpu")
        return States(*kernels.residual_norm(hidden, None, None, norm, 0.0, low))
    return as_states(norm(hidden))
