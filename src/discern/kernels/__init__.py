"""Fused operations for CPUs, compiled on first use; callers have a plain PyTorch path for machines without a C compiler."""

from discern.kernels.build import load_kernels
from discern.kernels.functions import (
    adamw,
    add_norm,
    attention,
    bias_gelu,
    cross_entropy_sum,
    dense,
    dropout,
    geglu,
    gradient_norm,
    relative_softmax,
    residual_norm,
    rotary,
    sample,
    scale_gradients,
    switched_off,
    threshold,
    usable,
)

__all__ = [
    "adamw",
    "add_norm",
    "attention",
    "bias_gelu",
    "cross_entropy_sum",
    "dense",
    "dropout",
    "geglu",
    "gradient_norm",
    "load_kernels",
    "relative_softmax",
    "residual_norm",
    "rotary",
    "sample",
    "scale_gradients",
    "switched_off",
    "threshold",
    "usable",
]
