"""The operations between the matrix products of a block: one fused kernel each on the CPU, torch's functions elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.models.dropout import Dropout


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
        return States(*kernels.add_norm(part, linear.bias, residual, norm, dropout.active, part.dtype == torch.bfloat16))
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
